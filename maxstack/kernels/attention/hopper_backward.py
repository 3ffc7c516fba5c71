"""The backward kernels for Hopper GPUs: one for the gradients of keys and values, one for those of
queries. No two threads add to one number in memory, so results repeat exactly.

Both compute the scores again from the saved log-sum-exp (FlashAttention-2, Dao 2023,
arXiv:2307.08691). With p the softmax, do the output's gradient and delta the sum of do and output
over the head: dv = p^T do, dp = do v^T, ds = p (dp - delta), dq = scale ds k, dk = scale ds^T q.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxstack.kernels.attention import hopper_tiles as parts
from maxstack.kernels.attention.hopper_tiles import BLOCK, COMPUTE, OF_ROWS, ROWS, Call, Refs, Ring

STEP = 64
"""Keys or queries of a step."""


def of_keys(call: Call, operands: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Gradients of k and v. Each computing warpgroup has 64 keys and visits the queries of all
    heads that share them.

    `operands`: q, k, v; the output's gradient [B, T, N, H]; log2 of the sum of exp(scores), inf
    where nothing is seen, and delta, float32 [B, N, T]; numbers of queries, then of keys.
    """
    matrix, vector = ((STEP, call.dim), call.dtype), ((STEP,), jnp.float32)
    steps = [matrix, vector, *[((STEP,), jnp.int32)] * call.numbered]
    scratch = {
        # Keys and values stay in shared memory for all queries;
        # their gradients leave through the same tiles.
        "own": parts.own_tiles(matrix, matrix),
        "queries": Ring.scratch(call.stages, *steps),
        # A ring of its own: a step is done with the
        # output's gradient before it is with the queries.
        "gradients": Ring.scratch(call.stages, matrix, vector),
    }
    tiles, name = (call.kv_heads, call.keys // BLOCK), "attention_backward_keys"
    return tuple(parts.launch(call, name, _keys_kernel, operands, operands[1:3], tiles, scratch, 4))


def of_queries(call: Call, operands: Sequence[jax.Array]) -> jax.Array:
    """The gradient of q, from the operands of `of_keys`. Each computing warpgroup has 64 queries of
    one head and visits their keys."""
    matrix, vector = ((STEP, call.dim), call.dtype), ((STEP,), jnp.float32)
    steps = [matrix, *[((STEP,), jnp.int32)] * call.numbered]
    scratch = {
        "own": parts.own_tiles(matrix, matrix, vector, vector),
        "keys": Ring.scratch(call.stages, *steps),
        "values": Ring.scratch(call.stages, matrix),
    }
    tiles, name = (call.heads, call.queries // BLOCK), "attention_backward_queries"
    return parts.launch(call, name, _queries_kernel, operands, operands[:1], tiles, scratch, 3)[0]


def _keys_kernel(call: Call, refs: Refs, scratch: Any) -> None:
    q, k, v, do, log, delta, *numbers, dk, dv = refs
    mine, theirs = numbers[: call.numbered], numbers[call.numbered :]
    head, row, warpgroup = parts.axes()
    start = lax.axis_index("tile") * BLOCK
    block = call.queries_of(start, BLOCK, STEP)
    lo, _, _, end = block
    queries, gradients = (Ring(scratch[name], call.stages) for name in ("queries", "gradients"))

    @pl.when(warpgroup < COMPUTE)
    def compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        first = start + warpgroup * ROWS
        # Each warpgroup owns 64 keys, so their gradients
        # stay in registers and nothing is added in memory.
        here = pl.ds(first, ROWS)
        sources = [x.at[row, here, head] for x in (k, v)]
        numbers = [x.at[row, here] for x in theirs]
        (key_tile, value_tile), own = parts.fetch(call, scratch["own"], warpgroup, sources, numbers)
        bounds = call.queries_of(first, ROWS, STEP)

        def of_head(group: Any, carry: Any) -> Any:
            visit = functools.partial(
                _visit_queries,
                call,
                (key_tile, value_tile),
                own,
                queries,
                gradients,
                first,
                # Steps count on from head to head, as the
                # loader's do, since they number the ring's slots.
                lambda tile: group * (end - lo) + tile - lo,
            )
            return parts.walk(call, bounds, block, visit, carry)

        # The sums continue over the query heads of these
        # keys, so grouped queries need no reduction.
        nothing = call.full((ROWS, call.dim), 0)
        of_k, of_v = lax.fori_loop(0, call.groups, of_head, (nothing, nothing))
        # The scale is multiplied in once, after the sum, and in float32.
        key_tile[...] = (of_k * call.request.scale).astype(call.dtype)
        value_tile[...] = of_v.astype(call.dtype)
        parts.store((key_tile, dk.at[row, here, head]), (value_tile, dv.at[row, here, head]))

    @pl.when(warpgroup == COMPUTE)
    def load_ahead() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def load(group: Any, _: None) -> None:
            def tile_of_head(tile: Any, _: None) -> None:
                there, step = pl.ds(tile * STEP, STEP), group * (end - lo) + tile - lo
                # Every query head of this kv head, in the order in which `of_head` takes them.
                query_head = head * call.groups + group
                queries.fill(
                    step,
                    [
                        q.at[row, there, query_head],
                        log.at[row, query_head, there],
                        *(x.at[row, there] for x in mine),
                    ],
                )
                gradients.fill(
                    step, [do.at[row, there, query_head], delta.at[row, query_head, there]]
                )

            lax.fori_loop(lo, end, tile_of_head, None)

        lax.fori_loop(0, call.groups, load, None)
        queries.drain(call.groups * (end - lo))
        gradients.drain(call.groups * (end - lo))


def _visit_queries(
    call: Call,
    tiles: tuple[Any, Any],
    own: Sequence[jax.Array],
    queries: Ring,
    gradients: Ring,
    first: Any,
    step_of: Callable[[Any], Any],
    masked: bool,
    tile: Any,
    carry: Any,
) -> Any:
    """A step over a tile of queries: adds to the gradients of this warpgroup's keys and values.
    Scores lie with keys as rows."""
    key_tile, value_tile = tiles
    of_k, of_v = carry
    (query_tile, *vectors), done_queries = queries.take(step_of(tile))
    log, *numbers = call.columns(vectors)
    s, slope = call.scores(call.product(key_tile, query_tile, transpose=True))
    # Keys are rows, so that dk and dv are products of a score matrix as it lies in registers.
    s = call.hide(s, masked, tile * STEP, first, own, numbers, keys_are_rows=True)
    p = jnp.exp2(s - lax.broadcast_in_dim(log, s.shape, [1]))
    (gradient_tile, delta_vector), done_gradients = gradients.take(step_of(tile))
    (delta,) = call.columns([delta_vector])
    of_v = call.product(p.astype(call.dtype), gradient_tile, onto=of_v)
    dp = call.product(value_tile, gradient_tile, transpose=True)
    done_gradients()
    ds = p * (dp - lax.broadcast_in_dim(delta, s.shape, [1]))
    ds = ds if slope is None else ds * slope
    of_k = call.product(ds.astype(call.dtype), query_tile, onto=of_k)
    done_queries()
    return of_k, of_v


def _queries_kernel(call: Call, refs: Refs, scratch: Any) -> None:
    q, k, v, do, log, delta, *numbers, dq = refs
    mine, theirs = numbers[: call.numbered], numbers[call.numbered :]
    head, row, warpgroup = parts.axes()
    # The last queries have the most keys, and go first.
    start = (call.queries // BLOCK - 1 - lax.axis_index("tile")) * BLOCK
    block = call.keys_of(start, BLOCK, STEP)
    keys, values = (Ring(scratch[name], call.stages) for name in ("keys", "values"))

    @pl.when(warpgroup < COMPUTE)
    def compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        first = start + warpgroup * ROWS
        here = pl.ds(first, ROWS)
        sources = [x.at[row, here, head] for x in (q, do)]
        # Of this warpgroup's own rows, so they are copied once and not with each step.
        sources += [x.at[row, head, here] for x in (log, delta)]
        numbers = [x.at[row, here] for x in mine]
        tiles, own = parts.fetch(call, scratch["own"], warpgroup, sources, numbers)
        query_tile, fixed = tiles[0], [call.load(x, OF_ROWS) for x in tiles[2:]]
        visit = functools.partial(
            _visit_keys, call, tiles[:2], fixed, own, keys, values, first, block.first
        )
        of_q = parts.walk(
            call, call.keys_of(first, ROWS, STEP), block, visit, call.full((ROWS, call.dim), 0)
        )
        query_tile[...] = (of_q * call.request.scale).astype(call.dtype)
        parts.store((query_tile, dq.at[row, here, head]))

    @pl.when(warpgroup == COMPUTE)
    def load() -> None:
        parts.load_keys(call, keys, values, (k, v, theirs), block, STEP)


def _visit_keys(
    call: Call,
    tiles: Refs,
    fixed: Sequence[jax.Array],
    own: Sequence[jax.Array],
    keys: Ring,
    values: Ring,
    first: Any,
    lo: Any,
    masked: bool,
    tile: Any,
    of_q: Any,
) -> Any:
    """A step over a tile of keys: adds to the gradient of this warpgroup's queries. `fixed`: their
    log-sum-exp and delta."""
    query_tile, gradient_tile = tiles
    (key_tile, *numbers), done_keys = keys.take(tile - lo)
    others = call.columns(numbers)
    s, slope = call.scores(call.product(query_tile, key_tile, transpose=True))
    s = call.hide(s, masked, first, tile * STEP, own, others)
    # Of the rows here, and so held in registers for all steps.
    log, delta = (lax.broadcast_in_dim(x, s.shape, [0]) for x in fixed)
    p = jnp.exp2(s - log)
    (value_tile,), done_values = values.take(tile - lo)
    dp = call.product(gradient_tile, value_tile, transpose=True)
    done_values()
    ds = p * (dp - delta)
    ds = ds if slope is None else ds * slope
    of_q = call.product(ds.astype(call.dtype), key_tile, onto=of_q)
    done_keys()
    return of_q
