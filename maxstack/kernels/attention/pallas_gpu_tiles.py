"""What the kernels of pallas_gpu and pallas_gpu_backward share: which tiles there are, how one is
read, and what its scores are.

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
from jax.experimental.pallas import triton as plgpu

from maxstack.kernels import triton
from maxstack.kernels.attention.request import Request, Same

LOG2E = math.log2(math.e)
NOTHING = -1e30
"""Largest score before the first key. What is masked is -inf, below this, so that a query that sees
nothing gathers nothing."""
FAR = 1 << 40
Parts = tuple[jax.Array, ...]
"""A tile, cut along the head dim into pieces whose sizes are powers of two."""


class Sizes(NamedTuple):
    """One kernel's tiles, and how Triton compiles it."""

    q: int
    k: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Call:
    """All that is known when a kernel is traced."""

    request: Request
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    numbered: int
    forward: Sizes
    dq: Sizes
    dkv: Sizes
    interpret: bool = False

    @property
    def groups(self) -> int:
        """Heads that share keys and values."""
        return self.heads // self.kv_heads

    @property
    def steepness(self) -> float:
        """What `score` is multiplied by to be an exponent of 2."""
        return (self.request.soft_cap or self.request.scale) * LOG2E

    @property
    def reach(self) -> tuple[int, int]:
        """The least and the greatest distance from a query back to a key that it can see."""
        back = self.request.reach - 1 if self.request.reach else FAR
        return (0 if self.request.causal else -back), back


def pieces(dim: int) -> list[tuple[int, int]]:
    """(start, size) of one or two powers of two that hold `dim`: Triton knows no other sizes. 192
    is 128 and 64, 112 is 128, the last 16 empty."""
    most = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - most
    if rest <= 0:
        return [(0, most)]
    second = max(16, 1 << (rest - 1).bit_length())
    return [(0, most), (most, second)] if second < most else [(0, 2 * most)]


def padded(dim: int) -> int:
    """The least size that `pieces` fill."""
    return sum(size for _, size in pieces(dim))


def blocks(total: int, size: int) -> int:
    """How many blocks of `size` hold `total`."""
    return -(-total // size)


class Spans(NamedTuple):
    """For each block of rows, the blocks of columns from `first` to before `last` are visited;
    those from `whole` to before `broken` need no mask."""

    table: jax.Array
    """int32 [B or 1, blocks of rows, 4]: first, whole, broken, last."""
    loops: tuple[bool, bool, bool]
    """Whether any row has columns before `whole`, before `broken`, after it."""
    visits: int
    """Tiles that are visited where no number hides one."""


def of_queries(call: Call, sizes: Sizes, same: Same) -> Spans:
    """Blocks of keys for each block of queries."""
    low, high = (limit - call.request.offset for limit in call.reach)
    return _spans((call.queries, sizes.q), (call.keys, sizes.k), (low, high), same)


def of_keys(call: Call, sizes: Sizes, same: Same) -> Spans:
    """Blocks of queries for each block of keys."""
    low, high = (call.request.offset - limit for limit in reversed(call.reach))
    return _spans(
        (call.keys, sizes.k),
        (call.queries, sizes.q),
        (low, high),
        tuple((theirs, mine) for mine, theirs in same),
    )


def _spans(
    rows: tuple[int, int], columns: tuple[int, int], limits: tuple[int, int], same: Same
) -> Spans:
    """Row r sees column c only where low <= r - c <= high, and their numbers are equal. `rows` and
    `columns`: how many, and of a block."""
    (r, row), (c, column), (low, high) = rows, columns, limits
    begin = np.arange(blocks(r, row), dtype=np.int64) * row
    end = np.minimum(begin + row, r) - 1
    last = np.clip((end - low) // column + 1, 0, blocks(c, column))
    first = np.minimum(np.maximum(begin - high, 0) // column, last)
    whole = np.clip(-((high - end) // column), first, last)
    broken = np.clip(np.minimum((begin - low + 1) // column, c // column), whole, last)
    whole, broken = np.where(whole < broken, (whole, broken), last)
    table = np.stack([first, whole, broken, last], axis=1)
    visits = int((last - first).sum())
    if same:
        return Spans(
            _where_numbers_meet(table, (row, column), blocks(c, column), same),
            (True, True, True),
            visits,
        )
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
    """Where row `b` of the batch lies in x [B or 1, ...]."""
    return b if x.shape[0] > 1 else 0


@dataclasses.dataclass(frozen=True)
class ByQuery:
    """Which parts of arrays a kernel sees that takes a block of queries of one head, and loops over
    keys. Its grid is (blocks of queries, N, B)."""

    call: Call
    sizes: Sizes
    spans: Spans

    @property
    def count(self) -> int:
        """Blocks of queries."""
        return blocks(self.call.queries, self.sizes.q)

    def row(self, i: Any) -> Any:
        """The block of queries whose turn is number `i`: causal ones from the last, which sees
        most, to the first."""
        return self.count - 1 - i if self.call.request.causal else i

    def queries(self, dim: int) -> pl.BlockSpec:
        """Of [B, T, N, dim]."""
        return pl.BlockSpec(
            (None, self.sizes.q, None, padded(dim)), lambda i, n, b: (b, self.row(i), n, 0)
        )

    def keys(self, dim: int) -> pl.BlockSpec:
        """Of [B, S, K, dim]: all keys of a head."""
        return pl.BlockSpec(
            (None, self._columns, None, padded(dim)),
            lambda i, n, b: (b, 0, n // self.call.groups, 0),
        )

    def logs(self) -> pl.BlockSpec:
        """Of [B, N, T]."""
        return pl.BlockSpec((None, None, self.sizes.q), lambda i, n, b: (b, n, self.row(i)))

    def masks(self, same: Same) -> list[tuple[jax.Array, pl.BlockSpec]]:
        """The numbers of queries and keys in turn, then the spans."""
        found = []
        for mine, theirs in same:
            found += [
                (
                    mine,
                    pl.BlockSpec(
                        (None, self.sizes.q), lambda i, n, b, x=mine: (of_row(x, b), self.row(i))
                    ),
                ),
                (
                    theirs,
                    pl.BlockSpec(
                        (None, self._columns), lambda i, n, b, x=theirs: (of_row(x, b), 0)
                    ),
                ),
            ]
        table = self.spans.table
        return [
            *found,
            (
                table,
                pl.BlockSpec((None, None, 4), lambda i, n, b: (of_row(table, b), self.row(i), 0)),
            ),
        ]

    @property
    def _columns(self) -> int:
        return blocks(self.call.keys, self.sizes.k) * self.sizes.k


def over(spans: Spans, spans_ref: Any, visit: Callable[..., Any], state: Any) -> Any:
    """The state after every block of columns. `visit(masked, block, state)` gives the next one."""
    edges = [spans_ref[n] for n in range(4)]
    for present, masked, low, high in zip(
        spans.loops, (True, False, True), edges, edges[1:], strict=False
    ):
        if present:
            state = jax.lax.fori_loop(
                low, high, lambda at, state, masked=masked: visit(masked, at, state), state
            )
    return state


def read(ref: Any, index: tuple[Any, ...], dim: int, inside: jax.Array | None = None) -> Parts:
    """A tile [rows, dim] of `ref` at the rows (and head) `index`; zeros past `dim`, and at rows
    that are not `inside`."""
    found = []
    for start, size in pieces(dim):
        mask = None if inside is None else inside[:, None]
        if start + size > dim:
            within = (start + jnp.arange(size) < dim)[None, :]
            mask = within if mask is None else mask & within
        found.append(
            plgpu.load(
                ref.at[(*index, pl.ds(start, size))], mask=mask, other=None if mask is None else 0.0
            )
        )
    return tuple(found)


def write(ref: Any, tile: Sequence[jax.Array], dim: int, inside: jax.Array | None) -> None:
    """The reverse of `read`, to the rows of a block, in the type of `ref`."""
    for (start, size), part in zip(pieces(dim), tile, strict=True):
        mask = None if inside is None else inside[:, None]
        if start + size > dim:
            within = (start + jnp.arange(size) < dim)[None, :]
            mask = within if mask is None else mask & within
        plgpu.store(ref.at[:, pl.ds(start, size)], part.astype(ref.dtype), mask=mask)


def read_row(ref: Any, index: tuple[Any, ...], inside: jax.Array | None) -> jax.Array:
    """One number for each row of a tile; 0 at rows that are not `inside`."""
    return plgpu.load(ref.at[index], mask=inside, other=None if inside is None else 0)


def write_row(ref: Any, row: jax.Array, inside: jax.Array | None) -> None:
    """The reverse of `read_row`."""
    plgpu.store(ref.at[:], row, mask=inside)


def zeros(rows: int, dim: int) -> Parts:
    """What a tile is before anything is added: float32."""
    return tuple(jnp.zeros((rows, size), jnp.float32) for _, size in pieces(dim))


def dot(call: Call, a: jax.Array, b: jax.Array, over: tuple[int, int] = (1, 0)) -> jax.Array:
    """A product over one dimension of each. Of float32 as three of its upper bits and the rest: a
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
        (((over[0],), (over[1],)), ((), ())),
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
    """What rises with the score: q.k itself, or its tanh. tanh is made of an exponential, to 1e-7:
    the hardware's own keeps 11 bits."""
    cap = call.request.soft_cap
    if not cap:
        return raw
    return 1 - 2 / (1 + jnp.exp2(raw * (2 * LOG2E * call.request.scale / cap)))


def slope(call: Call, grad: jax.Array, found: jax.Array) -> jax.Array:
    """The gradient of q.k * scale from that of the score; `found` is what `score` gave."""
    return grad * (1 - found * found) if call.request.soft_cap else grad


def hide(
    call: Call,
    found: jax.Array,
    at_q: jax.Array,
    at_k: jax.Array,
    numbers: Sequence[tuple[jax.Array, jax.Array]],
    guards: Sequence[jax.Array],
) -> jax.Array:
    """Scores, -inf where the query does not see the key. All that tells of one and the other
    broadcasts against the scores."""
    request, distance = call.request, at_q + call.request.offset - at_k
    masks = [*guards, *(mine == theirs for mine, theirs in numbers)]
    if request.causal:
        masks.append(distance >= 0)
    if request.window:
        masks.append(distance < request.window)
        if not request.causal:
            masks.append(distance > -request.window)
    return jnp.where(functools.reduce(jnp.logical_and, masks), found, -jnp.inf) if masks else found


def kernel(
    call: Call,
    body: Callable[..., None],
    sizes: Sizes,
    visits: int,
    products: tuple[int, int],
    *,
    grid: tuple[int, int, int],
    given: Sequence[tuple[jax.Array, pl.BlockSpec]],
    wanted: Sequence[tuple[Any, pl.BlockSpec]],
) -> Any:
    """What `body` writes. `products`: how often each query meets each key over the head dim, and
    over the value's.

    Triton's custom call leaves the cost estimate out, but keeps the metadata.
    """
    arrays, shapes = [x for x, _ in given], [x for x, _ in wanted]
    area = arrays[0].shape[0] * call.heads * visits * sizes.q * sizes.k
    flops = 2 * area * (products[0] * call.head_dim + products[1] * call.value_dim)
    return triton.call(
        body,
        shapes,
        tuple(arrays),
        grid=grid,
        in_specs=[spec for _, spec in given],
        out_specs=[spec for _, spec in wanted],
        interpret=call.interpret,
        warps=sizes.warps,
        stages=sizes.stages,
        flops=flops,
        transcendentals=area,
        moved=triton.size_of(*arrays, *shapes),
    )
