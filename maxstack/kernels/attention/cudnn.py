"""cuDNN's flash attention, through jax.nn.dot_product_attention, for requests that it computes
correctly.

jax hands cuDNN a kind of mask (none, or causal from the first query and the first key) and the
length of a window to the left, but no numbers of documents: its custom call has no operand for them
(jax/_src/cudnn/fused_attention_stablehlo.py in 0.10 and 0.12 alike). `supports` refuses the rest,
because cuDNN computes something else without an error:
- a window without a causal mask bounds the left alone, and queries see all that follows (jax pull
  request 39576);
- key lengths that end within a tile of 128 can make gradients NaN (pytorch issue 196678,
  cudnn-frontend issue 160).
"""

import ctypes.util
import functools
import importlib.metadata
import importlib.util
from collections.abc import Mapping

import jax

from maxstack.kernels.attention.request import AttentionCase, Inputs, Request

TILE = 128
WIDEST = 128
"""cuDNN takes 256 on Hopper alone, which jax looks up from a GPU that must be at hand: programs for
other machines would not compile."""
PLUGINS, PACKAGES = (
    ("jax_cuda13_plugin", "jax_cuda12_plugin"),
    ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
)


def supports(case: AttentionCase) -> str | None:
    """Why cuDNN cannot serve `case` correctly; None if it can."""
    return _device(case) or _request(case) or _shape(case) or missing()


def _device(case: AttentionCase) -> str | None:
    if (8, 0) <= case.device.capability <= (10, 0):
        return None
    return (
        f"{case.device.kind} has compute capability "
        f"{'.'.join(map(str, case.device.capability))}; supported are 8.0 (A100) to 10.0 (B200)"
    )


def _request(case: AttentionCase) -> str | None:
    request = case.request
    if case.dtype != "bfloat16":
        return f"dtype {case.dtype}: cuDNN computes in bfloat16 alone"
    if case.numbered:
        return (
            f"{'packed rows' if case.packed else 'chunks'}: jax passes no numbers of "
            "documents or chunks to cuDNN, which would attend across them"
        )
    if request.soft_cap:
        return f"soft_cap {request.soft_cap}: cuDNN does not cap scores"
    if case.sinks:
        return "sinks: jax does not pass them to cuDNN"
    if request.window and not request.causal:
        return f"window {request.window} without a causal mask: cuDNN bounds its left alone"
    if request.scale <= 0:
        return f"scale {request.scale} is not positive"
    return None


def _shape(case: AttentionCase) -> str | None:
    if case.request.causal and (case.request.offset or case.queries != case.keys):
        return (
            f"{case.queries} causal queries of {case.keys} keys from position "
            f"{case.request.offset}: cuDNN's causal mask is used only where query 0 is at key 0 "
            "and there are as many queries as keys"
        )
    for name, length in (("queries", case.queries), ("keys", case.keys)):
        if length % TILE:
            return (
                f"{length} {name} are not a multiple of {TILE}; gradients can be NaN in "
                "cuDNN's last tile"
            )
    if case.head_dim != case.value_dim:
        return (
            f"head_dim {case.head_dim} is not value_dim {case.value_dim}, which "
            "jax.nn.dot_product_attention wants equal"
        )
    if case.head_dim % 8 or case.head_dim > WIDEST:
        return f"head_dim {case.head_dim} is not a multiple of 8 up to {WIDEST}"
    if case.heads % case.kv_heads:
        return f"{case.heads} heads are not a multiple of {case.kv_heads} kv_heads"
    return None


@functools.cache
def missing() -> str | None:
    """Why cuDNN cannot be loaded; None if it is installed. Needs no GPU."""
    if not any(map(importlib.util.find_spec, PLUGINS)):
        return "jax's CUDA plugin is not installed; pip install jax[cuda13]"
    # The plugin does not hold cuDNN, which comes from its own package or from the system.
    if any(map(_version, PACKAGES)) or ctypes.util.find_library("cudnn"):
        return None
    return f"cuDNN is not installed; pip install {PACKAGES[0]}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run(inputs: Inputs, request: Request, blocks: Mapping[str, int] | None = None) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] in q's dtype, of requests that `supports` takes; cuDNN
    chooses its own tiles."""
    q_BTNH, k_BSKH, v_BSKV, sinks_N, same = inputs
    assert sinks_N is None and not same and not request.soft_cap and not request.chunk
    assert request.causal or not request.window, "supports refuses these"
    window = (
        # A window as long as the sequence hides nothing.
        (request.window - 1, 0) if request.window and request.window < k_BSKH.shape[1] else None
    )
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKV,
        scale=request.scale,
        is_causal=request.causal,
        local_window_size=window,
        implementation="cudnn",
    )
