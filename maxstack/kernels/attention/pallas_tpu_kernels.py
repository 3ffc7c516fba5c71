"""The three Pallas kernels of attention on TPUs: forward, the gradient of queries, and the
gradients of keys and values.

Shapes: as in pallas_tpu_tiles.py; V value head dim, Q queries of a tile, W rows that are worked on
at once, J keys of a tile.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxstack.kernels.attention.pallas_tpu_tiles import FIRST, LANES, LAST, Tiling
from maxstack.kernels.attention.request import Same, within
from maxstack.kernels.backends import size_of

FLOOR = -1e30
UNSEEN = 2 * FLOOR
"""Score of a hidden key: below the floor of the running maximum, so that a query without keys has
no weight at all."""
AT_ONCE = 256
"""Most rows of a tile that are computed at once."""
MEMORY = 48 << 20
"""Bytes of vector memory that a kernel may take."""

Seen = Callable[[Any], jax.Array] | None
"""Mask of some rows of a tile; None: every query sees every key."""
Refs = Sequence[Any]
Steps = tuple[Callable[[], None], Callable[[Seen, Any], None], Callable[[], None]]
"""Parts of a kernel: before the first tile of a major block; for some rows of a tile, with their
mask; after the last tile."""


def forward(
    tiling: Tiling,
    arrays: Sequence[jax.Array],
    sinks_N: jax.Array | None,
    same: Same,
    interpret: Any,
) -> list[jax.Array]:
    """The output [B, K, C, blocks x R, V], and log-sum-exp of the scores [B, K, C, 1, blocks x R],
    float32, 0 where a query sees no key. `arrays`: q, k and v in the layout of the tiling."""
    q, _, v = arrays
    width = v.shape[-1]

    def steps(ins: Refs, outs: Refs, sums: Refs) -> Steps:
        (q_ref, k_ref, v_ref, *sinks), (o_ref, log_ref), (acc, top, total) = ins, outs, sums
        share = pl.program_id(1) * tiling.shares + pl.program_id(2)

        def begin() -> None:
            for ref, value in ((acc, 0), (top, FLOOR), (total, 0)):
                ref[...] = jnp.full(ref.shape, value, jnp.float32)
            for ref in sinks:
                _sink(tiling, ref, share, top, total)

        def part(seen: Seen, at: Any) -> None:
            s_WJ = _hide(seen, at, _scores(tiling, q_ref[at], k_ref[...]))
            top_W = jnp.maximum(top[at], s_WJ.max(axis=1, keepdims=True))
            p_WJ = jnp.exp(s_WJ - _wide(top_W, tiling.block_k))
            shrink_W = jnp.exp(top[at] - top_W)
            total[at] = total[at] * shrink_W + p_WJ.sum(axis=1, keepdims=True)
            acc[at] = acc[at] * _wide(shrink_W, width) + _dot(p_WJ.astype(v_ref.dtype), v_ref[...])
            top[at] = top_W

        def end() -> None:
            weight = total[...]
            o_V = acc[...] / _wide(jnp.where(weight == 0, 1, weight), width)
            o_ref[...] = o_V.astype(o_ref.dtype)
            log_ref[...] = jnp.where(weight == 0, 0, top[...] + jnp.log(weight)).T[:1]

        return begin, part, end

    o = jax.ShapeDtypeStruct((*q.shape[:4], width), q.dtype)
    log = jax.ShapeDtypeStruct((*q.shape[:3], 1, q.shape[3]), jnp.float32)
    outs, widths = [(o, "queries"), (log, "lanes")], (width, LANES, LANES)
    call = Call("attention_forward", steps, outs, widths, (1, 1))
    return _run(call, tiling, arrays, same, interpret, sinks_N)


def of_queries(
    tiling: Tiling, arrays: Sequence[jax.Array], same: Same, interpret: Any
) -> jax.Array:
    """The gradient of queries, in their layout. `arrays` are in the layout of the tiling: q, k, v,
    the gradient of the output, the log-sum-exp, and the output times its gradient, summed over V.
    """

    def steps(ins: Refs, outs: Refs, sums: Refs) -> Steps:
        (q_ref, k_ref, v_ref, do_ref, *lanes), [dq_ref], (acc, *columns) = ins, outs, sums
        log_column, mean_column = columns

        def begin() -> None:
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
            _stand(lanes, columns)

        def part(seen: Seen, at: Any) -> None:
            s_WJ = _scores(tiling, q_ref[at], k_ref[...])
            slope = _slope(tiling, s_WJ)
            p_WJ = jnp.exp(_hide(seen, at, s_WJ) - _wide(log_column[at], tiling.block_k))
            dp_WJ = _dot(do_ref[at], v_ref[...], 1) - _wide(mean_column[at], tiling.block_k)
            acc[at] += _dot((p_WJ * dp_WJ * slope).astype(k_ref.dtype), k_ref[...])

        def end() -> None:
            dq_ref[...] = (acc[...] * tiling.request.scale).astype(dq_ref.dtype)

        return begin, part, end

    q = arrays[0]
    widths = q.shape[4], LANES, LANES
    call = Call("attention_of_queries", steps, [(q, "queries")], widths, (2, 1))
    return _run(call, tiling, arrays, same, interpret)[0]


def of_keys(
    tiling: Tiling, arrays: Sequence[jax.Array], same: Same, interpret: Any
) -> list[jax.Array]:
    """The gradients of keys and values, in their layout, of the arrays of `of_queries`. Scores have
    keys as rows here, so that no product is transposed."""

    def steps(ins: Refs, outs: Refs, sums: Refs) -> Steps:
        (q_ref, k_ref, v_ref, do_ref, log_ref, mean_ref), (of_k, of_v) = ins, sums
        dk_ref, dv_ref = outs

        def begin() -> None:
            for ref in sums:
                ref[...] = jnp.zeros(ref.shape, jnp.float32)

        def part(seen: Seen, at: Any) -> None:
            s_JW = _scores(tiling, k_ref[...], q_ref[at])
            slope = _slope(tiling, s_JW)
            p_JW = jnp.exp(_hide(seen, at, s_JW) - log_ref[:, at])
            of_v[...] += _dot(p_JW.astype(do_ref.dtype), do_ref[at])
            ds_JW = p_JW * (_dot(v_ref[...], do_ref[at], 1) - mean_ref[:, at]) * slope
            of_k[...] += _dot(ds_JW.astype(q_ref.dtype), q_ref[at])

        def end() -> None:
            dk_ref[...] = (of_k[...] * tiling.request.scale).astype(dk_ref.dtype)
            dv_ref[...] = of_v[...].astype(dv_ref.dtype)

        return begin, part, end

    kv = arrays[1:3]
    outs, widths = [(x, "keys") for x in kv], [x.shape[3] for x in kv]
    call = Call("attention_of_keys", steps, outs, widths, (2, 2))
    return _run(call, tiling, arrays, same, interpret)


class Call(NamedTuple):
    """A kernel over the tiles of a tiling."""

    name: str
    steps: Callable[[Refs, Refs, Refs], Steps]
    """(inputs, outputs, sums) -> the kernel's parts."""
    outs: Sequence[tuple[Any, str]]
    """Shapes of the results, and how their blocks lie: see `_spec`."""
    widths: Sequence[int]
    """Widths of the sums: float32 scratch with a row for each row of a major block."""
    products: tuple[int, int]
    """A tile's products over H and over V."""


def _run(
    call: Call,
    tiling: Tiling,
    arrays: Sequence[jax.Array],
    same: Same,
    interpret: Any,
    sinks_N: jax.Array | None = None,
) -> list[jax.Array]:
    layouts = "queries", "keys", "keys", "queries", "lanes", "lanes"
    specs = [_spec(tiling, x, layout) for x, layout in zip(arrays, layouts, strict=False)]
    operands = [*arrays]
    if sinks_N is not None:
        operands.append(sinks_N.astype(jnp.float32)[None])
        specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    counts = [len(operands), 2 * tiling.pairs, len(call.outs), len(call.widths)]
    for pair in same:
        for x, layout, length in zip(
            pair, ("query numbers", "key numbers"), tiling.padded, strict=True
        ):
            operands.append(tiling.numbers(x, length)[:, None])
            specs.append(_spec(tiling, x, layout))

    def kernel(tiles: Any, ranges: Any, *refs: Any) -> None:
        ends = itertools.accumulate(counts, initial=0)
        ins, pairs, outs, sums, columns = (
            refs[start:end] for start, end in itertools.pairwise([*ends, len(refs)])
        )
        _over_tile(tiling, tiles, ranges, call.steps(ins, outs, sums), pairs, columns)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in call.outs]
    (b, kv, *_), tiles = arrays[0].shape, tiling.tiles()
    rows, columns = tiling.rows, tiling.block_q
    steps, third = (tiling.shares, len(tiles)), "parallel"
    if tiling.by_keys:
        rows = columns = tiling.block_k
        steps, third = (len(tiles), tiling.shares), "arbitrary"
    order: Any = ("parallel", "parallel", third, "arbitrary")
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(b, kv, *steps),
        in_specs=specs,
        out_specs=[_spec(tiling, *out) for out in call.outs],
        scratch_shapes=[
            *(pltpu.VMEM((rows, width), jnp.float32) for width in call.widths),
            *[pltpu.VMEM((columns, LANES), jnp.int32)] * tiling.pairs,
        ],
    )
    ranges = tiling.ranges(same) if same else jnp.zeros(1, jnp.int32)
    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid_spec=grid,
        name=call.name,
        interpret=interpret,
        cost_estimate=_cost(tiling, operands, shapes, call.products),
        compiler_params=pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=MEMORY),
    )(jnp.asarray(tiles), ranges, *operands)


def _spec(tiling: Tiling, x: Any, layout: str) -> pl.BlockSpec:
    """Blocks of an array for each step of the grid: row of the batch, kv head, share of its heads,
    tile; by keys, tile and share."""
    shape, block = {
        "queries": (
            (None, None, None, tiling.rows, x.shape[-1]),
            lambda b, h, c, i, j: (b, h, c, i, 0),
        ),
        "keys": ((None, None, tiling.block_k, x.shape[-1]), lambda b, h, c, i, j: (b, h, j, 0)),
        "lanes": ((None, None, None, 1, tiling.rows), lambda b, h, c, i, j: (b, h, c, 0, i)),
        "query numbers": ((None, 1, tiling.block_q), lambda b, h, c, i, j: (tiling.row(b), 0, i)),
        "key numbers": ((None, 1, tiling.block_k), lambda b, h, c, i, j: (tiling.row(b), 0, j)),
    }[layout]

    def at(b: Any, h: Any, outer: Any, inner: Any, tiles: Any, ranges: Any) -> tuple[Any, ...]:
        t, c = (outer, inner) if tiling.by_keys else (inner, outer)
        i, j, side = tiling.clipped(tiles[t], ranges, b)
        if tiling.by_keys and tiling.shares > 1:
            c = jnp.where(side < 0, 0, jnp.where(side > 0, tiling.shares - 1, c))
        return block(b, h, c, i, j)

    return pl.BlockSpec(shape, at)


def _over_tile(
    tiling: Tiling, tiles: Any, ranges: Any, steps: Steps, pairs: Refs, columns: Refs
) -> None:
    """The parts of a kernel that a tile needs: `part` over its rows where some query sees some key,
    without a mask where every query sees every key. `columns` hold the major blocks' numbers."""
    begin, part, end = steps
    tile, mine, theirs = tiles[pl.program_id(2 if tiling.by_keys else 3)], pairs[::2], pairs[1::2]
    first, last = tile & FIRST != 0, tile & LAST != 0
    some, every = tiling.state(tile, ranges, pl.program_id(0))
    if tiling.by_keys:
        share = pl.program_id(3)
        first, last = first & (share == 0), last & (share == tiling.shares - 1)

    @pl.when(first)
    def _() -> None:
        begin()
        _stand(theirs if tiling.by_keys else mine, columns)

    mine, theirs = (mine, columns) if tiling.by_keys else (columns, theirs)

    @pl.when(some & every)
    def _() -> None:
        _by_parts(tiling, functools.partial(part, None))

    @pl.when(some & ~every)
    def _() -> None:
        _by_parts(tiling, functools.partial(part, _mask(tiling, tile, mine, theirs)))

    pl.when(last)(end)


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


def _cost(
    tiling: Tiling, operands: Sequence[jax.Array], shapes: Sequence[Any], products: tuple[int, int]
) -> pl.CostEstimate:
    """Cost of the tiles within the bounds of positions, without those of numbers. Head dims count
    as multiples of 128, as they lie."""
    q, k, v = operands[:3]
    tiles = tiling.computed() * q.shape[0] * q.shape[1] * tiling.shares
    scores = tiles * tiling.rows * tiling.block_k
    fetched, block = ((q, operands[3]), tiling.rows) if tiling.by_keys else ((k, v), tiling.block_k)
    others = [x for x in operands if all(x is not y for y in fetched)]
    moved = tiles * block * sum(x.shape[-1] * x.dtype.itemsize for x in fetched)
    return pl.CostEstimate(
        flops=2 * scores * (products[0] * q.shape[-1] + products[1] * v.shape[-1]),
        transcendentals=scores * (2 if tiling.request.soft_cap else 1),
        bytes_accessed=size_of(*shapes, *others) + moved,
    )


def _by_parts(tiling: Tiling, part: Callable[[Any], None]) -> None:
    """`part` for some rows of a tile at a time, all of one head."""
    size = next(n for n in range(AT_ONCE, 0, -LANES) if tiling.block_q % n == 0)
    if size == tiling.rows:
        return part(pl.ds(0, size))
    jax.lax.fori_loop(
        0, tiling.rows // size, lambda n, _: part(pl.ds(pl.multiple_of(n * size, size), size)), None
    )


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
