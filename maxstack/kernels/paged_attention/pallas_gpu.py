"""Paged attention on NVIDIA GPUs by a Pallas kernel that Triton compiles: a program takes a few
rows of one request and some heads of a kv head, and walks over the keys that these rows see.

Shapes as in the package, and G query heads of a kv head  X tiles of rows (R at most)  M rows times
heads of a program  B keys of a block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maxstack.kernels import triton
from maxstack.kernels.attention import pallas_gpu_tiles as parts
from maxstack.kernels.attention.pallas_gpu_tiles import LOG2E, NOTHING, Call, Sizes
from maxstack.kernels.attention.request import Request
from maxstack.kernels.backends import Device
from maxstack.kernels.paged_attention import Inputs, PagedCase
from maxstack.kernels.paged_attention.blockwise import first_seen
from maxstack.kernels.paged_attention.runs import tiles

WIDEST = 1088
SIZES = {256: Sizes(64, 64, 4, 2), 512: Sizes(32, 32, 4, 2), WIDEST: Sizes(16, 32, 8, 1)}
"""M, B, warps and stages by the most numbers that a key and its value hold together; B of float32
is half."""


def supports(case: PagedCase) -> str | None:
    """The reason why this kernel cannot serve; None: it can."""
    if reason := case.device.older_than_ampere or case.unlike_pages:
        return reason
    if case.dtype not in ("bfloat16", "float32"):
        return f"dtype {case.dtype} is neither bfloat16 nor float32"
    if parts.padded(case.head_dim) + parts.padded(case.value_dim) > WIDEST:
        return f"head_dim {case.head_dim} and value_dim {case.value_dim} are more than {WIDEST}"
    if case.request.scale <= 0:
        return f"scale {case.request.scale} is not positive"
    return None


def run(
    inputs: Inputs, request: Request, value_dim: int | None, interpret: bool = False
) -> jax.Array:
    """Online softmax over the blocks that a tile sees. Each row is computed as one of M // G rows,
    whatever stands beside it. `interpret`: to run on a CPU."""
    q_RNH, pages_PLCH, tables_RW, positions_R, sinks_N, kv_heads, _ = inputs
    rows, heads, size = q_RNH.shape
    kv = 1 if value_dim is not None else pages_PLCH.shape[2] // 2
    if kv_heads is None:
        kv_heads = jnp.arange(kv, dtype=jnp.int32)
    kv, value_size, keys = kv_heads.shape[0], value_dim or size, tables_RW.shape[1]
    width = parts.padded(size) + parts.padded(value_size)
    sizes = next(sizes for most, sizes in SIZES.items() if width <= most)
    if q_RNH.dtype == jnp.float32:
        sizes = sizes._replace(k=sizes.k // 2, stages=1)
    call = Call(
        request, rows, keys * pages_PLCH.shape[1], heads, kv, size, value_size, q_RNH.dtype.name,
        False, sinks_N is not None, Device.here(),
        forward=sizes, dq=sizes, dkv=sizes, interpret=interpret,
    )  # fmt: skip
    together = min(sizes.q, 1 << (heads // kv - 1).bit_length())
    of_tiles = tiles(tables_RW, positions_R, sizes.q // together)
    at_R = positions_R[jnp.minimum(of_tiles.starts_R, rows - 1)]
    sinks = () if sinks_N is None else (sinks_N.astype(jnp.float32),)
    scalars = of_tiles.starts_R, of_tiles.counts_R, at_R, kv_heads, tables_RW
    area = rows * heads * call.keys
    o_RNV = triton.call(
        functools.partial(_kernel, call=call, together=together, latent=value_dim is not None),
        jax.ShapeDtypeStruct((rows, heads, value_size), q_RNH.dtype),
        (*scalars, q_RNH, pages_PLCH, *sinks),
        grid=(rows, kv * pl.cdiv(heads // kv, together)),
        name="paged_attention",
        interpret=interpret,
        warps=sizes.warps,
        stages=sizes.stages,
        flops=2 * area * (size + value_size),
        transcendentals=area,
    )
    return jnp.where((positions_R >= 0)[:, None, None], o_RNV, 0)


def _kernel(
    starts_ref, counts_ref, at_ref, kv_heads_ref, tables_ref, q_ref, pages_ref, *refs,
    call: Call, together: int, latent: bool,
) -> None:  # fmt: skip
    """`together` heads of the rows of one tile."""
    *sinks_ref, o_ref = refs
    request, length, block = call.request, pages_ref.shape[1], call.forward.k
    groups, steep, tile = call.heads // call.kv_heads, call.steepness, pl.program_id(0)
    kv, share = triton.divided(pl.program_id(1), pl.cdiv(groups, together))
    start, count, at = starts_ref[tile], counts_ref[tile], at_ref[tile]
    last = at + count - 1
    row_M, head_M = triton.divided(jnp.arange(call.forward.q), together)
    head_M += share * together
    inside_M = (row_M < count) & (head_M < groups)
    at_M, row_M, head_M = at + row_M, start + row_M, kv * groups + head_M
    q = _read(q_ref, (row_M, head_M), call.head_dim, inside_M)
    column = 0 if latent else 2 * kv_heads_ref[kv]
    first_M = first_seen(request, at_M)

    def step(i: Any, state: Any) -> Any:
        o, most, total = state
        at_B = i * block + jnp.arange(block)
        page_B, token_B = triton.divided(at_B, length)
        page_B = triton.load(tables_ref.at[start, page_B], at_B <= last)
        k = _read(pages_ref, (page_B, token_B, column), call.head_dim, at_B <= last)
        scores = parts.score(call, parts.across(call, q, k))
        seen = (at_B <= at_M[:, None]) & (at_B >= first_M[:, None])
        scores = jnp.where(seen, scores, -jnp.inf)
        new = jnp.maximum(most, scores.max(axis=1))
        p = jnp.exp2(scores * steep - new[:, None] * steep)
        left = jnp.exp2((most - new) * steep)
        at_v = page_B, token_B, column + (not latent)
        v = _read(pages_ref, at_v, call.value_dim, at_B <= last)
        o = parts.add(call, tuple(x * left[:, None] for x in o), p.astype(v[0].dtype), v)
        return o, new, total * left + p.sum(axis=1)

    @pl.when(count > 0)
    def compute() -> None:
        most, total = (jnp.full(row_M.shape, x, jnp.float32) for x in (NOTHING, 0))
        for ref in sinks_ref:
            most, total = triton.load(ref.at[head_M], inside_M) * (LOG2E / steep), total + 1
        zeros = parts.zeros(call.forward.q, call.value_dim)
        first = jax.lax.div(first_seen(request, at), block)
        blocks = first, jax.lax.div(last, block) + 1
        o, _, total = jax.lax.fori_loop(*blocks, step, (zeros, most, total))
        total = jnp.where(total > 0, total, 1)
        for columns, part in zip(_columns(call.value_dim), o, strict=True):
            at_o = row_M[:, None], head_M[:, None], columns[None]
            inside = columns < call.value_dim
            triton.store_tile(o_ref.at[at_o], part / total[:, None], inside_M, inside)


def _read(ref: Any, index: tuple[Any, ...], dim: int, inside: jax.Array) -> parts.Parts:
    """The last axis of `ref`, `dim` long, at each index; zeros where not `inside`."""
    index = tuple(jnp.broadcast_to(x, inside.shape)[:, None] for x in index)
    return tuple(
        triton.load_tile(ref.at[(*index, columns[None])], inside, columns < dim)
        for columns in _columns(dim)
    )


def _columns(dim: int) -> list[jax.Array]:
    """Indices of each piece of an axis."""
    return [start + jnp.arange(size) for start, size in parts.pieces(dim)]
