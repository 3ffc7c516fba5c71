"""Causal attention: one meaning, the dense reference, and the backends that compute it.

Shapes: B batch  T query time  S key time  N heads  K kv heads  G heads / kv heads  H head dim.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from maxstack.kernels.blockwise_attention import blockwise_attention

MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Request:
    """What a layer asks: scores are q.k * scale, soft-capped, and a query sees the last `window` positions of its own document."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BT: jax.Array | None, request: Request,
              backend: Literal["auto", "reference", "blockwise"] = "auto") -> jax.Array:
    """softmax(scores) v with float32 softmax -> [B, T, N, H] in q's dtype; a position sees itself and earlier ones of the same segment."""
    return BACKENDS[choose(backend)](q_BTNH, k_BSKH, v_BSKH, segments_BT, request)


def choose(backend: Literal["auto", "reference", "blockwise"]) -> str:
    """The backend that `auto` stands for; blockwise serves every request, in less time and memory than the reference."""
    return "blockwise" if backend == "auto" else backend


def reference(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BT: jax.Array | None, request: Request) -> jax.Array:
    """The definition, with the whole score matrix in memory."""
    b, t, n, h = q_BTNH.shape
    kv = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(b, t, kv, n // kv, h)
    s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * request.scale
    if request.soft_cap:
        s_BKGTS = request.soft_cap * jnp.tanh(s_BKGTS / request.soft_cap)
    distance_TS = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
    seen = ((distance_TS >= 0) & (distance_TS < (request.window or t)))[None, None, None]
    if segments_BT is not None:
        seen = seen & (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None, None]
    p_BKGTS = jax.nn.softmax(jnp.where(seen, s_BKGTS, MASKED), axis=-1)
    o_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", p_BKGTS.astype(v_BSKH.dtype), v_BSKH, preferred_element_type=jnp.float32)
    return o_BTKGH.reshape(b, t, n, h).astype(q_BTNH.dtype)


def _blockwise(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BT: jax.Array | None, request: Request) -> jax.Array:
    return blockwise_attention(q_BTNH, k_BSKH, v_BSKH, segments_BT, request.scale, request.window, request.soft_cap)


BACKENDS = {"reference": reference, "blockwise": _blockwise}
