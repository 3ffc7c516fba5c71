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
from maxstack.kernels.attention.request import Same

FLOOR = -1e30
UNSEEN = 2 * FLOOR
"""Score of a hidden key: below the floor of the running maximum, so that a query without keys has
no weight at all."""
AT_ONCE = 256
"""Most rows of a tile that are worked on at once."""
MEMORY = 48 << 20
"""Bytes of vector memory that a kernel may take."""

Given = tuple[jax.Array, pl.BlockSpec]


class Asked(NamedTuple):
    """What the backward pass looks at, as it lies: `do` is the gradient of what was gathered,
    `mean` its product with that, summed over V."""

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
    """What queries gather [B, K, C, blocks x R, V], and log-sum-exp of their scores [B, K, C, 1,
    blocks x R], float32, 0 where they see no key."""
    width = v.shape[-1]

    def kernel(tiles: Any, ranges: Any, *refs: Any) -> None:
        rest = iter(refs)
        q_ref, k_ref, v_ref = (next(rest) for _ in range(3))
        mine, theirs = _pairs(tiling, rest)
        sinks = next(rest) if sinks_N is not None else None
        o_ref, log_ref, acc, top, total, *columns = rest
        tile, some, every = _now(tiling, tiles, ranges, 3)
        share = pl.program_id(1) * tiling.shares + pl.program_id(2)

        @pl.when(tile & FIRST != 0)
        def begin() -> None:
            acc[...], top[...], total[...] = (
                jnp.full(x.shape, value, jnp.float32)
                for x, value in ((acc, 0), (top, FLOOR), (total, 0))
            )
            if sinks is not None:
                _sink(tiling, sinks, share, top, total)
            _stand(mine, columns)

        def step(masked: bool) -> None:
            seen = Mask(tiling, tile, columns, theirs) if masked else None

            def part(at: Any) -> None:
                s_WJ = _scores(tiling, q_ref[at], k_ref[...])
                s_WJ = jnp.where(seen(at), s_WJ, UNSEEN) if seen else s_WJ
                top_W = jnp.maximum(top[at], s_WJ.max(axis=1, keepdims=True))
                p_WJ, kept_W = (
                    jnp.exp(s_WJ - _wide(top_W, tiling.block_k)),
                    jnp.exp(top[at] - top_W),
                )
                total[at] = total[at] * kept_W + p_WJ.sum(axis=1, keepdims=True)
                acc[at] = acc[at] * _wide(kept_W, width) + _dot(
                    p_WJ.astype(v_ref.dtype), v_ref[...]
                )
                top[at] = top_W

            _by_parts(tiling, part)

        _visit(some, every, step)

        @pl.when(tile & LAST != 0)
        def end() -> None:
            weight = total[...]
            o_ref[...] = (acc[...] / _wide(jnp.where(weight == 0, 1, weight), width)).astype(
                o_ref.dtype
            )
            log_ref[...] = jnp.where(weight == 0, 0, top[...] + jnp.log(weight)).T[:1]

    specs = Specs(tiling)
    given = [
        (q, specs.queries(q)),
        (k, specs.keys(k)),
        (v, specs.keys(v)),
        *specs.numbers(same),
        *_in_scalars(sinks_N),
    ]
    o = jax.ShapeDtypeStruct((*q.shape[:4], width), q.dtype)
    log = jax.ShapeDtypeStruct((*q.shape[:3], 1, q.shape[3]), jnp.float32)
    rows = pltpu.VMEM((tiling.rows, LANES), jnp.float32)
    scratch = [pltpu.VMEM((tiling.rows, width), jnp.float32), rows, rows, *_columns(tiling)]
    return _call(
        "attention_forward",
        kernel,
        specs,
        given,
        [(o, specs.queries(o)), (log, specs.lanes)],
        scratch,
        (1, 1),
        same,
        interpret,
    )


def of_queries(tiling: Tiling, asked: Asked, same: Same, interpret: Any) -> jax.Array:
    """The gradient of queries, as they lie."""

    def kernel(tiles: Any, ranges: Any, *refs: Any) -> None:
        rest = iter(refs)
        q_ref, k_ref, v_ref, do_ref, log_ref, mean_ref = (next(rest) for _ in range(6))
        mine, theirs = _pairs(tiling, rest)
        dq_ref, acc, log_column, mean_column, *columns = rest
        tile, some, every = _now(tiling, tiles, ranges, 3)

        @pl.when(tile & FIRST != 0)
        def begin() -> None:
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
            _stand([log_ref, mean_ref, *mine], [log_column, mean_column, *columns])

        def step(masked: bool) -> None:
            seen = Mask(tiling, tile, columns, theirs) if masked else None

            def part(at: Any) -> None:
                s_WJ = _scores(tiling, q_ref[at], k_ref[...])
                steep = _steepness(tiling, s_WJ)
                if seen:
                    s_WJ = jnp.where(seen(at), s_WJ, UNSEEN)
                p_WJ = jnp.exp(s_WJ - _wide(log_column[at], tiling.block_k))
                ds_WJ = (
                    p_WJ
                    * (_dot(do_ref[at], v_ref[...], 1) - _wide(mean_column[at], tiling.block_k))
                    * steep
                )
                acc[at] += _dot(ds_WJ.astype(k_ref.dtype), k_ref[...])

            _by_parts(tiling, part)

        _visit(some, every, step)

        @pl.when(tile & LAST != 0)
        def end() -> None:
            dq_ref[...] = (acc[...] * tiling.request.scale).astype(dq_ref.dtype)

    specs = Specs(tiling)
    given = [*specs.asked(asked), *specs.numbers(same)]
    rows = pltpu.VMEM((tiling.rows, LANES), jnp.float32)
    scratch = [
        pltpu.VMEM((tiling.rows, asked.q.shape[4]), jnp.float32),
        rows,
        rows,
        *_columns(tiling),
    ]
    return _call(
        "attention_of_queries",
        kernel,
        specs,
        given,
        [(asked.q, specs.queries(asked.q))],
        scratch,
        (2, 1),
        same,
        interpret,
    )[0]


def of_keys(tiling: Tiling, asked: Asked, same: Same, interpret: Any) -> list[jax.Array]:
    """The gradients of keys and values, as they lie. Scores stand with keys in rows here, so that
    no product is transposed."""

    def kernel(tiles: Any, ranges: Any, *refs: Any) -> None:
        rest = iter(refs)
        q_ref, k_ref, v_ref, do_ref, log_ref, mean_ref = (next(rest) for _ in range(6))
        mine, theirs = _pairs(tiling, rest)
        dk_ref, dv_ref, of_k, of_v, *columns = rest
        tile, some, every = _now(tiling, tiles, ranges, 2)
        share = pl.program_id(3)

        @pl.when((tile & FIRST != 0) & (share == 0))
        def begin() -> None:
            of_k[...], of_v[...] = (
                jnp.zeros(of_k.shape, jnp.float32),
                jnp.zeros(of_v.shape, jnp.float32),
            )
            _stand(theirs, columns)

        def step(masked: bool) -> None:
            seen = Mask(tiling, tile, mine, columns) if masked else None

            def part(at: Any) -> None:
                s_JW = _scores(tiling, k_ref[...], q_ref[at])
                steep = _steepness(tiling, s_JW)
                if seen:
                    s_JW = jnp.where(seen(at), s_JW, UNSEEN)
                p_JW = jnp.exp(s_JW - log_ref[:, at])
                of_v[...] += _dot(p_JW.astype(do_ref.dtype), do_ref[at])
                ds_JW = p_JW * (_dot(v_ref[...], do_ref[at], 1) - mean_ref[:, at]) * steep
                of_k[...] += _dot(ds_JW.astype(q_ref.dtype), q_ref[at])

            _by_parts(tiling, part)

        _visit(some, every, step)

        @pl.when((tile & LAST != 0) & (share == tiling.shares - 1))
        def end() -> None:
            dk_ref[...] = (of_k[...] * tiling.request.scale).astype(dk_ref.dtype)
            dv_ref[...] = of_v[...].astype(dv_ref.dtype)

    specs = Specs(tiling)
    given = [*specs.asked(asked), *specs.numbers(same)]
    scratch = [pltpu.VMEM((tiling.block_k, x.shape[3]), jnp.float32) for x in (asked.k, asked.v)]
    outs = [(x, specs.keys(x)) for x in (asked.k, asked.v)]
    return _call(
        "attention_of_keys",
        kernel,
        specs,
        given,
        outs,
        [*scratch, *_columns(tiling)],
        (2, 2),
        same,
        interpret,
    )


class Specs:
    """Which block of an array a step of the grid works on. The grid: row of the batch, kv head,
    share of its heads, tile; by keys, tile and share."""

    def __init__(self, tiling: Tiling):
        self.tiling = tiling
        self.lanes = pl.BlockSpec(
            (None, None, None, 1, tiling.rows), self._map(lambda b, h, c, i, j: (b, h, c, 0, i))
        )

    def queries(self, x: Any) -> pl.BlockSpec:
        """Of what lies in [B, K, C, blocks x R, H]."""
        return pl.BlockSpec(
            (None, None, None, self.tiling.rows, x.shape[4]),
            self._map(lambda b, h, c, i, j: (b, h, c, i, 0)),
        )

    def keys(self, x: Any) -> pl.BlockSpec:
        """Of what lies in [B, K, S, H]."""
        return pl.BlockSpec(
            (None, None, self.tiling.block_k, x.shape[3]),
            self._map(lambda b, h, c, i, j: (b, h, j, 0)),
        )

    def asked(self, asked: Asked) -> list[Given]:
        """In their order."""
        q, k, v, do, *lanes = asked
        return [
            (q, self.queries(q)),
            (k, self.keys(k)),
            (v, self.keys(v)),
            (do, self.queries(do)),
            *((x, self.lanes) for x in lanes),
        ]

    def numbers(self, same: Same) -> Iterator[Given]:
        """Each number of queries and of keys, in lanes, and its blocks."""
        tiling = self.tiling
        for pair in same:
            for place, (x, count, size) in enumerate(
                zip(pair, tiling.counts, (tiling.block_q, tiling.block_k), strict=True)
            ):
                spec = pl.BlockSpec(
                    (None, 1, size),
                    self._map(lambda b, h, c, i, j, place=place: (tiling.row(b), 0, (i, j)[place])),
                )
                yield tiling.numbers(x, count * size)[:, None], spec

    def _map(self, block: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def at(b: Any, h: Any, outer: Any, inner: Any, tiles: Any, ranges: Any) -> tuple[Any, ...]:
            t, c = (outer, inner) if self.tiling.by_keys else (inner, outer)
            i, j, side = self.tiling.clipped(tiles[t], ranges, b)
            if self.tiling.by_keys and self.tiling.shares > 1:
                c = jnp.where(side < 0, 0, jnp.where(side > 0, self.tiling.shares - 1, c))
            return block(b, h, c, i, j)

        return at


class Mask:
    """bool of a part of a tile, [W, J] or by keys [J, W]: who sees whom. Numbers of major blocks
    stand as columns, others lie in lanes."""

    def __init__(self, tiling: Tiling, tile: jax.Array, mine: Sequence[Any], theirs: Sequence[Any]):
        self.tiling, self.mine, self.theirs = tiling, mine, theirs
        self.first_q, self.first_k = (
            (tile >> 18) * tiling.block_q + tiling.request.offset,
            (tile >> 4 & (1 << 14) - 1) * tiling.block_k,
        )

    def __call__(self, at: Any) -> jax.Array:
        tiling, axis, rows = self.tiling, int(self.tiling.by_keys), int(at.size)
        start = at.start % tiling.block_q
        start = start if isinstance(start, int) else pl.multiple_of(start, rows)
        shape = (tiling.block_k, rows) if axis else (rows, tiling.block_k)
        index_q, index_k = (jax.lax.broadcasted_iota(jnp.int32, shape, n) for n in (axis, 1 - axis))
        distance = index_q - index_k + (self.first_q + start - self.first_k)
        seen = index_k < tiling.keys - self.first_k
        if tiling.nearest is not None:
            seen = seen & (distance >= tiling.nearest)
        if tiling.furthest is not None:
            seen = seen & (distance <= tiling.furthest)
        for mine, theirs in zip(self.mine, self.theirs, strict=True):
            if axis:
                seen = seen & (mine[:, pl.ds(start, rows)] == _wide(theirs[...], rows))
            else:
                seen = seen & (_wide(mine[pl.ds(start, rows)], tiling.block_k) == theirs[...])
        return seen


def _call(
    name: str,
    kernel: Callable[..., None],
    specs: Specs,
    given: Sequence[Given],
    outs: Sequence[tuple[Any, pl.BlockSpec]],
    scratch: Sequence[Any],
    products: tuple[int, int],
    same: Same,
    interpret: Any,
) -> list[jax.Array]:
    """`products`: how many of a tile's products go over H and over V."""
    tiling, (b, kv, *_), tiles = specs.tiling, given[0][0].shape, specs.tiling.tiles()
    shapes = [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape, _ in outs]
    steps = (len(tiles), tiling.shares) if tiling.by_keys else (tiling.shares, len(tiles))
    order: tuple[Any, ...] = (
        "parallel",
        "parallel",
        "arbitrary" if tiling.by_keys else "parallel",
        "arbitrary",
    )
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(b, kv, *steps),
        in_specs=[spec for _, spec in given],
        out_specs=[spec for _, spec in outs],
        scratch_shapes=scratch,
    )
    call = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid_spec=grid,
        name=name,
        interpret=interpret,
        cost_estimate=_cost(tiling, given, shapes, products),
        compiler_params=pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=MEMORY),
    )
    return call(
        jnp.asarray(tiles),
        tiling.ranges(same) if same else jnp.zeros(1, jnp.int32),
        *(x for x, _ in given),
    )


def _cost(
    tiling: Tiling, given: Sequence[Given], shapes: Sequence[Any], products: tuple[int, int]
) -> pl.CostEstimate:
    """Of the tiles that bounds leave, numbers apart. Head dims count as they lie, multiples of
    128."""
    q, k, v = (x for x, _ in given[:3])
    tiles = tiling.computed() * q.shape[0] * q.shape[1] * tiling.shares
    scores = tiles * tiling.rows * tiling.block_k
    whole = sum(x.size * x.dtype.itemsize for x in shapes)
    fetched = (k, v) if not tiling.by_keys else (q, given[3][0])
    block = tiling.block_k if not tiling.by_keys else tiling.rows
    others = sum(
        x.size * x.dtype.itemsize for x, _ in given if all(x is not one for one in fetched)
    )
    moved = tiles * block * sum(x.shape[-1] * x.dtype.itemsize for x in fetched)
    return pl.CostEstimate(
        flops=2 * scores * (products[0] * q.shape[-1] + products[1] * v.shape[-1]),
        transcendentals=scores * (2 if tiling.request.soft_cap else 1),
        bytes_accessed=whole + others + moved,
    )


def _now(
    tiling: Tiling, tiles: Any, ranges: Any, axis: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    tile = tiles[pl.program_id(axis)]
    return tile, *tiling.state(tile, ranges, pl.program_id(0))


def _visit(some: jax.Array, every: jax.Array, step: Callable[[bool], None]) -> None:
    pl.when(some & every)(functools.partial(step, False))
    pl.when(some & ~every)(functools.partial(step, True))


def _by_parts(tiling: Tiling, part: Callable[[Any], None]) -> None:
    """Works on some rows of a tile at once, all of one head."""
    size = next(n for n in range(AT_ONCE, 0, -LANES) if tiling.block_q % n == 0)
    if size == tiling.rows:
        return part(pl.ds(0, size))
    jax.lax.fori_loop(
        0, tiling.rows // size, lambda n, _: part(pl.ds(pl.multiple_of(n * size, size), size)), None
    )


def _pairs(tiling: Tiling, rest: Iterator[Any]) -> tuple[list[Any], list[Any]]:
    pairs = [(next(rest), next(rest)) for _ in range(tiling.pairs)]
    return [mine for mine, _ in pairs], [theirs for _, theirs in pairs]


def _sink(tiling: Tiling, sinks: Any, share: jax.Array, top: Any, total: Any) -> None:
    """The sinks of a tile's heads are its first scores."""
    for head in range(tiling.heads):
        at, sink = (
            pl.ds(head * tiling.block_q, tiling.block_q),
            sinks[0, share * tiling.heads + head],
        )
        top[at] = jnp.full((tiling.block_q, LANES), jnp.maximum(sink, FLOOR))
        total[at] = jnp.exp(jnp.full((tiling.block_q, LANES), sink) - top[at])


def _in_scalars(sinks_N: jax.Array | None) -> list[Given]:
    return (
        []
        if sinks_N is None
        else [(sinks_N.astype(jnp.float32)[None], pl.BlockSpec(memory_space=pltpu.SMEM))]
    )


def _columns(tiling: Tiling) -> list[Any]:
    return [
        pltpu.VMEM((tiling.block_k if tiling.by_keys else tiling.block_q, LANES), jnp.int32)
    ] * tiling.pairs


def _stand(rows: Sequence[Any], columns: Sequence[Any]) -> None:
    """Numbers that lie in lanes, as columns: the same in each of 128 lanes."""
    for row, column in zip(rows, columns, strict=True):
        column[...] = jnp.broadcast_to(row[...], (LANES, row.shape[1])).T


def _wide(column: jax.Array, width: int) -> jax.Array:
    return jnp.tile(column, (1, width // LANES))


def _scores(tiling: Tiling, left: jax.Array, right: jax.Array) -> jax.Array:
    raw, cap = _dot(left, right, 1) * tiling.request.scale, tiling.request.soft_cap
    return cap * jnp.tanh(raw / cap) if cap else raw


def _steepness(tiling: Tiling, scores: jax.Array) -> jax.Array | int:
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
