"""Attention by our own kernels for Hopper GPUs, in Pallas on Mosaic: hopper_forward.py and
hopper_backward.py.

Shapes: B batch  T query time  S key time  N heads  K kv heads  H head dim  V value head dim.
"""

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.kernels.attention.request import AttentionCase, Request, Same

DIMS = 64, 128
DEFAULT = {"keys": 128, "stages": 2}
"""Keys of a forward step, and steps that are loaded ahead."""
LOG2E = float(np.log2(np.e))


def supports(case: AttentionCase) -> str | None:
    """The reason why the kernels cannot serve `case`; None: they can."""
    device, request = case.device, case.request
    if device.capability[0] != 9:
        return (
            f"its kernels are for compute capability 9.0 (H100, H200), and {device.kind} has "
            f"{'.'.join(map(str, device.capability))}"
        )
    if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(
        "jax_plugins.xla_cuda12"
    ):
        return (
            "the assembler of CUDA 12.8 compiles masks wrongly; replace jax-cuda12-plugin by "
            "jax[cuda13]"
        )
    if case.dtype != "bfloat16":
        return f"dtype {case.dtype} is not bfloat16"
    if case.head_dim not in DIMS or case.value_dim != case.head_dim:
        return (
            f"head_dim {case.head_dim} with value head dim {case.value_dim} is neither 64 "
            "nor 128 for both"
        )
    if request.scale <= 0:
        return f"scale {request.scale} is not positive"
    return None


def candidates(case: AttentionCase) -> list[dict[str, int]]:
    """Block sizes worth measuring, the default first."""
    return [
        DEFAULT,
        {"keys": 64, "stages": 2},
        {"keys": 64, "stages": 3},
        *([{"keys": 128, "stages": 3}] if case.head_dim == 64 else []),
    ]


def run(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    same: Same,
    request: Request,
    blocks: Mapping[str, int] | None = None,
    interpret: Any = None,
) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] in q's dtype. Sequences are padded to multiples of 128.
    `blocks`: of `candidates`.

    `interpret`: jax's InterpretGPUParams, for tests.
    """
    sizes = tuple(sorted({**DEFAULT, **(blocks or {})}.items()))
    log_sinks = None if sinks_N is None else sinks_N.astype(jnp.float32)
    return _attention(q_BTNH, k_BSKH, v_BSKV, log_sinks, same, request, sizes, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attention(q, k, v, sinks_N, same, request, sizes, interpret):
    return _forward(q, k, v, sinks_N, same, request, sizes, interpret)[0]


def _forward(q, k, v, sinks_N, same, request, sizes, interpret):
    from maxstack.kernels.attention.hopper_forward import forward

    call, arrays, numbers = _call(q, k, v, same, request, sizes, interpret)
    o_BTNV, log_BNT = forward(call, [*arrays, *numbers])
    if sinks_N is not None:
        with_sinks_BNT = jnp.logaddexp2(log_BNT, (sinks_N * LOG2E)[:, None])
        o_BTNV = (o_BTNV * _by_time(jnp.exp2(log_BNT - with_sinks_BNT))).astype(o_BTNV.dtype)
        log_BNT = with_sinks_BNT
    o_BTNV = o_BTNV[:, : q.shape[1]]
    return o_BTNV, (q, k, v, sinks_N, same, o_BTNV, log_BNT)


def _backward(request, sizes, interpret, saved, do_BTNV):
    from maxstack.kernels.attention import hopper_backward

    q, k, v, sinks_N, same, o_BTNV, log_BNT = saved
    call, arrays, numbers = _call(q, k, v, same, request, sizes, interpret)
    delta_BNT = _padded(
        jnp.einsum("BTNV,BTNV->BNT", o_BTNV, do_BTNV, preferred_element_type=jnp.float32),
        call.queries,
        2,
    )
    seen_BNT = jnp.where(log_BNT == -jnp.inf, jnp.inf, log_BNT)
    do = _padded(do_BTNV.astype(q.dtype), call.queries, 1)
    operands = [*arrays, do, seen_BNT, delta_BNT, *numbers]
    dk, dv = hopper_backward.of_keys(call, operands)
    dq = hopper_backward.of_queries(call, operands)
    dsinks_N = (
        None
        if sinks_N is None
        else -jnp.sum(jnp.exp2((sinks_N * LOG2E)[:, None] - seen_BNT) * delta_BNT, axis=(0, 2))
    )
    return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : v.shape[1]], dsinks_N, None


_attention.defvjp(_forward, _backward)


def _call(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    same: Same,
    request: Request,
    sizes: Sequence[tuple[str, int]],
    interpret: Any,
) -> tuple[Any, list[jax.Array], list[jax.Array]]:
    """-> the call, and its arrays padded to whole blocks: q, k and v; the numbers of the queries,
    then those of the keys."""
    from maxstack.kernels.attention.hopper_tiles import BLOCK, Call

    (b, t, n, h), (_, s, kv, _), blocks = q.shape, k.shape, dict(sizes)
    assert blocks.keys() == DEFAULT.keys() and BLOCK % blocks["keys"] == 0 == blocks["keys"] % 64, (
        blocks
    )
    padded_t, padded_s = (-(-length // BLOCK) * BLOCK for length in (t, s))
    call = Call(
        b,
        padded_t,
        padded_s,
        s,
        n,
        kv,
        h,
        q.dtype,
        request,
        len(same),
        blocks["keys"],
        blocks["stages"],
        interpret,
    )
    numbers = [
        _padded(jnp.broadcast_to(pair[side], (b, length)), padded, 1)
        for side, length, padded in ((0, t, padded_t), (1, s, padded_s))
        for pair in same
    ]
    arrays = [_padded(q, padded_t, 1), _padded(k, padded_s, 1), _padded(v, padded_s, 1)]
    return call, arrays, numbers


def _padded(x: jax.Array, length: int, axis: int) -> jax.Array:
    return jnp.pad(x, [(0, length - x.shape[i] if i == axis else 0) for i in range(x.ndim)])


def _by_time(x_BNT: jax.Array) -> jax.Array:
    return x_BNT.transpose(0, 2, 1)[..., None]
