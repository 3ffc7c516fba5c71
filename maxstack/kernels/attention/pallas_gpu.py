"""Attention as Pallas kernels for NVIDIA GPUs, compiled by Triton: the forward pass, and what
chooses its tiles.

A block of queries meets the blocks of keys that it may see, one after the other, with a running
softmax (FlashAttention-2, Dao 2023, arXiv:2307.08691). Blocks that no mask cuts are computed
without one. Shapes: B batch  T query time  S key time  N heads  K kv heads  H head dim  V value
head dim.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from maxstack.kernels import triton
from maxstack.kernels.attention import pallas_gpu_backward as backward
from maxstack.kernels.attention import pallas_gpu_tiles as tiles
from maxstack.kernels.attention.pallas_gpu_tiles import LOG2E, NOTHING, Call, Grid, Sizes
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request, differentiable
from maxstack.kernels.backends import Device

WIDEST = 256
PREFIXES = ("", "dq_", "dkv_")
"""Prefixes of tuned sizes by kernel: forward, queries, keys and values."""
SMALL = {
    128: ((128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2)),
    256: ((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1)),
    320: ((128, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2)),
    512: ((64, 32, 4, 2), (64, 32, 8, 1), (32, 32, 8, 1)),
}
"""Tiles by the most numbers that a key and its value hold together: queries, keys, warps and stages
of the forward kernel, of that for queries, and of that for keys and values. They fit into the 99
KiB of shared memory of the smallest GPU that is served, and spill few registers or none."""
LARGE = {
    128: ((128, 128, 8, 3), (128, 64, 8, 2), (64, 128, 8, 2)),
    256: ((128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2)),
    320: ((128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 1)),
    512: ((128, 64, 8, 1), (64, 32, 8, 2), (32, 64, 8, 2)),
}
"""Tiles for the 227 KiB of Hopper and of data centre Blackwell."""
BLACKWELL = LARGE | {512: ((128, 64, 8, 1), (64, 32, 8, 2), (32, 32, 8, 1))}
"""Tiles of LARGE, but smaller where both gradients are wide: there tiles of 64 keys fill the tensor
memory of compute capability 10."""
FLOAT32 = {
    128: ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    256: ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    512: ((16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
}
"""Tiles of float32 on every GPU."""


def supports(case: AttentionCase) -> str | None:
    """The reason why these kernels cannot serve; None: they can."""
    if reason := case.device.older_than_ampere:
        return reason
    if case.dtype not in ("bfloat16", "float32"):
        return f"dtype {case.dtype} is neither bfloat16 nor float32"
    for name, dim in (("head_dim", case.head_dim), ("value_dim", case.value_dim)):
        if dim > WIDEST:
            return (
                f"{name} {dim} is more than {WIDEST}, and a tile of it does not fit into a "
                "GPU's shared memory"
            )
    if case.heads % case.kv_heads:
        return f"{case.heads} heads are not a multiple of {case.kv_heads} kv_heads"
    if case.request.scale <= 0:
        return f"scale {case.request.scale} is not positive"
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "this jax has no Triton backend for Pallas"
    return None


def candidates(case: AttentionCase) -> list[dict[str, int]]:
    """Tiles worth measuring, the default first; of the others each differs from it in one kernel.
    Not all of them fit on every GPU."""
    first = _defaults(case)
    sizes = [_named(first)]
    for kernel, size in enumerate(first):
        others = [
            size._replace(warps=12 - size.warps),
            size._replace(stages=size.stages % 3 + 1),
            size._replace(k=size.k * 2, stages=1),
            size._replace(q=max(16, size.q // 2), warps=4),
            size._replace(k=max(16, size.k // 2), stages=3),
        ]
        sizes += [_named([*first[:kernel], other, *first[kernel + 1 :]]) for other in others]
    return sizes


def _named(sizes: Sequence[Sizes]) -> dict[str, int]:
    return {
        prefix + name: value
        for prefix, size in zip(PREFIXES, sizes, strict=True)
        for name, value in size._asdict().items()
    }


def _defaults(case: AttentionCase) -> list[Sizes]:
    table = {9: LARGE, 10: BLACKWELL}.get(case.device.capability[0], SMALL)
    if case.dtype == "float32":
        table = FLOAT32
    width = tiles.padded(case.head_dim) + tiles.padded(case.value_dim)
    return [Sizes(*size) for size in table[min(most for most in table if width <= most)]]


def run(
    inputs: Inputs,
    request: Request,
    blocks: Mapping[str, int] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] in q's dtype; see kernels/attention/ for the meaning of the
    arguments, `candidates` for `blocks`."""
    case = AttentionCase.of(inputs, request.narrowed, Device.here())
    named = blocks or _named(_defaults(case))
    forward, dq, dkv = (
        Sizes(*(named[prefix + name] for name in Sizes._fields)) for prefix in PREFIXES
    )
    call = Call(**vars(case), forward=forward, dq=dq, dkv=dkv, interpret=interpret)
    return _attention(inputs, call)


def _forward(inputs: Inputs, call: Call) -> tuple[jax.Array, jax.Array]:
    q_BTNH, _, _, sinks_N, same = inputs
    (b, t, n, _), v, more = q_BTNH.shape, call.value_dim, []
    by = Grid(call, call.forward, same)
    if sinks_N is not None:
        more.append((sinks_N.astype(jnp.float32), pl.BlockSpec((None,), lambda i, n, b: (n,))))
    outs = [
        (jax.ShapeDtypeStruct((b, t, n, v), q_BTNH.dtype), by.queries(v)),
        (jax.ShapeDtypeStruct((b, n, t), jnp.float32), by.logs()),
    ]
    o_BTNV, log_BNT = by.run(attention_forward, (1, 1), inputs[:3], outs, *more)
    return o_BTNV, log_BNT


def _backward(
    call: Call, inputs: Inputs, log_BNT: jax.Array, mean_BNT: jax.Array, do_BTNV: jax.Array
) -> tuple[jax.Array, ...]:
    arrays = *inputs[:3], do_BTNV.astype(inputs.q_BTNH.dtype), log_BNT, mean_BNT
    dq_BTNH = backward.of_queries(call, arrays, inputs.same)
    return dq_BTNH, *backward.of_keys(call, arrays, inputs.same)


_attention = differentiable(_forward, _backward, unit=1 / LOG2E)


def attention_forward(by: Grid, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any) -> None:
    """One block of queries of one head."""
    *others, o_ref, log_ref = refs
    call, size, steep = by.call, by.sizes, by.call.steepness
    pairs, (spans_ref, *sinks) = others[: 2 * call.numbered], others[2 * call.numbered :]
    _, at_q, rows = tiles.block(by.row(pl.program_id(0)), size.q, call.queries)
    q = tiles.read(q_ref, (slice(None),), call.head_dim, rows)
    own = [triton.load(ref.at[:], rows)[:, None] for ref in pairs[::2]]

    def visit(masked: bool, at: Any, state: Any) -> Any:
        o, most, total = state
        keys, at_k, inside = tiles.block(at, size.k, call.keys, masked)
        k = tiles.read(k_ref, (keys,), call.head_dim, inside)
        scores = tiles.score(call, tiles.across(call, q, k))
        if masked:
            scores = tiles.hide(
                call, scores, at_q[:, None], at_k[None, :], own, pairs[1::2], keys, inside
            )
        new = jnp.maximum(most, scores.max(axis=1))
        p = jnp.exp2(scores * steep - new[:, None] * steep)
        share = jnp.exp2((most - new) * steep)
        values = tiles.read(v_ref, (keys,), call.value_dim, inside)
        o = tiles.add(call, tuple(x * share[:, None] for x in o), p.astype(values[0].dtype), values)
        return o, new, total * share + p.sum(axis=1)

    most, total = jnp.full((size.q,), NOTHING, jnp.float32), jnp.zeros((size.q,), jnp.float32)
    for sink_ref in sinks:
        most, total = jnp.maximum(most, sink_ref[...] * (LOG2E / steep)), total + 1
    o, most, total = tiles.over(
        by.spans, spans_ref, visit, (tiles.zeros(size.q, call.value_dim), most, total)
    )
    total = jnp.where(total > 0, total, 1)
    tiles.write(o_ref, [x / total[:, None] for x in o], call.value_dim, rows)
    plgpu.store(log_ref.at[:], most * steep + jnp.log2(total), mask=rows)
