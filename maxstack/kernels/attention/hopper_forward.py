"""The forward kernel for Hopper GPUs: softmax(scores) v and the log-sum-exp (after
FlashAttention-3, Shah et al. 2024, arXiv:2407.08608).

A block of threads has 128 queries of one head, 64 for each computing warpgroup; the third warpgroup
loads keys and values ahead.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxstack.kernels.attention import hopper_tiles as tiles
from maxstack.kernels.attention.hopper_tiles import (
    BLOCK,
    COMPUTE,
    LOG2E,
    ROWS,
    Call,
    Refs,
    Ring,
    buffers,
)

LOWEST = -1e30
"""Maximum of no scores: finite, so that exp2(score - maximum) is 0 for a hidden one."""


def forward(call: Call, operands: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """-> (output like q, log2 of the sum of exp(scores) [B, N, T], -inf where a query sees
    nothing). `operands`: q, k, v, then int32 numbers of queries [B, T] and of keys [B, S]."""
    tile = (ROWS, call.dim), call.dtype
    keys = (call.forward_keys, call.dim), call.dtype
    numbers = [((call.forward_keys,), jnp.int32)] * call.numbered
    scratch = {
        "query": tiles.own_tiles(tile),
        "logs": buffers(COMPUTE, ((ROWS,), jnp.float32)),
        "keys": Ring.scratch(call.stages, keys, *numbers),
        "values": Ring.scratch(call.stages, keys),
    }
    log = jax.ShapeDtypeStruct((call.batch, call.heads, call.queries), jnp.float32)
    out = [operands[0], log]
    count = call.heads, call.queries // BLOCK
    return tuple(tiles.launch(call, "attention_forward", _kernel, operands, out, count, scratch, 2))


def _kernel(call: Call, refs: Refs, scratch: Any) -> None:
    q, k, v, *numbers, o, log = refs
    mine, theirs = numbers[: call.numbered], numbers[call.numbered :]
    head, row, warpgroup = tiles.axes()
    # The last queries have the most keys, and go first.
    start = (call.queries // BLOCK - 1 - lax.axis_index("tile")) * BLOCK
    block = call.keys_of(start, BLOCK, call.forward_keys)
    keys, values = (Ring(scratch[name], call.stages) for name in ("keys", "values"))

    @pl.when(warpgroup < COMPUTE)
    def compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        first = start + warpgroup * ROWS
        here, log_tile = pl.ds(first, ROWS), scratch["logs"][0].at[warpgroup]
        sources, numbers = [q.at[row, here, head]], [x.at[row, here] for x in mine]
        [query_tile], own = tiles.fetch(call, scratch["query"], warpgroup, sources, numbers)
        nothing = call.full((ROWS, call.dim), 0), call.full((ROWS,), LOWEST), call.full((ROWS,), 0)
        visit = functools.partial(_visit, call, query_tile, own, keys, values, first, block.first)
        gathered, highest, total = tiles.walk(
            call, call.keys_of(first, ROWS, call.forward_keys), block, visit, nothing
        )
        inverse = jnp.where(total > 0, 1 / total, 0.0)
        query_tile[...] = (gathered * lax.broadcast_in_dim(inverse, gathered.shape, [0])).astype(
            call.dtype
        )
        log_tile[...] = jnp.where(total > 0, highest + jnp.log(total) * LOG2E, -jnp.inf)
        tiles.store((query_tile, o.at[row, here, head]), (log_tile, log.at[row, head, here]))

    @pl.when(warpgroup == COMPUTE)
    def load() -> None:
        tiles.load_keys(call, keys, values, (k, v, theirs), block, call.forward_keys)


def _visit(
    call: Call,
    query_tile: Any,
    own: Sequence[jax.Array],
    keys: Ring,
    values: Ring,
    first: Any,
    lo: Any,
    masked: bool,
    tile: Any,
    carry: Any,
) -> Any:
    """A step over a tile of keys, with online softmax: (output times the sum, highest score, sum)
    of the keys seen so far."""
    gathered, highest, total = carry
    (key_tile, *numbers), done = keys.take(tile - lo)
    s = call.product(query_tile, key_tile, transpose=True)
    others = call.columns(numbers)
    done()
    s, _ = call.scores(s)
    s = call.hide(s, masked, first, tile * call.forward_keys, own, others)
    higher = jnp.maximum(highest, s.max(axis=1))
    p = jnp.exp2(s - lax.broadcast_in_dim(higher, s.shape, [0]))
    shrink = jnp.exp2(highest - higher)
    total = total * shrink + p.sum(axis=1)
    gathered = gathered * lax.broadcast_in_dim(shrink, gathered.shape, [0])
    (value_tile,), done = values.take(tile - lo)
    gathered = call.product(p.astype(call.dtype), value_tile, onto=gathered)
    done()
    return gathered, higher, total
