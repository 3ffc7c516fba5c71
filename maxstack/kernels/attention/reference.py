"""The definition of attention, which serves everything, with the whole score matrix in memory.

Shapes: B batch  T query time  S key time  N heads  K kv heads  G heads / kv heads  H head dim  V
value head dim.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from maxstack.kernels.attention.request import Inputs, Request, visibility_mask

MASKED = -1e30


def run(inputs: Inputs, request: Request, blocks: Mapping[str, int] | None = None) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] in q's dtype. Scores and softmax are float32, or float64
    where q is."""
    q_BTNH, k_BSKH, v_BSKV, sinks_N, same = inputs
    b, t, n, h = q_BTNH.shape
    s, kv = k_BSKH.shape[1:3]
    number = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTKGH = q_BTNH.reshape(b, t, kv, n // kv, h)
    s_BKGTS = (
        jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=number)
        * request.scale
    )
    if request.soft_cap:
        s_BKGTS = request.soft_cap * jnp.tanh(s_BKGTS / request.soft_cap)
    seen_BTS = visibility_mask(request, jnp.arange(t), jnp.arange(s), same)[:, None, None]
    # Finite, so that a row without a key has a softmax, which the mask below clears.
    s_BKGTS = jnp.where(seen_BTS, s_BKGTS, MASKED)
    if sinks_N is not None:
        sinks = jnp.broadcast_to(
            sinks_N.astype(number).reshape(kv, n // kv, 1, 1), (*s_BKGTS.shape[:-1], 1)
        )
        s_BKGTS = jnp.concatenate([s_BKGTS, sinks], axis=-1)
    # A query that sees no key has equal scores; the
    # softmax alone would give it the mean of all values.
    p_BKGTS = jnp.where(seen_BTS, jax.nn.softmax(s_BKGTS, axis=-1)[..., :s], 0)
    o_BTKGV = jnp.einsum(
        "BKGTS,BSKV->BTKGV", p_BKGTS.astype(v_BSKV.dtype), v_BSKV, preferred_element_type=number
    )
    return o_BTKGV.reshape(b, t, n, -1).astype(q_BTNH.dtype)
