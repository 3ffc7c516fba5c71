"""Paged attention for CPUs: a few rows of one request at a time, each tile over its own keys alone.

Prompts are computed in long tiles, which read their keys less often, single tokens in short ones,
several of which are computed together. A row must have the same bits in all of them, which decides
the numbers of rows below: XLA on a CPU sums differently below certain numbers (`_tile_rows`).

Shapes as in the package, and T rows of a tile, X tiles that are computed together, B keys of a
block, G query heads of a kv head, M = T * G.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxstack.kernels.attention.request import Request
from maxstack.kernels.backends import product_dtype
from maxstack.kernels.paged_attention import Inputs, read_pages, split_keys_values
from maxstack.kernels.paged_attention.blockwise import (
    BLOCK,
    Softmax,
    apply_soft_cap,
    finish_softmax,
    first_visible,
    init_softmax,
    update_softmax,
)
from maxstack.kernels.paged_attention.runs import Tiles, long_and_short_tiles, tiles

FEW_TOGETHER, TOGETHER = 4, 8
"""Short tiles that are computed together, in steps of as many rows at most and in others."""
MANY, MANY_TOGETHER = 128, 64
"""From so many rows of a step on, so many tiles are computed together, where requests have less
than a block of keys."""


class Call(NamedTuple):
    """Arguments, whose rows are padded so that a long tile may reach beyond the last."""

    inputs: Inputs
    request: Request
    value_dim: int | None
    heads: tuple[int, int]
    """kv heads, and G."""
    value_size: int
    q_RNH: jax.Array
    at_R: jax.Array
    first_R: jax.Array
    """The earliest position that each row sees."""
    tables_RW: jax.Array

    @property
    def block(self) -> tuple[int, int]:
        """Pages and keys of a block, which is no longer than a request may be."""
        length, most = self.inputs.pages_PLCH.shape[1], self.inputs.tables_RW.shape[1]
        pages = max(1, min(BLOCK // length, most))
        return pages, pages * length


def run(inputs: Inputs, request: Request, value_dim: int | None) -> jax.Array:
    """Online softmax over the blocks that a tile sees. A row is always computed as one row of a
    tile, so other rows never change its bits."""
    q_RNH, pages_PLCH, tables_RW, positions_R, _, kv_heads, _ = inputs
    rows, heads, _ = q_RNH.shape
    sample = jax.eval_shape(lambda: split_keys_values(pages_PLCH[0], value_dim, kv_heads))
    kv, value_size = sample[1].shape[1:]
    short_rows, long_rows = _tile_rows(heads, heads // kv, value_size)

    def padded(x: jax.Array, fill: int) -> jax.Array:
        return jnp.pad(x, ((0, long_rows), *((0, 0),) * (x.ndim - 1)), constant_values=fill)

    call = Call(
        inputs,
        request,
        value_dim,
        (kv, heads // kv),
        value_size,
        padded(q_RNH.astype(product_dtype(q_RNH.dtype)), 0),
        padded(positions_R, -1),
        padded(first_visible(request, positions_R), 0),
        tables_RW,
    )
    width = -tables_RW.shape[1] % call.block[0]
    call = call._replace(tables_RW=jnp.pad(tables_RW, ((0, 0), (0, width))))
    # Padded like the rows, so that a tile's slice is never moved back by its end.
    o_RNV = jnp.zeros((rows + long_rows, heads, value_size), q_RNH.dtype)
    if call.block[1] < BLOCK:  # products over so few keys have other bits in long tiles, or in few
        long_rows, together = short_rows, MANY_TOGETHER if rows >= MANY else TOGETHER
    else:
        together = FEW_TOGETHER if rows <= FEW_TOGETHER else TOGETHER
    # Long tiles pay only where a step has more rows than one of them.
    if rows <= long_rows or long_rows == short_rows:
        short = tiles(tables_RW, positions_R, short_rows)
    else:
        long, short = long_and_short_tiles(tables_RW, positions_R, long_rows, short_rows)
        o_RNV = _attend_rows(call, long, long_rows, 1, o_RNV)
    return _attend_rows(call, short, short_rows, together, o_RNV)[:rows]


def _attend_rows(
    call: Call, each: Tiles, tile_rows: int, together: int, o_RNV: jax.Array
) -> jax.Array:
    """Attend in these tiles -> `o_RNV` with their rows written."""
    kv, groups = call.heads
    block = call.block[1]
    starts_R, counts_R = _sort_by_length(each, call.at_R, together)

    def compute(i: jax.Array, o_RNV: jax.Array) -> jax.Array:
        start_X, count_X = (
            jax.lax.dynamic_slice_in_dim(x, i * together, together) for x in (starts_R, counts_R)
        )
        index_XT = start_X[:, None] + jnp.arange(tile_rows)
        mine_XT = jnp.arange(tile_rows) < count_X[:, None]
        last = jnp.where(mine_XT, call.at_R[index_XT], 0).max() // block
        # Rows past the end of a tile are masked, so that they lengthen no walk.
        lowest = jnp.where(mine_XT, call.first_R[index_XT], call.at_R.max()).min() // block
        o_XKMV = _attend_tiles(call, index_XT, (lowest, last + 1))
        o_XTNV = o_XKMV.reshape(together, kv, tile_rows, groups, -1).swapaxes(1, 2)
        o_XTNV = o_XTNV.reshape(together, tile_rows, kv * groups, -1).astype(o_RNV.dtype)
        for x in range(together):
            # Rows past the end of a tile belong to other tiles, and what those wrote stays.
            before = jax.lax.dynamic_slice_in_dim(o_RNV, start_X[x], tile_rows)
            o_TNV = jnp.where(mine_XT[x, :, None, None], o_XTNV[x], before)
            o_RNV = jax.lax.dynamic_update_slice_in_dim(o_RNV, o_TNV, start_X[x], 0)
        return o_RNV

    # A loop, since the number of tiles is known only when the step runs.
    return jax.lax.fori_loop(0, -(-each.number // together), compute, o_RNV)


def _attend_tiles(
    call: Call, index_XT: jax.Array, blocks: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Values weighed by the shares of tiles with these rows, over blocks from the first to before
    the last: float32 [X, K, M, V]."""
    kv, groups = call.heads
    pages, block = call.block
    together, tile_rows = index_XT.shape
    at_XT = call.at_R[index_XT]
    first_XT = call.first_R[index_XT]
    # The table of the first row is that of the tile, which is of one request.
    tables_XW = call.tables_RW[index_XT[:, 0]]
    q_XKMH = call.q_RNH[index_XT].reshape(together, tile_rows, kv, groups, -1).swapaxes(1, 2)
    q_XKMH = q_XKMH.reshape(together, kv, tile_rows * groups, -1)

    def step(j: jax.Array, carry: Softmax) -> Softmax:
        ids = jax.lax.dynamic_slice_in_dim(tables_XW, j * pages, pages, axis=1)
        kept = read_pages(call.inputs, ids, call.q_RNH.dtype)
        kept = kept.reshape(together, block, *kept.shape[-2:])
        # XLA on a CPU is twice as fast where heads come first in memory already
        k_XKBH, v_XKBV = (
            x.swapaxes(1, 2) for x in split_keys_values(kept, call.value_dim, call.inputs.kv_heads)
        )
        key_B = j * block + jnp.arange(block)
        scores = jnp.einsum("XKMH,XKBH->XKMB", q_XKMH, k_XKBH, preferred_element_type=jnp.float32)
        scores = apply_soft_cap(scores * call.request.scale, call.request)
        seen_XTB = (key_B <= at_XT[..., None]) & (key_B >= first_XT[..., None])
        seen = jnp.repeat(seen_XTB, groups, axis=1)[:, None]
        return update_softmax(carry, scores, seen, v_XKBV, "XKMB,XKBV->XKMV")

    sinks_KM = None
    if call.inputs.sinks_N is not None:
        sinks_KM = jnp.tile(call.inputs.sinks_N.reshape(kv, groups), (1, tile_rows))
    begin = init_softmax(q_XKMH.shape[:-1], call.value_size, sinks_KM)
    return finish_softmax(jax.lax.fori_loop(*blocks, step, begin))


def _sort_by_length(each: Tiles, at: jax.Array, together: int) -> tuple[jax.Array, jax.Array]:
    """(first row, number of rows) of each tile, those with few keys first, since tiles that are
    computed together walk as many blocks as the longest. Padded to a multiple of `together`."""
    starts_R, counts_R = (
        jnp.pad(x, (0, -x.shape[0] % together), constant_values=fill)
        for x, fill in ((each.starts_R, each.starts_R.shape[0]), (each.counts_R, 0))
    )
    if together == 1:
        return starts_R, counts_R
    # Empty tiles go last, beyond the number that is computed.
    keys_R = jnp.where(counts_R > 0, at[starts_R], jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(keys_R)
    return starts_R[order], counts_R[order]


def _tile_rows(heads: int, groups: int, value_size: int) -> tuple[int, int]:
    """Rows of short and long tiles: few, as a row alone computes more for nothing, and many for
    pieces of prompts, which then read their keys less often. A row has the same bits in both: XLA
    on a CPU adds up otherwise fewer than 32 rows of heads together, a product of one row, and with
    many heads to a kv head one of fewer than 64; and its products change with more rows at sizes
    that were measured (EXPERIMENTS.md, "Few rows on a CPU")."""
    # With tiles of 4 rows at least, one at a time, 32 requests of 20 tokens took 84 ms, not 61.
    least = 64 if groups >= 16 else 2
    short = max(-(-32 // (FEW_TOGETHER * heads)), -(-least // groups))
    if groups >= 16:
        most = 1024
    elif value_size % 64 == 0 and value_size <= 256:
        most = 64 * groups
    else:
        most = 48
    return short, max(short, most // groups)
