"""Paged attention for CPUs: a few rows of one request at a time, each tile over its own keys alone.

Shapes as in the package, and T rows of a tile, B keys of a block, G query heads of a kv head.
"""

import jax
import jax.numpy as jnp

from maxstack.kernels.attention.request import Request
from maxstack.kernels.backends import multiplied
from maxstack.kernels.paged_attention import Inputs, keys_and_values, read_pages
from maxstack.kernels.paged_attention.blockwise import (
    BLOCK,
    Softmax,
    absorbed,
    begun,
    capped,
    first_seen,
    mean,
)
from maxstack.kernels.paged_attention.runs import Tiles, long_and_short_tiles, tiles


def run(inputs: Inputs, request: Request, value_dim: int | None) -> jax.Array:
    """Online softmax over the blocks that a tile sees. A row is computed as one of a tile's,
    whatever stands beside it."""
    q_RNH, pages_PLCH, tables_RW, positions_R, sinks_N, kv_heads, _ = inputs
    rows, heads, size = q_RNH.shape
    length, dtype = pages_PLCH.shape[1], multiplied(q_RNH.dtype)
    pages = max(1, BLOCK // length)
    block = pages * length
    tables_RW = jnp.pad(tables_RW, ((0, 0), (0, -tables_RW.shape[1] % pages)))
    sample = jax.eval_shape(lambda: keys_and_values(pages_PLCH[0], value_dim, kv_heads))
    kv, value_size = sample[1].shape[1:]
    groups = heads // kv
    first_R = first_seen(request, positions_R)
    short_rows, long_rows = _tile_rows(heads, groups, value_size)

    def padded(x: jax.Array, fill: int) -> jax.Array:
        return jnp.pad(x, ((0, long_rows), *((0, 0),) * (x.ndim - 1)), constant_values=fill)

    q, at, first = padded(q_RNH.astype(dtype), 0), padded(positions_R, -1), padded(first_R, 0)

    def over(tile_rows: int, each: Tiles, o_RNV: jax.Array) -> jax.Array:
        sinks_KM = None
        if sinks_N is not None:
            sinks_KM = jnp.tile(sinks_N.reshape(kv, groups), (1, tile_rows))

        def tile(i: jax.Array, o_RNV: jax.Array) -> jax.Array:
            start = each.starts_R[i]
            q_TNH, at_T, first_T = (
                jax.lax.dynamic_slice_in_dim(x, start, tile_rows) for x in (q, at, first)
            )
            mine_T = jnp.arange(tile_rows) < each.counts_R[i]
            last = jnp.where(mine_T, at_T, 0).max() // block
            lowest = jnp.where(mine_T, first_T, first_T[0]).min() // block
            q_KMH = q_TNH.reshape(tile_rows, kv, groups, size).swapaxes(0, 1)
            q_KMH = q_KMH.reshape(kv, -1, size)

            def step(j: jax.Array, carry: Softmax) -> Softmax:
                ids = jax.lax.dynamic_slice_in_dim(tables_RW[start], j * pages, pages)
                kept = read_pages(inputs, ids, dtype).reshape(block, *pages_PLCH.shape[2:])
                # XLA on a CPU is twice as fast where heads come first in memory already
                k_KBH, v_KBV = (
                    x.swapaxes(0, 1) for x in keys_and_values(kept, value_dim, kv_heads)
                )
                key_B = j * block + jnp.arange(block)
                scores = jnp.einsum(
                    "KMH,KBH->KMB", q_KMH, k_KBH, preferred_element_type=jnp.float32
                )
                scores = capped(scores * request.scale, request)
                seen_TB = (key_B <= at_T[:, None]) & (key_B >= first_T[:, None])
                seen = jnp.repeat(seen_TB, groups, axis=0)
                return absorbed(carry, scores, seen, v_KBV, "KMB,KBV->KMV")

            begin = begun((kv, tile_rows * groups), value_size, sinks_KM)
            o_KMV = mean(jax.lax.fori_loop(lowest, last + 1, step, begin))
            o_TNV = o_KMV.reshape(kv, tile_rows, groups, -1).swapaxes(0, 1)
            o_TNV = o_TNV.reshape(tile_rows, heads, -1)
            before = jax.lax.dynamic_slice_in_dim(o_RNV, start, tile_rows)
            o_TNV = jnp.where(mine_T[:, None, None], o_TNV.astype(o_RNV.dtype), before)
            return jax.lax.dynamic_update_slice_in_dim(o_RNV, o_TNV, start, 0)

        return jax.lax.fori_loop(0, each.number, tile, o_RNV)

    o_RNV = jnp.zeros((rows + long_rows, heads, value_size), q_RNH.dtype)
    if rows <= long_rows:
        return over(short_rows, tiles(tables_RW, positions_R, short_rows), o_RNV)[:rows]
    long, short = long_and_short_tiles(tables_RW, positions_R, long_rows, short_rows)
    return over(short_rows, short, over(long_rows, long, o_RNV))[:rows]


def _tile_rows(heads: int, groups: int, value_size: int) -> tuple[int, int]:
    """Rows of a tile: few, as a row alone computes more for nothing, and more for pieces of
    prompts, which then read their keys less often. A row has the same bits in both: XLA on a CPU
    adds up fewer than 32 rows of heads otherwise, and its products change with more rows at sizes
    that were measured (EXPERIMENTS.md, "Few rows on a CPU")."""
    short = max(4, -(-32 // heads))
    if groups >= 16:
        most = 1024
    elif value_size % 64 == 0 and value_size <= 256:
        most = 64 * groups
    else:
        most = 48
    return short, max(short, most // groups)
