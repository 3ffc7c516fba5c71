"""Paged attention for CPUs: a few rows of one request at a time, each tile over its own keys alone.

Shapes as in the package, and T rows of a tile, B keys of a block, G query heads of a kv head.
"""

import jax
import jax.numpy as jnp

from maxstack.kernels.attention.request import Request
from maxstack.kernels.backends import multiplied
from maxstack.kernels.paged_attention import Inputs, keys_and_values
from maxstack.kernels.paged_attention.blockwise import (
    BLOCK,
    Softmax,
    absorbed,
    begun,
    capped,
    first_seen,
    mean,
)
from maxstack.kernels.paged_attention.runs import tiles

TILE = 4
"""Rows of a tile: with more, a prompt reads its keys less often, and a row alone computes more for
nothing."""


def run(inputs: Inputs, request: Request, value_dim: int | None) -> jax.Array:
    """Online softmax over the blocks that a tile sees. Each row is computed as one of TILE rows,
    whatever stands beside it."""
    q_RNH, pages_PLCH, tables_RW, positions_R, sinks_N, kv_heads = inputs
    rows, heads, size = q_RNH.shape
    length, dtype = pages_PLCH.shape[1], multiplied(q_RNH.dtype)
    pages = max(1, BLOCK // length)
    block = pages * length
    tables_RW = jnp.pad(tables_RW, ((0, 0), (0, -tables_RW.shape[1] % pages)))
    sample = jax.eval_shape(lambda: keys_and_values(pages_PLCH[0], value_dim, kv_heads))
    kv, value_size = sample[1].shape[1:]
    groups = heads // kv
    starts_R, counts_R, _, count = tiles(tables_RW, positions_R, TILE)
    first_R = first_seen(request, positions_R)

    def padded(x: jax.Array, fill: int) -> jax.Array:
        return jnp.pad(x, ((0, TILE), *((0, 0),) * (x.ndim - 1)), constant_values=fill)

    q, at, first = padded(q_RNH.astype(dtype), 0), padded(positions_R, -1), padded(first_R, 0)
    sinks_KM = None
    if sinks_N is not None:
        sinks_KM = jnp.tile(sinks_N.reshape(kv, groups), (1, TILE))

    def tile(i: jax.Array, o_RNV: jax.Array) -> jax.Array:
        start = starts_R[i]
        q_TNH, at_T, first_T = (
            jax.lax.dynamic_slice_in_dim(x, start, TILE) for x in (q, at, first)
        )
        mine_T = jnp.arange(TILE) < counts_R[i]
        last = jnp.where(mine_T, at_T, 0).max() // block
        lowest = jnp.where(mine_T, first_T, first_T[0]).min() // block
        q_KMH = q_TNH.reshape(TILE, kv, groups, size).swapaxes(0, 1).reshape(kv, -1, size)

        def step(j: jax.Array, carry: Softmax) -> Softmax:
            ids = jax.lax.dynamic_slice_in_dim(tables_RW[start], j * pages, pages)
            kept = pages_PLCH[ids].reshape(block, *pages_PLCH.shape[2:]).astype(dtype)
            # XLA on a CPU is twice as fast where heads come first in memory already
            k_KBH, v_KBV = (x.swapaxes(0, 1) for x in keys_and_values(kept, value_dim, kv_heads))
            key_B = j * block + jnp.arange(block)
            scores = jnp.einsum("KMH,KBH->KMB", q_KMH, k_KBH, preferred_element_type=jnp.float32)
            scores = capped(scores * request.scale, request)
            seen_TB = (key_B <= at_T[:, None]) & (key_B >= first_T[:, None])
            seen = jnp.repeat(seen_TB, groups, axis=0)
            return absorbed(carry, scores, seen, v_KBV, "KMB,KBV->KMV")

        begin = begun((kv, TILE * groups), value_size, sinks_KM)
        o_KMV = mean(jax.lax.fori_loop(lowest, last + 1, step, begin))
        o_TNV = o_KMV.reshape(kv, TILE, groups, -1).swapaxes(0, 1).reshape(TILE, heads, -1)
        before = jax.lax.dynamic_slice_in_dim(o_RNV, start, TILE)
        o_TNV = jnp.where(mine_T[:, None, None], o_TNV.astype(o_RNV.dtype), before)
        return jax.lax.dynamic_update_slice_in_dim(o_RNV, o_TNV, start, 0)

    none = jnp.zeros((rows + TILE, heads, value_size), q_RNH.dtype)
    return jax.lax.fori_loop(0, count, tile, none)[:rows]
