"""Attention as Pallas kernels for NVIDIA GPUs, compiled by Triton: the forward pass, and what
chooses its tiles.

A block of queries meets the blocks of keys that it may see, one after the other, with a running
softmax (FlashAttention-2, Dao 2023, arXiv:2307.08691). Blocks that no mask cuts are computed
without one. Shapes: B batch  T query time  S key time  N heads  K kv heads  H head dim  V value
head dim.
"""

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maxstack.kernels.attention import pallas_gpu_backward as backward
from maxstack.kernels.attention import pallas_gpu_tiles as tiles
from maxstack.kernels.attention.pallas_gpu_tiles import LOG2E, NOTHING, ByQuery, Call, Sizes
from maxstack.kernels.attention.request import Case, Request, Same
from maxstack.kernels.backends import Device

WIDEST = 256
PREFIXES = ("", "dq_", "dkv_")
"""Of the names of tuned sizes: the forward kernel's have none."""
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
"""As SMALL, for the 227 KiB of Hopper and of data centre Blackwell."""
BLACKWELL = LARGE | {512: ((128, 64, 8, 1), (64, 32, 8, 2), (32, 32, 8, 1))}
"""As LARGE: where both gradients are wide, tiles of 64 keys fill the tensor memory of compute
capability 10."""
FLOAT32 = {
    128: ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    256: ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    512: ((16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
}
"""As SMALL, for float32 everywhere."""


def supports(case: Case) -> str | None:
    """Why these kernels cannot serve."""
    if case.device.capability < (8, 0):
        return (
            f"needs a GPU of compute capability 8.0 (A100) or later; {case.device.kind} has "
            f"{'.'.join(map(str, case.device.capability))}"
        )
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


def candidates(case: Case) -> list[dict[str, int]]:
    """Tiles worth measuring, the default first; of the others each differs from it in one kernel.
    Not all of them fit on every GPU."""
    first = _defaults(case.dtype, case.head_dim, case.value_dim, case.device.capability)
    found = [_named(first)]
    for kernel, size in enumerate(first):
        others = [
            size._replace(warps=12 - size.warps),
            size._replace(stages=size.stages % 3 + 1),
            size._replace(k=size.k * 2, stages=1),
            size._replace(q=max(16, size.q // 2), warps=4),
            size._replace(k=max(16, size.k // 2), stages=3),
        ]
        found += [_named([*first[:kernel], other, *first[kernel + 1 :]]) for other in others]
    return found


def _named(sizes: Sequence[Sizes]) -> dict[str, int]:
    return {
        prefix + name: value
        for prefix, size in zip(PREFIXES, sizes, strict=True)
        for name, value in size._asdict().items()
    }


def _defaults(
    dtype: str, head_dim: int, value_dim: int, capability: tuple[int, int]
) -> list[Sizes]:
    table = FLOAT32 if dtype == "float32" else {9: LARGE, 10: BLACKWELL}.get(capability[0], SMALL)
    width = tiles.padded(head_dim) + tiles.padded(value_dim)
    return [Sizes(*size) for size in table[min(most for most in table if width <= most)]]


def run(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    same: Same,
    request: Request,
    blocks: Mapping[str, int] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] in q's dtype; see kernels/attention/ for the meaning of the
    arguments, `candidates` for `blocks`."""
    (_, t, n, h), (_, s, kv, v), dtype = q_BTNH.shape, v_BSKV.shape, q_BTNH.dtype.name
    found = blocks or _named(_defaults(dtype, h, v, Device.here().capability))
    forward, dq, dkv = (
        Sizes(*(found[prefix + name] for name in Sizes._fields)) for prefix in PREFIXES
    )
    call = Call(request, t, s, n, kv, h, v, dtype, len(same), forward, dq, dkv, interpret)
    return _attention(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, call):
    return _forward(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, call)[0]


def _saving(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, call):
    o_BTNV, log_BNT = _forward(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, call)
    return o_BTNV, (q_BTNH, k_BSKH, v_BSKV, sinks_N, same, o_BTNV, log_BNT)


def _backward(call, saved, do_BTNV):
    q_BTNH, k_BSKH, v_BSKV, sinks_N, same, o_BTNV, log_BNT = saved
    spent_BNT = jnp.einsum("BTNV,BTNV->BNT", o_BTNV, do_BTNV, preferred_element_type=jnp.float32)
    given = q_BTNH, k_BSKH, v_BSKV, do_BTNV.astype(q_BTNH.dtype), log_BNT, spent_BNT
    dq_BTNH, (dk_BSKH, dv_BSKV) = (
        backward.of_queries(call, given, same),
        backward.of_keys(call, given, same),
    )
    if sinks_N is None:
        return dq_BTNH, dk_BSKH, dv_BSKV, None, None
    share_BNT = jnp.exp2(sinks_N.astype(jnp.float32)[None, :, None] * LOG2E - log_BNT)
    return (
        dq_BTNH,
        dk_BSKH,
        dv_BSKV,
        -jnp.sum(share_BNT * spent_BNT, axis=(0, 2)).astype(sinks_N.dtype),
        None,
    )


_attention.defvjp(_saving, _backward)


def _forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    same: Same,
    call: Call,
) -> tuple[jax.Array, jax.Array]:
    """The result, and the logarithm to base 2 of what each query's softmax is divided by: float32
    [B, N, T]."""
    (b, t, n, h), v, spans = (
        q_BTNH.shape,
        call.value_dim,
        tiles.of_queries(call, call.forward, same),
    )
    by = ByQuery(call, call.forward, spans)
    given = [(q_BTNH, by.queries(h)), (k_BSKH, by.keys(h)), (v_BSKV, by.keys(v)), *by.masks(same)]
    if sinks_N is not None:
        given.append((sinks_N.astype(jnp.float32), pl.BlockSpec((None,), lambda i, n, b: (n,))))
    wanted = [
        (jax.ShapeDtypeStruct((b, t, n, v), q_BTNH.dtype), by.queries(v)),
        (jax.ShapeDtypeStruct((b, n, t), jnp.float32), by.logs()),
    ]
    o_BTNV, log_BNT = tiles.kernel(
        call,
        functools.partial(attention_forward, by),
        by.sizes,
        spans.visits,
        (1, 1),
        grid=(by.count, n, b),
        given=given,
        wanted=wanted,
    )
    return o_BTNV, log_BNT


def attention_forward(by: ByQuery, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any) -> None:
    """One block of queries of one head."""
    *others, o_ref, log_ref = refs
    call, size, steep = by.call, by.sizes, by.call.steepness
    pairs, spans_ref, sinks = (
        others[: 2 * call.numbered],
        others[2 * call.numbered],
        others[2 * call.numbered + 1 :],
    )
    at_q = by.row(pl.program_id(0)) * size.q + jnp.arange(size.q)
    row_inside = at_q < call.queries if call.queries % size.q else None
    q = tiles.read(q_ref, (slice(None),), call.head_dim, row_inside)
    mine = [tiles.read_row(ref, (slice(None),), row_inside)[:, None] for ref in pairs[::2]]

    def visit(masked: bool, at: Any, state: Any) -> Any:
        o, most, total = state
        keys = pl.ds(at * size.k, size.k)
        at_k = at * size.k + jnp.arange(size.k)
        inside = at_k < call.keys if masked and call.keys % size.k else None
        found = tiles.score(
            call, tiles.across(call, q, tiles.read(k_ref, (keys,), call.head_dim, inside))
        )
        if masked:
            numbers = [
                (x, tiles.read_row(ref, (keys,), inside)[None, :])
                for x, ref in zip(mine, pairs[1::2], strict=True)
            ]
            found = tiles.hide(
                call,
                found,
                at_q[:, None],
                at_k[None, :],
                numbers,
                [] if inside is None else [inside[None, :]],
            )
        new = jnp.maximum(most, found.max(axis=1))
        p, kept = jnp.exp2(found * steep - new[:, None] * steep), jnp.exp2((most - new) * steep)
        values = tiles.read(v_ref, (keys,), call.value_dim, inside)
        o = tiles.add(call, tuple(x * kept[:, None] for x in o), p.astype(values[0].dtype), values)
        return o, new, total * kept + p.sum(axis=1)

    most, total = jnp.full((size.q,), NOTHING, jnp.float32), jnp.zeros((size.q,), jnp.float32)
    for sink_ref in sinks:
        most, total = jnp.maximum(most, sink_ref[...] * (LOG2E / steep)), total + 1
    o, most, total = tiles.over(
        by.spans, spans_ref, visit, (tiles.zeros(size.q, call.value_dim), most, total)
    )
    total = jnp.where(total > 0, total, 1)
    tiles.write(o_ref, [x / total[:, None] for x in o], call.value_dim, row_inside)
    tiles.write_row(log_ref, most * steep + jnp.log2(total), row_inside)
