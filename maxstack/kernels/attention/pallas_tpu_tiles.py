"""Tiles of the TPU kernel for attention: which of them are computed and which are fetched, and the
layout of arrays in them.

A tile is `block_q` queries of `heads` heads, one head after another, against `block_k` keys of the
kv head that they share. Shapes: B batch  T query time  S key time  N heads  K kv heads  C shares of
the heads of a kv head  R rows of a tile of queries  H head dim.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.kernels.attention.bounds import keys_of
from maxstack.kernels.attention.request import Inputs, Request, Same

LANES = 128
FIRST, LAST, WHOLE, HIDDEN = 1, 2, 4, 8
"""Marks of a tile: the first and the last of its row of tiles; every query sees every key; not
computed, only there to write zeros."""
MOST_BLOCKS = 8192
MOST_TILES = 65536
"""Tiles that scalar memory holds, 4 bytes each."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tiles of one kernel over T queries and S keys: for each major block, of queries or `by_keys`
    of keys, the minor blocks that it meets."""

    request: Request
    queries: int
    keys: int
    heads: int
    shares: int
    block_q: int
    block_k: int
    by_keys: bool = False
    pairs: int = 0
    """Pairs of numbers that must be equal."""
    rows_of_numbers: int = 1

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.heads * self.block_q

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks of queries and blocks of keys."""
        return -(-self.queries // self.block_q), -(-self.keys // self.block_k)

    @property
    def padded(self) -> tuple[int, int]:
        """Queries and keys in whole blocks."""
        return self.counts[0] * self.block_q, self.counts[1] * self.block_k

    def bounded(self) -> tuple[np.ndarray, np.ndarray]:
        """bool [blocks of queries, blocks of keys]: some query may see some key, and every query
        sees every key, numbers apart."""
        visited = [
            keys_of(
                self.request,
                start,
                min(self.block_q, self.queries - start),
                self.keys,
                self.block_k,
            )
            for start in range(0, self.queries, self.block_q)
        ]
        first, whole, broken, last = np.array(visited).T[:, :, None]
        at = np.arange(self.counts[1])
        return (first <= at) & (at < last), (whole <= at) & (at < broken)

    def tiles(self) -> np.ndarray:
        """int32 [tiles]: block of queries << 18 | block of keys << 4 | marks, row by row of tiles.
        A row that sees nothing has one, hidden."""
        seen, whole = (x.T if self.by_keys else x for x in self.bounded())
        lone: np.ndarray = np.logical_not(seen.any(axis=1))
        listed = seen.copy()
        listed[lone, 0] = True
        major, minor = np.nonzero(listed)
        first = np.r_[True, major[1:] != major[:-1]]
        marks = (
            first * FIRST
            + np.r_[first[1:], True] * LAST
            + whole[major, minor] * WHOLE
            + lone[major] * HIDDEN
        )
        i, j = (minor, major) if self.by_keys else (major, minor)
        return (i << 18 | j << 4 | marks).astype(np.int32)

    def computed(self) -> int:
        """Tiles within the bounds of positions, of one head and row of the batch."""
        return int(self.bounded()[0].sum())

    def ranges(self, same: Same) -> jax.Array:
        """int32: for each major block the first and last minor block whose numbers may meet its
        own, then the least and greatest numbers of blocks.

        No order of the numbers is assumed: blocks whose ranges are apart cannot meet, others may.
        """
        meet, limits = jnp.asarray(self.bounded()[0])[None], []
        for mine, theirs in same:
            q_low, q_high = self._limits(mine, self.counts[0], self.block_q)
            k_low, k_high = self._limits(theirs, self.counts[1], self.block_k)
            meet = (
                meet
                & (q_low[:, :, None] <= k_high[:, None])
                & (k_low[:, None] <= q_high[:, :, None])
            )
            limits += [q_low, q_high, k_low, k_high]
        meet = jnp.broadcast_to(meet, (self.rows_of_numbers, *meet.shape[1:]))
        meet = meet.swapaxes(1, 2) if self.by_keys else meet
        last = meet.shape[2] - 1 - jnp.argmax(meet[:, :, ::-1], axis=2)
        ends = [jnp.argmax(meet, axis=2), jnp.where(meet.any(axis=2), last, 0)]
        return jnp.concatenate([x.astype(jnp.int32).reshape(-1) for x in (*ends, *limits)])

    def _limits(self, numbers: jax.Array, count: int, size: int) -> tuple[jax.Array, jax.Array]:
        blocks = self.numbers(numbers, count * size).reshape(-1, count, size)
        return blocks.min(axis=2), blocks.max(axis=2)

    def numbers(self, numbers: jax.Array, length: int) -> jax.Array:
        """int32 [rows_of_numbers, length]: the last one goes on to the end, where it widens no
        range."""
        wide = jnp.broadcast_to(numbers.astype(jnp.int32), (self.rows_of_numbers, numbers.shape[1]))
        return jnp.pad(wide, ((0, 0), (0, length - numbers.shape[1])), mode="edge")

    def clipped(
        self, tile: jax.Array, ranges: jax.Array, row: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(block of queries, block of keys, side) to fetch for a tile. A block before (side -1) or
        after (side 1) all that its row of tiles meets is not fetched: the first or the last that
        the row does meet stays instead."""
        i, j = tile >> 18, tile >> 4 & (1 << 14) - 1
        if not self.pairs:
            return i, j, jnp.zeros_like(i)
        major, minor, count = (j, i, self.counts[1]) if self.by_keys else (i, j, self.counts[0])
        at = self.row(row) * count + major
        low, high = ranges[at], ranges[self.rows_of_numbers * count + at]
        side = jnp.where(minor < low, -1, jnp.where(minor > high, 1, 0))
        held = jnp.minimum(jnp.maximum(minor, low), high)
        return (held, j, side) if self.by_keys else (i, held, side)

    def row(self, row: jax.Array) -> jax.Array:
        """The row of numbers for a row of the batch."""
        return row if self.rows_of_numbers > 1 else row * 0

    def state(
        self, tile: jax.Array, ranges: jax.Array, row: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(may some query see some key, does every query see every key), with the numbers."""
        i, j, n = tile >> 18, tile >> 4 & (1 << 14) - 1, self.rows_of_numbers
        some, every = tile & HIDDEN == 0, tile & WHOLE != 0
        at = 2 * n * self.counts[self.by_keys]
        for _ in range(self.pairs):
            limits = []
            for count, block in zip(self.counts, (i, j), strict=True):
                first = at + self.row(row) * count + block
                limits += [ranges[first], ranges[first + n * count]]
                at += 2 * n * count
            q_low, q_high, k_low, k_high = limits
            some = some & (q_low <= k_high) & (k_low <= q_high)
            every = every & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        return some, every

    def arrays(self, inputs: Inputs) -> list[jax.Array]:
        """q, k and v in the layout of the tiles."""
        q, k, v, *_ = inputs
        return [self.of_queries(q), self.of_keys(k), self.of_keys(v)]

    def of_queries(self, x_BTNH: jax.Array) -> jax.Array:
        """[B, K, C, blocks x R, H]: the rows of one tile lie together. H becomes a multiple of
        128."""
        return self._rows(jnp.pad(x_BTNH, ((0, 0),) * 3 + ((0, -x_BTNH.shape[3] % LANES),)))

    def in_lanes(self, x_BNT: jax.Array) -> jax.Array:
        """[B, K, C, 1, blocks x R]: a number for each row of the tiles."""
        return self._rows(x_BNT.swapaxes(1, 2))[:, :, :, None]

    def _rows(self, x_BTN: jax.Array) -> jax.Array:
        """[B, T, N, ..] -> [B, K, C, blocks x R, ..]."""
        (b, t, _, *rest), n = x_BTN.shape, self.counts[0]
        x = jnp.pad(x_BTN, ((0, 0), (0, n * self.block_q - t), *((0, 0),) * (x_BTN.ndim - 2)))
        x = x.reshape(b, n, self.block_q, -1, self.shares, self.heads, *rest)
        x = x.transpose(0, 3, 4, 1, 5, 2, *range(6, x.ndim))
        return x.reshape(b, -1, self.shares, n * self.rows, *rest)

    def by_time(self, x: jax.Array, h: int) -> jax.Array:
        """[B, T, N, H] again."""
        b, kv, n = *x.shape[:2], self.counts[0]
        x = x.reshape(b, kv, self.shares, n, self.heads, self.block_q, -1).transpose(
            0, 3, 5, 1, 2, 4, 6
        )
        return x.reshape(b, n * self.block_q, kv * self.shares * self.heads, -1)[
            :, : self.queries, :, :h
        ]

    def of_keys(self, x_BSKH: jax.Array) -> jax.Array:
        """[B, K, S, H] with S a multiple of the block and H of 128."""
        s, h = x_BSKH.shape[1], x_BSKH.shape[3]
        rest = (0, 0), (0, self.padded[1] - s), (0, 0), (0, -h % LANES)
        return jnp.pad(x_BSKH, rest).swapaxes(1, 2)


def sizes_to_measure(
    default: dict[str, int], fits: Callable[[str, int], bool]
) -> list[dict[str, int]]:
    """Sizes of blocks, the default first; each of the others differs from it in one pass, and all
    of its sizes fit."""
    sizes = [default]
    for q in (256, 512, 1024):
        for keys, suffix in ((512, 1024, 2048), ""), ((512, 1024), "_dkv"):
            for k in keys:
                other = default | {f"block_q{suffix}": q, f"block_k{suffix}": k}
                if other not in sizes and all(fits(*size) for size in other.items()):
                    sizes.append(other)
    return sizes
