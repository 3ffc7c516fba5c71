"""Paged attention on TPUs by our own Pallas kernel: a few rows of one request at a time, each tile
over its own keys alone, whose pages are fetched while those before them are computed.

Shapes as in the package, and X tiles (R at most)  T rows of a tile  G query heads of a kv head,
padded to eights  M = T * G  B keys of a block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxstack.kernels.attention.request import Request
from maxstack.kernels.paged_attention import Inputs, PagedCase
from maxstack.kernels.paged_attention.blockwise import BLOCK, LOWEST, apply_soft_cap, first_visible
from maxstack.kernels.paged_attention.runs import tiles

MEMORY = 48 << 20
"""Most bytes of vector memory of the kernel."""
SUBLANES, LANES = 8, 128
TALL = 64
"""Rows times heads of one product; a row with more heads is a product of its own."""


def supports(case: PagedCase) -> str | None:
    """Why this kernel cannot serve `case`; None if it can. XLA keeps other numbers of kv heads in
    an order in which no page can be fetched, and would copy the whole cache."""
    if reason := case.unlike_pages:
        return reason
    if case.dtype not in ("bfloat16", "float32"):
        return f"{case.dtype} is neither bfloat16 nor float32"
    if case.numbered:
        return f"each device reads some of the {case.kv_heads} kv_heads that its pages hold"
    arrays = 1 if case.latent else 2 * case.kv_heads
    # 2,050 MiB of copies beside a cache of 1,536 were in programs with 3, 5 or 6 kv heads.
    if arrays > 4 and arrays % SUBLANES:
        return f"{case.kv_heads} kv_heads are not 1, 2 or a multiple of 4: XLA would copy the cache"
    if case.page % SUBLANES:
        return f"page {case.page} is not a multiple of {SUBLANES}"
    tall, groups = _tall(case.heads // case.kv_heads)
    size = max(LANES, case.head_dim)
    # Two blocks are there at a time: one is computed while the next arrives.
    fetched = 2 * max(BLOCK, case.page) * arrays * size * jnp.dtype(case.dtype).itemsize
    if fetched + 40 * case.kv_heads * tall * groups * size > MEMORY // 2:
        return f"page {case.page} and {case.heads} heads take more than {MEMORY // 2} bytes of VMEM"
    return None


def run(
    inputs: Inputs, request: Request, value_dim: int | None, interpret: Any = False
) -> jax.Array:
    """Online softmax over the blocks that a tile sees. A row is always computed as one of T rows,
    so other rows never change its bits. `interpret`: run on a CPU."""
    q_RNH, pages, tables_RW, positions_R, sinks_N, _, _ = inputs
    rows, heads, size = q_RNH.shape
    if value_dim is not None:
        pages = pages[:, :, 0]
    length, kv = pages.shape[1], 1 if value_dim is not None else pages.shape[2] // 2
    value_size, per_block = value_dim or size, max(1, BLOCK // length)
    tall, groups = _tall(heads // kv)
    # Whole blocks of pages, so that every fetch reads a number of a page.
    tables_RW = jnp.pad(tables_RW, ((0, 0), (0, -tables_RW.shape[1] % per_block)))
    width = tables_RW.shape[1]
    starts_R, counts_R, tile_R, number = tiles(tables_RW, positions_R, tall)
    # Tiles beyond the last start at R, which is no row.
    starts_R = jnp.minimum(starts_R, rows - 1)

    def by_head(x: jax.Array, fill: float) -> jax.Array:
        """[.., N, ?] -> [K, .., G, ?]"""
        x = x.reshape(*x.shape[:-2], kv, heads // kv, x.shape[-1]).astype(jnp.float32)
        more = (*((0, 0),) * (x.ndim - 2), (0, groups - heads // kv), (0, 0))
        return jnp.moveaxis(jnp.pad(x, more, constant_values=fill), -3, 0)

    # Room behind the last row, for a tile that begins there.
    q_KRGH = jnp.pad(by_head(q_RNH, 0.0), ((0, 0), (0, tall), (0, 0), (0, 0)))
    # The running maximum begins at the sinks, whose share of the sum is 1 relative to themselves.
    begin_KM = jnp.full((kv, tall * groups, 1), LOWEST)
    if sinks_N is not None:
        begin_KM = jnp.tile(by_head(sinks_N[:, None], LOWEST), (1, tall, 1))
    shape = (kv, tall, groups, value_size)
    o_XKTGV = pl.pallas_call(
        functools.partial(_kernel, request=request, dtype=q_RNH.dtype, sinks=sinks_N is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(jnp.maximum(number, 1),),
            in_specs=[
                pl.BlockSpec(
                    # The table of one tile alone: those of 256 rows of 2,048 pages exceed the
                    # scalar memory.
                    (None, 1, width),
                    lambda i, starts, *_: (starts[i], 0, 0),
                    memory_space=pltpu.SMEM,
                ),
                pl.BlockSpec(
                    # By element, since a tile may begin at any row.
                    tuple(map(pl.Element, (kv, tall, groups, size))),
                    lambda i, starts, *_: (0, starts[i], 0, 0),
                ),
                pl.BlockSpec(begin_KM.shape, lambda *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((None, *shape), lambda i, *_: (i, 0, 0, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, per_block, *pages.shape[1:]), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                *(pltpu.VMEM((kv, tall * groups, n), jnp.float32) for n in (1, 1, value_size)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=MEMORY),
        out_shape=jax.ShapeDtypeStruct((rows, *shape), q_RNH.dtype),
        name="paged_attention",
        interpret=interpret,
    )(starts_R, counts_R, positions_R[starts_R], tables_RW[:, None], q_KRGH, begin_KM, pages)
    # Tiles are written whole, each to a place of its own; their rows are picked out here.
    o_RKGV = o_XKTGV[tile_R, :, jnp.arange(rows) - starts_R[tile_R], : heads // kv]
    o_RKGV = jnp.where((positions_R >= 0)[:, None, None, None], o_RKGV, 0)
    return o_RKGV.reshape(rows, heads, value_size)


def _tall(groups: int) -> tuple[int, int]:
    """Rows of a tile, and padded query heads of a kv head."""
    padded = -(-groups // SUBLANES) * SUBLANES
    return max(1, TALL // padded), padded


def _kernel(
    starts_ref, counts_ref, at_ref, table_ref, q_ref, begin_ref, pages_ref, o_ref,
    fetched, semaphores, most, total, sums, *, request: Request, dtype: Any, sinks: bool,
) -> None:  # fmt: skip
    """One tile."""
    _, per_block, length = fetched.shape[:3]
    kv, tall, groups, size = q_ref.shape
    rows, block = tall * groups, per_block * length
    value_size = sums.shape[2]
    at = at_ref[pl.program_id(0)]
    last = at + counts_ref[pl.program_id(0)] - 1

    def fetches(j: Any) -> list[Any]:
        slot = jax.lax.rem(j, 2)
        return [
            pltpu.make_async_copy(
                pages_ref.at[table_ref[0, j * per_block + n]],
                fetched.at[slot, n],
                semaphores.at[slot],
            )
            for n in range(per_block)
        ]

    def step(j: Any, _: None) -> None:
        @pl.when((j + 1) * block <= last)
        # Started before this block is computed and awaited in the next step.
        def fetch_next() -> None:
            for fetch in fetches(j + 1):
                fetch.start()

        for fetch in fetches(j):
            fetch.wait()
        key_MB = j * block + jax.lax.broadcasted_iota(jnp.int32, (rows, block), 1)
        seen = (key_MB <= at_MB) & (key_MB >= first_MB)
        for head in range(kv):
            k_BH, v_BV = _of_head(fetched, jax.lax.rem(j, 2), head, value_size)
            q_MH = q_ref[head].reshape(rows, size).astype(dtype)
            scores = apply_soft_cap(_product(q_MH, k_BH, 1) * request.scale, request)
            # Below LOWEST, where `most` begins: exp(2 LOWEST
            # - LOWEST) is 0 also before the first seen key.
            scores = jnp.where(seen, scores, 2 * LOWEST)
            higher = jnp.maximum(most[head], scores.max(1, keepdims=True))
            share, left = jnp.exp(scores - higher), jnp.exp(most[head] - higher)
            total[head] = total[head] * left + share.sum(1, keepdims=True)
            sums[head] = sums[head] * left + _product(share.astype(v_BV.dtype), v_BV, 0)
            most[head] = higher

    index = jax.lax.broadcasted_iota(jnp.int32, (tall, groups, block), 0)
    at_MB = at + index.reshape(rows, block)
    first_MB = first_visible(request, at_MB)
    first = jax.lax.div(first_visible(request, at), block)
    most[...] = begin_ref[...]
    total[...] = jnp.full(total.shape, float(sinks))
    sums[...] = jnp.zeros(sums.shape)
    # The first block has no step before it that would fetch it.
    for fetch in fetches(first):
        fetch.start()
    jax.lax.fori_loop(first, jax.lax.div(last, block) + 1, step, None)
    o_MV = sums[...] / jnp.where(total[...] == 0, 1.0, total[...])
    o_ref[...] = o_MV.reshape(o_ref.shape).astype(o_ref.dtype)


def _of_head(fetched: Any, slot: Any, head: int, value_size: int) -> tuple[jax.Array, jax.Array]:
    """Keys [B, H] and values [B, V] of a kv head among the fetched pages."""
    if fetched.ndim == 4:
        k_BH = fetched[slot].reshape(-1, fetched.shape[3])
        return k_BH, k_BH[:, :value_size]
    if fetched.dtype == jnp.float32:
        k, v = fetched[slot, :, :, 2 * head], fetched[slot, :, :, 2 * head + 1]
        return k.reshape(-1, k.shape[-1]), v.reshape(-1, v.shape[-1])
    # a word holds a number of the key and one of the value
    words = fetched.bitcast(jnp.uint32)[slot, :, :, head]
    words = words.reshape(-1, words.shape[-1])
    key, value = (
        pltpu.bitcast(x, jnp.float32).astype(fetched.dtype)
        for x in (words << 16, words & jnp.uint32(0xFFFF0000))
    )
    return key, value


def _product(a: jax.Array, b: jax.Array, over: int) -> jax.Array:
    """a b, or with `over` 1 a b^T, summed in float32; of float32 in full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((1,), (over,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
