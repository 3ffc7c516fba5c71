"""The three Pallas kernels of attention on TPUs: forward, the gradient of queries, and the
gradients of keys and values.

Shapes: as in pallas_tpu_tiles.py; V value head dim, Q queries of a tile, W rows that are worked on
at once, J keys of a tile.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxstack.kernels.attention.pallas_tpu_tiles import FIRST, LANES, LAST, Tiling
from maxstack.kernels.attention.request import Same, within

FLOOR = -1e30
UNSEEN = 2 * FLOOR
"""Score of a hidden key: below the floor of the running maximum, so that a query without keys has
no weight at all."""
AT_ONCE = 256
"""Most rows of a tile that are computed at once."""
MEMORY = 48 << 20
"""Bytes of vector memory that a kernel may take."""

Blocked = tuple[jax.Array, pl.BlockSpec]
"""An array and its blocks."""
Seen = Callable[[Any], jax.Array] | None
"""Mask of some rows of a tile; None: every query sees every key."""


class Inputs(NamedTuple):
    """Arrays of the backward pass in the layout of a tiling: `do` is the gradient of the output,
    `mean` its product with the output, summed over V."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    do: jax.Array
    log: jax.Array
    mean: jax.Array


def forward(
    tiling: Tiling,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks_N: jax.Array | None,
    same: Same,
    interpret: Any,
) -> list[jax.Array]:
    """The output [B, K, C, blocks x R, V], and log-sum-exp of the scores [B, K, C, 1, blocks x R],
    float32, 0 where a query sees no key."""
    width = v.shape[-1]

    def kernel(tiles: Any, ranges: Any, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any) -> None:
        mine, theirs, rest = _pairs(tiling, refs)
        sinks, *rest = rest if sinks_N is not None else (None, *rest)
        o_ref, log_ref, acc, top, total, *columns = rest
        state = _now(tiling, tiles, ranges, 3)
        share = pl.program_id(1) * tiling.shares + pl.program_id(2)

        @pl.when(state[0] & FIRST != 0)
        def begin() -> None:
            for ref, value in ((acc, 0), (top, FLOOR), (total, 0)):
                ref[...] = jnp.full(ref.shape, value, jnp.float32)
            if sinks is not None:
                _sink(tiling, sinks, share, top, total)
            _stand(mine, columns)

        def part(seen: Seen, at: Any) -> None:
            s_WJ = _hide(seen, at, _scores(tiling, q_ref[at], k_ref[...]))
            top_W = jnp.maximum(top[at], s_WJ.max(axis=1, keepdims=True))
            p_WJ = jnp.exp(s_WJ - _wide(top_W, tiling.block_k))
            shrink_W = jnp.exp(top[at] - top_W)
            total[at] = total[at] * shrink_W + p_WJ.sum(axis=1, keepdims=True)
            acc[at] = acc[at] * _wide(shrink_W, width) + _dot(p_WJ.astype(v_ref.dtype), v_ref[...])
            top[at] = top_W

        _visit(tiling, state, columns, theirs, part)

        @pl.when(state[0] & LAST != 0)
        def end() -> None:
            weight = total[...]
            o_ref[...] = (acc[...] / _wide(jnp.where(weight == 0, 1, weight), width)).astype(
                o_ref.dtype
            )
            log_ref[...] = jnp.where(weight == 0, 0, top[...] + jnp.log(weight)).T[:1]

    specs = Specs(tiling)
    operands = [
        (q, specs.queries(q)),
        (k, specs.keys(k)),
        (v, specs.keys(v)),
        *specs.numbers(same),
    ]
    if sinks_N is not None:
        operands.append((sinks_N.astype(jnp.float32)[None], pl.BlockSpec(memory_space=pltpu.SMEM)))
    o = jax.ShapeDtypeStruct((*q.shape[:4], width), q.dtype)
    log = jax.ShapeDtypeStruct((*q.shape[:3], 1, q.shape[3]), jnp.float32)
    outs = [(o, specs.queries(o)), (log, specs.lanes)]
    widths = width, LANES, LANES
    return _call(
        "attention_forward", kernel, specs, operands, outs, widths, (1, 1), same, interpret
    )


def of_queries(tiling: Tiling, inputs: Inputs, same: Same, interpret: Any) -> jax.Array:
    """The gradient of queries, in their layout."""

    def kernel(tiles: Any, ranges: Any, *refs: Any) -> None:
        q_ref, k_ref, v_ref, do_ref, log_ref, mean_ref, *rest = refs
        mine, theirs, rest = _pairs(tiling, rest)
        dq_ref, acc, log_column, mean_column, *columns = rest
        state = _now(tiling, tiles, ranges, 3)

        @pl.when(state[0] & FIRST != 0)
        def begin() -> None:
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
            _stand([log_ref, mean_ref, *mine], [log_column, mean_column, *columns])

        def part(seen: Seen, at: Any) -> None:
            s_WJ = _scores(tiling, q_ref[at], k_ref[...])
            slope = _slope(tiling, s_WJ)
            p_WJ = jnp.exp(_hide(seen, at, s_WJ) - _wide(log_column[at], tiling.block_k))
            dp_WJ = _dot(do_ref[at], v_ref[...], 1) - _wide(mean_column[at], tiling.block_k)
            acc[at] += _dot((p_WJ * dp_WJ * slope).astype(k_ref.dtype), k_ref[...])

        _visit(tiling, state, columns, theirs, part)

        @pl.when(state[0] & LAST != 0)
        def end() -> None:
            dq_ref[...] = (acc[...] * tiling.request.scale).astype(dq_ref.dtype)

    specs = Specs(tiling)
    return _call(
        "attention_of_queries",
        kernel,
        specs,
        [*specs.inputs(inputs), *specs.numbers(same)],
        [(inputs.q, specs.queries(inputs.q))],
        (inputs.q.shape[4], LANES, LANES),
        (2, 1),
        same,
        interpret,
    )[0]


def of_keys(tiling: Tiling, inputs: Inputs, same: Same, interpret: Any) -> list[jax.Array]:
    """The gradients of keys and values, in their layout. Scores have keys as rows here, so that no
    product is transposed."""

    def kernel(tiles: Any, ranges: Any, *refs: Any) -> None:
        q_ref, k_ref, v_ref, do_ref, log_ref, mean_ref, *rest = refs
        mine, theirs, rest = _pairs(tiling, rest)
        dk_ref, dv_ref, of_k, of_v, *columns = rest
        state = _now(tiling, tiles, ranges, 2)
        share = pl.program_id(3)

        @pl.when((state[0] & FIRST != 0) & (share == 0))
        def begin() -> None:
            for ref in (of_k, of_v):
                ref[...] = jnp.zeros(ref.shape, jnp.float32)
            _stand(theirs, columns)

        def part(seen: Seen, at: Any) -> None:
            s_JW = _scores(tiling, k_ref[...], q_ref[at])
            slope = _slope(tiling, s_JW)
            p_JW = jnp.exp(_hide(seen, at, s_JW) - log_ref[:, at])
            of_v[...] += _dot(p_JW.astype(do_ref.dtype), do_ref[at])
            ds_JW = p_JW * (_dot(v_ref[...], do_ref[at], 1) - mean_ref[:, at]) * slope
            of_k[...] += _dot(ds_JW.astype(q_ref.dtype), q_ref[at])

        _visit(tiling, state, mine, columns, part)

        @pl.when((state[0] & LAST != 0) & (share == tiling.shares - 1))
        def end() -> None:
            dk_ref[...] = (of_k[...] * tiling.request.scale).astype(dk_ref.dtype)
            dv_ref[...] = of_v[...].astype(dv_ref.dtype)

    specs, kv = Specs(tiling), (inputs.k, inputs.v)
    return _call(
        "attention_of_keys",
        kernel,
        specs,
        [*specs.inputs(inputs), *specs.numbers(same)],
        [(x, specs.keys(x)) for x in kv],
        [x.shape[3] for x in kv],
        (2, 2),
        same,
        interpret,
    )


class Specs:
    """Blocks of arrays for each step of the grid: row of the batch, kv head, share of its heads,
    tile; by keys, tile and share."""

    def __init__(self, tiling: Tiling):
        self.tiling = tiling
        self.lanes = pl.BlockSpec(
            (None, None, None, 1, tiling.rows), self._map(lambda b, h, c, i, j: (b, h, c, 0, i))
        )

    def queries(self, x: Any) -> pl.BlockSpec:
        """Blocks of [B, K, C, blocks x R, H]."""
        return pl.BlockSpec(
            (None, None, None, self.tiling.rows, x.shape[4]),
            self._map(lambda b, h, c, i, j: (b, h, c, i, 0)),
        )

    def keys(self, x: Any) -> pl.BlockSpec:
        """Blocks of [B, K, S, H]."""
        return pl.BlockSpec(
            (None, None, self.tiling.block_k, x.shape[3]),
            self._map(lambda b, h, c, i, j: (b, h, j, 0)),
        )

    def inputs(self, inputs: Inputs) -> list[Blocked]:
        """In their order."""
        q, k, v, do, *lanes = inputs
        specs = self.queries(q), self.keys(k), self.keys(v), self.queries(do)
        return [*zip((q, k, v, do), specs, strict=True), *((x, self.lanes) for x in lanes)]

    def numbers(self, same: Same) -> Iterator[Blocked]:
        """Each number of queries and of keys, in lanes, and its blocks."""
        tiling = self.tiling
        of_q = self._map(lambda b, h, c, i, j: (tiling.row(b), 0, i))
        of_k = self._map(lambda b, h, c, i, j: (tiling.row(b), 0, j))
        for pair in same:
            for x, count, size, at in zip(
                pair, tiling.counts, (tiling.block_q, tiling.block_k), (of_q, of_k), strict=True
            ):
                yield tiling.numbers(x, count * size)[:, None], pl.BlockSpec((None, 1, size), at)

    def _map(self, block: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def at(b: Any, h: Any, outer: Any, inner: Any, tiles: Any, ranges: Any) -> tuple[Any, ...]:
            t, c = (outer, inner) if self.tiling.by_keys else (inner, outer)
            i, j, side = self.tiling.clipped(tiles[t], ranges, b)
            if self.tiling.by_keys and self.tiling.shares > 1:
                c = jnp.where(side < 0, 0, jnp.where(side > 0, self.tiling.shares - 1, c))
            return block(b, h, c, i, j)

        return at


def _mask(
    tiling: Tiling, tile: jax.Array, mine: Sequence[Any], theirs: Sequence[Any]
) -> Callable[[Any], jax.Array]:
    """The mask of some rows of a tile, [W, J] or by keys [J, W]. Numbers of major blocks stand as
    columns, others lie in lanes."""
    first_q = (tile >> 18) * tiling.block_q + tiling.request.offset
    first_k = (tile >> 4 & (1 << 14) - 1) * tiling.block_k

    def seen(at: Any) -> jax.Array:
        axis, rows = int(tiling.by_keys), int(at.size)
        start = at.start % tiling.block_q
        start = start if isinstance(start, int) else pl.multiple_of(start, rows)
        shape = (tiling.block_k, rows) if axis else (rows, tiling.block_k)
        index_q, index_k = (jax.lax.broadcasted_iota(jnp.int32, shape, n) for n in (axis, 1 - axis))
        distance = index_q - index_k + (first_q + start - first_k)
        mask = index_k < tiling.keys - first_k
        for bound in within(tiling.request, distance):
            mask = mask & bound
        for q, k in zip(mine, theirs, strict=True):
            if axis:
                mask = mask & (q[:, pl.ds(start, rows)] == _wide(k[...], rows))
            else:
                mask = mask & (_wide(q[pl.ds(start, rows)], tiling.block_k) == k[...])
        return mask

    return seen


def _hide(seen: Seen, at: Any, scores: jax.Array) -> jax.Array:
    return jnp.where(seen(at), scores, UNSEEN) if seen else scores


def _call(
    name: str,
    kernel: Callable[..., None],
    specs: Specs,
    operands: Sequence[Blocked],
    outs: Sequence[tuple[Any, pl.BlockSpec]],
    widths: Sequence[int],
    products: tuple[int, int],
    same: Same,
    interpret: Any,
) -> list[jax.Array]:
    """`widths`: of float32 scratch with a row for each row of a major block. `products`: a tile's
    products over H and over V."""
    tiling, (b, kv, *_), tiles = specs.tiling, operands[0][0].shape, specs.tiling.tiles()
    shapes = [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape, _ in outs]
    rows = tiling.block_k if tiling.by_keys else tiling.rows
    columns = tiling.block_k if tiling.by_keys else tiling.block_q
    steps = (len(tiles), tiling.shares) if tiling.by_keys else (tiling.shares, len(tiles))
    third = "arbitrary" if tiling.by_keys else "parallel"
    order: Any = ("parallel", "parallel", third, "arbitrary")
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(b, kv, *steps),
        in_specs=[spec for _, spec in operands],
        out_specs=[spec for _, spec in outs],
        scratch_shapes=[
            *(pltpu.VMEM((rows, width), jnp.float32) for width in widths),
            *[pltpu.VMEM((columns, LANES), jnp.int32)] * tiling.pairs,
        ],
    )
    call = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid_spec=grid,
        name=name,
        interpret=interpret,
        cost_estimate=_cost(tiling, operands, shapes, products),
        compiler_params=pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=MEMORY),
    )
    return call(
        jnp.asarray(tiles),
        tiling.ranges(same) if same else jnp.zeros(1, jnp.int32),
        *(x for x, _ in operands),
    )


def _cost(
    tiling: Tiling, operands: Sequence[Blocked], shapes: Sequence[Any], products: tuple[int, int]
) -> pl.CostEstimate:
    """Cost of the tiles within the bounds of positions, without those of numbers. Head dims count
    as multiples of 128, as they lie."""
    q, k, v = (x for x, _ in operands[:3])
    tiles = tiling.computed() * q.shape[0] * q.shape[1] * tiling.shares
    scores = tiles * tiling.rows * tiling.block_k
    whole = sum(x.size * x.dtype.itemsize for x in shapes)
    fetched = (k, v) if not tiling.by_keys else (q, operands[3][0])
    block = tiling.block_k if not tiling.by_keys else tiling.rows
    others = sum(x.size * x.dtype.itemsize for x, _ in operands if all(x is not y for y in fetched))
    moved = tiles * block * sum(x.shape[-1] * x.dtype.itemsize for x in fetched)
    return pl.CostEstimate(
        flops=2 * scores * (products[0] * q.shape[-1] + products[1] * v.shape[-1]),
        transcendentals=scores * (2 if tiling.request.soft_cap else 1),
        bytes_accessed=whole + others + moved,
    )


State = tuple[jax.Array, jax.Array, jax.Array]
"""A tile; does some query see some key; does every query see every key."""


def _now(tiling: Tiling, tiles: Any, ranges: Any, axis: int) -> State:
    tile = tiles[pl.program_id(axis)]
    return tile, *tiling.state(tile, ranges, pl.program_id(0))


def _visit(
    tiling: Tiling,
    state: State,
    mine: Sequence[Any],
    theirs: Sequence[Any],
    part: Callable[[Seen, Any], None],
) -> None:
    """`part(mask, rows)` over the rows of a tile in which some query sees some key."""
    tile, some, every = state

    @pl.when(some & every)
    def whole() -> None:
        _by_parts(tiling, functools.partial(part, None))

    @pl.when(some & ~every)
    def masked() -> None:
        _by_parts(tiling, functools.partial(part, _mask(tiling, tile, mine, theirs)))


def _by_parts(tiling: Tiling, part: Callable[[Any], None]) -> None:
    """`part` for some rows of a tile at a time, all of one head."""
    size = next(n for n in range(AT_ONCE, 0, -LANES) if tiling.block_q % n == 0)
    if size == tiling.rows:
        return part(pl.ds(0, size))
    jax.lax.fori_loop(
        0, tiling.rows // size, lambda n, _: part(pl.ds(pl.multiple_of(n * size, size), size)), None
    )


def _pairs(tiling: Tiling, refs: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """Numbers of queries, those of keys, and what follows them."""
    pairs = refs[: 2 * tiling.pairs]
    return pairs[::2], pairs[1::2], [*refs[2 * tiling.pairs :]]


def _sink(tiling: Tiling, sinks: Any, share: jax.Array, top: Any, total: Any) -> None:
    """The sinks of a tile's heads are its first scores."""
    for head in range(tiling.heads):
        at = pl.ds(head * tiling.block_q, tiling.block_q)
        sink = sinks[0, share * tiling.heads + head]
        top[at] = jnp.full((tiling.block_q, LANES), jnp.maximum(sink, FLOOR))
        total[at] = jnp.exp(jnp.full((tiling.block_q, LANES), sink) - top[at])


def _stand(rows: Sequence[Any], columns: Sequence[Any]) -> None:
    """Numbers that lie in lanes, as columns: the same in each of 128 lanes."""
    for row, column in zip(rows, columns, strict=True):
        column[...] = jnp.broadcast_to(row[...], (LANES, row.shape[1])).T


def _wide(column: jax.Array, width: int) -> jax.Array:
    return jnp.tile(column, (1, width // LANES))


def _scores(tiling: Tiling, left: jax.Array, right: jax.Array) -> jax.Array:
    raw, cap = _dot(left, right, 1) * tiling.request.scale, tiling.request.soft_cap
    return cap * jnp.tanh(raw / cap) if cap else raw


def _slope(tiling: Tiling, scores: jax.Array) -> jax.Array | int:
    """The slope of the soft cap."""
    return 1 - jnp.square(scores / tiling.request.soft_cap) if tiling.request.soft_cap else 1


def _dot(left: jax.Array, right: jax.Array, axis: int = 0) -> jax.Array:
    """Over `axis` of the right side, in float32; float32 operands in full precision."""
    precision = (
        jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    )
    return jax.lax.dot_general(
        left,
        right,
        (((1,), (axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
