"""Attention by tokamax's kernels: Mosaic on Hopper, Blackwell and TPUs, Triton on other NVIDIA
GPUs. An optional package; nothing else needs it.

Each call names its implementation, so that tokamax raises where it would otherwise take another
one. Its public function takes documents only as a dense mask, so packed batches are refused.
Shapes: B batch  T query time  S key time  N heads  K kv heads  H head dim  V value head dim.
"""

from collections.abc import Mapping

import jax

from maxstack.kernels import tokamax
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request
from maxstack.kernels.backends import Device

HEAD_DIMS = {"gpu": (64, 128), "tpu": (128, 256)}
MULTIPLE = 128
"""Lengths, so that no kernel meets a part of a block."""


def supports(case: AttentionCase) -> str | None:
    """The reason why tokamax cannot serve `case`; None: it can."""
    request, device = case.request, case.device
    if reason := tokamax.absent():
        return reason
    if device.platform == "gpu" and (reason := device.older_than_ampere):
        return reason
    if case.numbered:
        return "documents and chunks would be a dense mask of [queries, keys] there"
    if case.sinks:
        return "it has no sinks"
    if request.offset or case.queries != case.keys:
        return (
            f"it is used for sequences that attend to themselves, and {case.queries} queries "
            f"at offset {request.offset} meet {case.keys} keys"
        )
    if case.dtype != "bfloat16":
        return f"it multiplies {case.dtype} in a lower precision; bfloat16 would do"
    if case.head_dim not in HEAD_DIMS[device.platform] or case.value_dim != case.head_dim:
        return (
            f"head_dim {case.head_dim} with value head dim {case.value_dim} is none of "
            f"{', '.join(map(str, HEAD_DIMS[device.platform]))} for both"
        )
    if case.queries % MULTIPLE:
        return f"{case.queries} positions are not a multiple of {MULTIPLE}"
    return _of_features(request, device) or tokamax.elsewhere(device)


def run(
    inputs: Inputs,
    request: Request,
    blocks: Mapping[str, int] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] in q's dtype, differentiable. NotImplementedError for a
    request that the implementation cannot serve.

    `implementation` is for tests: on a CPU only xla and xla_chunked run.
    """
    q_BTNH, k_BSKH, v_BSKV, sinks_N, same = inputs
    assert sinks_N is None and not same and not request.offset, "supports() refuses these"
    back = request.furthest
    return tokamax.package().dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKV,
        scale=request.scale,
        is_causal=request.causal,
        logits_soft_cap=request.soft_cap,
        local_window_size=None if back is None else (back, 0 if request.causal else back),
        implementation=implementation or _named(Device.here()),
    )


def _named(device: Device) -> str:
    """tokamax's name of its kernels for the device."""
    return "mosaic" if device.platform == "tpu" or device.capability[0] in (9, 10) else "triton"


def _of_features(request: Request, device: Device) -> str | None:
    if request.window and device.platform == "tpu":
        return "its TPU kernel takes no window"
    if request.soft_cap and _named(device) == "triton":
        return "its Triton kernel has no backward pass with a soft cap"
    return None
