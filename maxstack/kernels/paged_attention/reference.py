"""Paged attention by its definition: all pages of a request at once. Shapes as in the package."""

import jax
import jax.numpy as jnp

from maxstack.kernels.attention.request import Request
from maxstack.kernels.paged_attention import Inputs, read_pages, split_keys_values
from maxstack.kernels.paged_attention.blockwise import apply_soft_cap, first_visible


def run(inputs: Inputs, request: Request, value_dim: int | None) -> jax.Array:
    """Softmax over the keys of each row's request, in float32."""
    q_RNH, pages_PLCH, tables_RW, positions_R, sinks_N, kv_heads, _ = inputs
    rows, heads, size = q_RNH.shape
    kept = read_pages(inputs, tables_RW, jnp.float32).reshape(rows, -1, *pages_PLCH.shape[2:])
    k_RSKH, v_RSKV = split_keys_values(kept, value_dim, kv_heads)
    q_RKGH = q_RNH.astype(jnp.float32).reshape(rows, k_RSKH.shape[2], -1, size)
    # Backends are compared with this, so it must not round as they do.
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("RKGH,RSKH->RKGS", q_RKGH, k_RSKH, precision=exact) * request.scale
    at_S = jnp.arange(kept.shape[1])
    first_R = first_visible(request, positions_R)
    seen_RS = (at_S <= positions_R[:, None]) & (at_S >= first_R[:, None])
    scores = jnp.where(seen_RS[:, None, None], apply_soft_cap(scores, request), -jnp.inf)
    sinks = jnp.full(scores.shape[:3], -jnp.inf)
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.astype(jnp.float32).reshape(sinks.shape[1:]), sinks.shape)
    most = jnp.maximum(scores.max(-1), sinks)
    # A row that sees nothing would subtract -inf from -inf.
    most = jnp.where(jnp.isfinite(most), most, 0.0)
    share = jnp.exp(scores - most[..., None])
    total = share.sum(-1) + jnp.exp(sinks - most)
    o = jnp.einsum("RKGS,RSKV->RKGV", share, v_RSKV, precision=exact)
    o = o / jnp.where(total == 0, 1.0, total)[..., None]
    return o.reshape(rows, heads, -1).astype(q_RNH.dtype)
