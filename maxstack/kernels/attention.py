"""Causal attention: one meaning, the dense reference, and the backends that compute it.

Shapes: B batch  T query time  S key time  N heads  K kv heads  G heads / kv heads  H head dim  V value head dim.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from maxstack.kernels.blockwise_attention import blockwise_attention

MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Request:
    """What a layer asks: scores are q.k * scale, soft-capped, and a query sees the last `window` positions of its own document and `chunk`."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    chunk: int | None = None


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, segments_BT: jax.Array | None, request: Request,
              backend: Literal["auto", "reference", "blockwise"] = "auto", sinks_N: jax.Array | None = None,
              positions_BT: jax.Array | None = None) -> jax.Array:
    """softmax(scores) v with float32 softmax -> [B, T, N, V] in q's dtype; a position sees itself and earlier ones of the same segment.

    `sinks_N` is one more score for each head, neither scaled nor capped, that takes its share of the softmax and gives nothing. Chunks are
    counted by `positions_BT`, places within the document; None: by the place since the segment number last changed.
    """
    same = () if segments_BT is None else (segments_BT,)
    if request.chunk:
        if positions_BT is None:
            positions_BT = _places(segments_BT, q_BTNH.shape[1])
        same = (*same, positions_BT // request.chunk)
    return BACKENDS[choose(backend)](q_BTNH, k_BSKH, v_BSKV, sinks_N, same, request)


def choose(backend: Literal["auto", "reference", "blockwise"]) -> str:
    """The backend that `auto` stands for; blockwise serves every request, in less time and memory than the reference."""
    return "blockwise" if backend == "auto" else backend


def reference(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, sinks_N: jax.Array | None, same: tuple[jax.Array, ...],
              request: Request) -> jax.Array:
    """The definition, with the whole score matrix in memory. A query sees keys with equal numbers in every [B or 1, T] of `same`."""
    b, t, n, h = q_BTNH.shape
    kv = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(b, t, kv, n // kv, h)
    s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * request.scale
    if request.soft_cap:
        s_BKGTS = request.soft_cap * jnp.tanh(s_BKGTS / request.soft_cap)
    distance_TS = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
    seen = ((distance_TS >= 0) & (distance_TS < (request.window or t)))[None, None, None]
    for numbers_BT in same:
        seen = seen & (numbers_BT[:, :, None] == numbers_BT[:, None, :])[:, None, None]
    s_BKGTS = jnp.where(seen, s_BKGTS, MASKED)
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.astype(jnp.float32).reshape(kv, n // kv, 1, 1), (*s_BKGTS.shape[:-1], 1))
        s_BKGTS = jnp.concatenate([s_BKGTS, sinks], axis=-1)
    p_BKGTS = jax.nn.softmax(s_BKGTS, axis=-1)[..., :t]
    o_BTKGV = jnp.einsum("BKGTS,BSKV->BTKGV", p_BKGTS.astype(v_BSKV.dtype), v_BSKV, preferred_element_type=jnp.float32)
    return o_BTKGV.reshape(b, t, n, -1).astype(q_BTNH.dtype)


def _blockwise(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, sinks_N: jax.Array | None, same: tuple[jax.Array, ...],
               request: Request) -> jax.Array:
    reach = min((limit for limit in (request.window, request.chunk) if limit), default=None)
    return blockwise_attention(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, request.scale, reach, request.soft_cap)


def _places(segments_BT: jax.Array | None, t: int) -> jax.Array:
    """int32 [B or 1, T]: places since the segment number last changed."""
    index = jnp.arange(t)[None]
    if segments_BT is None:
        return index
    new_BT = jnp.concatenate([jnp.ones((segments_BT.shape[0], 1), bool), segments_BT[:, 1:] != segments_BT[:, :-1]], axis=1)
    return index - jax.lax.cummax(jnp.where(new_BT, index, 0), axis=1)


BACKENDS = {"reference": reference, "blockwise": _blockwise}
