"""Parts that the kernels of pallas_gpu and pallas_gpu_backward share: which tiles are visited, how
one is read, and its scores.

Shapes: T query time  S key time  H head dim  V value head dim  Q queries of a tile  K keys of a
tile  R rows and C columns of whatever is tiled.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from maxstack.kernels import triton
from maxstack.kernels.attention import bounds
from maxstack.kernels.attention.bounds import Bounds
from maxstack.kernels.attention.request import AttentionCase, Same, within

LOG2E = math.log2(math.e)
NOTHING = -1e30
"""Largest score before the first key. Masked scores are -inf, below this, so that a query without
keys adds nothing."""
Parts = tuple[jax.Array, ...]
"""A tile, cut along the head dim into pieces whose sizes are powers of two."""


class Sizes(NamedTuple):
    """One kernel's tiles, and how Triton compiles it."""

    q: int
    k: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(AttentionCase):
    """A case, and the sizes for which its kernels are traced."""

    forward: Sizes
    dq: Sizes
    dkv: Sizes
    interpret: bool = False

    @property
    def steepness(self) -> float:
        """Factor that makes a `score` an exponent of 2."""
        return (self.request.soft_cap or self.request.scale) * LOG2E


def pieces(dim: int) -> list[tuple[int, int]]:
    """(start, size) of one or two powers of two that hold `dim`: Triton knows no other sizes. 192
    is 128 and 64, 112 is 128, the last 16 empty."""
    first = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - first
    if rest <= 0:
        return [(0, first)]
    second = max(16, 1 << (rest - 1).bit_length())
    return [(0, first), (first, second)] if second < first else [(0, 2 * first)]


def padded(dim: int) -> int:
    """The least size that `pieces` fill."""
    return sum(size for _, size in pieces(dim))


def blocks(total: int, size: int) -> int:
    """Number of blocks of `size` that hold `total`."""
    return -(-total // size)


class Spans(NamedTuple):
    """For each block of rows, the blocks of columns from `first` to before `last` are visited;
    those from `whole` to before `broken` need no mask."""

    table: jax.Array
    """int32 [B or 1, blocks of rows, 4]: first, whole, broken, last."""
    loops: tuple[bool, bool, bool]
    """Some row has columns before `whole`; before `broken`; after it."""
    visits: int
    """Tiles that are visited where no number hides one."""


def of_queries(call: Call, sizes: Sizes, same: Same) -> Spans:
    """Blocks of keys for each block of queries."""
    t, s, (q, k, *_) = call.queries, call.keys, sizes
    visited = [
        bounds.keys_of(call.request, start, min(q, t - start), s, k) for start in range(0, t, q)
    ]
    return _spans(visited, (q, k), blocks(s, k), same)


def of_keys(call: Call, sizes: Sizes, same: Same) -> Spans:
    """Blocks of queries for each block of keys."""
    t, s, (q, k, *_) = call.queries, call.keys, sizes
    visited = [
        bounds.queries_of(call.request, start, min(k, s - start), t, q) for start in range(0, s, k)
    ]
    return _spans(visited, (k, q), blocks(t, q), tuple((theirs, mine) for mine, theirs in same))


def _spans(visited: list[Bounds], sizes: tuple[int, int], count: int, same: Same) -> Spans:
    """`sizes`: rows and columns of a block; `count`: blocks of columns."""
    first, whole, broken, last = np.array(visited).T
    whole, broken = np.where(whole < broken, (whole, broken), last)
    table = np.stack([first, whole, broken, last], axis=1)
    visits = int((last - first).sum())
    if same:
        met = _where_numbers_meet(table, sizes, count, same)
        return Spans(met, (True, True, True), visits)
    before, without, after = (bool((low < high).any()) for low, high in itertools.pairwise(table.T))
    return Spans(jnp.asarray(table[None], jnp.int32), (before, without, after), visits)


def _where_numbers_meet(
    table: np.ndarray, sizes: tuple[int, int], count: int, same: Same
) -> jax.Array:
    """The table, of blocks of columns with a number between the least and the greatest of the rows'
    block; whole are those of one number."""
    first, whole, broken, last = (jnp.asarray(x, jnp.int32)[None, :, None] for x in table.T)
    at = jnp.arange(count, dtype=jnp.int32)
    live, full = (at >= first) & (at < last), (at >= whole) & (at < broken)
    for mine, theirs in same:
        least, most = (x[:, :, None] for x in _range(mine, sizes[0]))
        low, high = (x[:, None, :] for x in _range(theirs, sizes[1]))
        live, full = (
            live & (least <= high) & (low <= most),
            full & (least == most) & (low == high) & (least == low),
        )
    last = jnp.max(jnp.where(live, at + 1, 0), axis=2)
    first = jnp.minimum(jnp.min(jnp.where(live, at, count), axis=2), last)
    whole = jnp.min(jnp.where(full, at, last[:, :, None]), axis=2)
    broken = jnp.min(jnp.where(full | (at < whole[:, :, None]), last[:, :, None], at), axis=2)
    return jnp.stack([first, whole, jnp.clip(broken, whole, last), last], axis=2)


def _range(numbers: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest number of each block of `size`."""
    b, t = numbers.shape
    x = jnp.pad(numbers, ((0, 0), (0, blocks(t, size) * size - t)), mode="edge").reshape(
        b, -1, size
    )
    return x.min(axis=2), x.max(axis=2)


def of_row(x: jax.Array, b: Any) -> Any:
    """Index of row `b` of the batch in x [B or 1, ...]."""
    return b if x.shape[0] > 1 else 0


Blocked = tuple[Any, pl.BlockSpec]
"""An array and its blocks."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Blocks of arrays for a kernel that takes a block of queries of one head and loops over keys,
    or `by_keys` a block of keys of one kv head and loops over the queries of its heads. Its grid is
    (blocks, heads or kv heads, B)."""

    call: Call
    sizes: Sizes
    same: Same
    by_keys: bool = False

    @functools.cached_property
    def spans(self) -> Spans:
        """Blocks that each block meets."""
        return (of_keys if self.by_keys else of_queries)(self.call, self.sizes, self.same)

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks of queries and of keys."""
        return blocks(self.call.queries, self.sizes.q), blocks(self.call.keys, self.sizes.k)

    def row(self, i: Any) -> Any:
        """The block of program `i`: causal queries from the last, which sees most, to the first."""
        return self.counts[0] - 1 - i if self.call.request.causal and not self.by_keys else i

    def queries(self, dim: int) -> pl.BlockSpec:
        """Blocks of [B, T, N, dim]."""
        size, groups = self._shape[0], self.call.groups if self.by_keys else None
        return pl.BlockSpec(
            (None, size, groups, padded(dim)), lambda i, n, b: (b, self._at(i, 0), n, 0)
        )

    def keys(self, dim: int) -> pl.BlockSpec:
        """Blocks of [B, S, K, dim]."""
        size, groups = self._shape[1], 1 if self.by_keys else self.call.groups
        return pl.BlockSpec(
            (None, size, None, padded(dim)), lambda i, n, b: (b, self._at(i, 1), n // groups, 0)
        )

    def logs(self) -> pl.BlockSpec:
        """Blocks of [B, N, T]."""
        groups = self.call.groups if self.by_keys else None
        return pl.BlockSpec((None, groups, self._shape[0]), lambda i, n, b: (b, n, self._at(i, 0)))

    def run(
        self,
        body: Callable[..., None],
        products: tuple[int, int],
        arrays: Sequence[jax.Array],
        outs: Sequence[Blocked],
        *more: Blocked,
    ) -> Any:
        """The outputs of `body`. Its references are those of `arrays`, a part of (q, k, v, the
        gradient of the result, two numbers of each query [B, N, T]); the numbers of queries and
        keys in turn; the spans; `more`; `outs`. `products`: products of each query and key over the
        head dim, and over the value's.

        Triton's custom call leaves the cost estimate out, but keeps the metadata.
        """
        call, sizes, h, v = self.call, self.sizes, self.call.head_dim, self.call.value_dim
        specs = self.queries(h), self.keys(h), self.keys(v), self.queries(v), *[self.logs()] * 2
        operands = [*zip(arrays, specs, strict=False), *self._masks(), *more]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in outs]
        inputs, b = tuple(x for x, _ in operands), arrays[0].shape[0]
        area = b * call.heads * self.spans.visits * sizes.q * sizes.k
        return triton.call(
            functools.partial(body, self),
            shapes,
            inputs,
            grid=(self.counts[self.by_keys], call.kv_heads if self.by_keys else call.heads, b),
            in_specs=[spec for _, spec in operands],
            out_specs=[spec for _, spec in outs],
            interpret=call.interpret,
            warps=sizes.warps,
            stages=sizes.stages,
            flops=2 * area * (products[0] * h + products[1] * v),
            transcendentals=area,
        )

    @property
    def _shape(self) -> tuple[int, int]:
        """Queries and keys of a block: one tile of one side, all of the other."""
        (q, k, *_), (of_q, of_k) = self.sizes, self.counts
        return (of_q * q, k) if self.by_keys else (q, of_k * k)

    def _at(self, i: Any, side: int) -> Any:
        """The block of queries (side 0) or keys (side 1) of program `i`."""
        return self.row(i) if side == self.by_keys else 0

    def _masks(self) -> list[Blocked]:
        """The numbers of queries and keys in turn, then the spans."""
        table = self.spans.table
        return [
            *(
                (
                    x,
                    pl.BlockSpec(
                        (None, size),
                        lambda i, n, b, x=x, side=side: (of_row(x, b), self._at(i, side)),
                    ),
                )
                for pair in self.same
                for side, (x, size) in enumerate(zip(pair, self._shape, strict=True))
            ),
            (
                table,
                pl.BlockSpec((None, None, 4), lambda i, n, b: (of_row(table, b), self.row(i), 0)),
            ),
        ]


def over(spans: Spans, spans_ref: Any, visit: Callable[..., Any], state: Any) -> Any:
    """The state after every block of columns. `visit(masked, block, state)` gives the next one."""
    edges = [spans_ref[n] for n in range(4)]
    for n, masked in enumerate((True, False, True)):
        low, high = edges[n], edges[n + 1]
        if spans.loops[n]:
            state = jax.lax.fori_loop(
                low, high, lambda at, state, masked=masked: visit(masked, at, state), state
            )
    return state


def block(
    at: Any, size: int, total: int, masked: bool = True
) -> tuple[Any, jax.Array, jax.Array | None]:
    """(slice, indices, which of them exist; None: all) of block number `at`."""
    index = at * size + jnp.arange(size)
    return pl.ds(at * size, size), index, index < total if masked and total % size else None


def read(ref: Any, index: tuple[Any, ...], dim: int, inside: jax.Array | None = None) -> Parts:
    """A tile [rows, dim] of `ref` at the rows (and head) `index`; zeros past `dim`, and at rows
    that are not `inside`."""
    return tuple(
        triton.load_tile(
            ref.at[(*index, pl.ds(start, size))], inside, triton.inside(start, size, dim)
        )
        for start, size in pieces(dim)
    )


def write(ref: Any, tile: Sequence[jax.Array], dim: int, inside: jax.Array | None) -> None:
    """The reverse of `read`, to the rows of a block, in the dtype of `ref`."""
    for (start, size), part in zip(pieces(dim), tile, strict=True):
        columns = triton.inside(start, size, dim)
        triton.store_tile(ref.at[:, pl.ds(start, size)], part, inside, columns)


def zeros(rows: int, dim: int) -> Parts:
    """A tile before anything is added: float32."""
    return tuple(jnp.zeros((rows, size), jnp.float32) for _, size in pieces(dim))


def dot(call: Call, a: jax.Array, b: jax.Array, axes: tuple[int, int] = (1, 0)) -> jax.Array:
    """A product over one axis of each. Of float32 as three of its upper bits and the rest: a
    tensor core alone would keep 10 bits of 23."""
    precision = None
    if call.dtype == "float32":
        precision = (
            jax.lax.Precision.HIGHEST
            if call.interpret
            else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        )
    return jax.lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def across(call: Call, a: Parts, b: Parts) -> jax.Array:
    """a b^T, over the head dim."""
    products = [dot(call, x, y, (1, 1)) for x, y in zip(a, b, strict=True)]
    return sum(products[1:], products[0])


def add(call: Call, total: Parts, a: jax.Array, b: Parts) -> Parts:
    """total + a b."""
    return tuple(x + dot(call, a, y) for x, y in zip(total, b, strict=True))


def score(call: Call, raw: jax.Array) -> jax.Array:
    """The score over its factor: q.k itself, or its tanh under a soft cap. tanh is made of an
    exponential, to 1e-7: the hardware's own keeps 11 bits."""
    cap = call.request.soft_cap
    if not cap:
        return raw
    return 1 - 2 / (1 + jnp.exp2(raw * (2 * LOG2E * call.request.scale / cap)))


def slope(call: Call, grad: jax.Array, scores: jax.Array) -> jax.Array:
    """The gradient of q.k * scale from that of the `score`."""
    return grad * (1 - scores * scores) if call.request.soft_cap else grad


def hide(
    call: Call,
    scores: jax.Array,
    at_q: jax.Array,
    at_k: jax.Array,
    own: Sequence[jax.Array],
    others: Sequence[Any],
    columns: Any,
    inside: jax.Array | None,
) -> jax.Array:
    """Scores, -inf where the query does not see the key. `own` are the numbers of the rows
    [rows, 1], `others` references to those of the columns, of which those `inside` exist; indices
    of queries and keys broadcast against the scores."""
    masks = [] if inside is None else [inside[None, :]]
    for row, ref in zip(own, others, strict=True):
        masks.append(row == triton.load(ref.at[columns], inside)[None, :])
    masks += within(call.request, at_q + call.request.offset - at_k)
    if not masks:
        return scores
    return jnp.where(functools.reduce(jnp.logical_and, masks), scores, -jnp.inf)
