"""Attention a block of queries at a time, in plain XLA: masked blocks are skipped and no score outlives its block.

The backward pass recomputes the scores from the saved log-sum-exp (FlashAttention, Dao et al. 2022, arXiv:2205.14135).
Shapes: B batch  T query time  S key time  K kv heads  G heads / kv heads  H head dim  Q rows of a block, G x queries.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

MASKED = -1e30
BLOCK, MOST_BLOCKS = 128, 16


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def blockwise_attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BT: jax.Array | None,
                        scale: float, window: int | None, soft_cap: float | None) -> jax.Array:
    """Causal grouped-query attention -> [B, T, N, H] in q's dtype; see kernels/attention.py for the meaning of the arguments."""
    return _forward(q_BTNH, k_BSKH, v_BSKH, segments_BT, scale, window, soft_cap)[0]


def _blocks(t: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(first query, end of queries and keys, first key) of each block that is not all masked."""
    size = max(BLOCK, -(-t // MOST_BLOCKS))
    for start in range(0, t, size):
        yield start, min(start + size, t), max(0, start - window + 1) if window else 0


def _by_head(x_BTNH: jax.Array, kv: int) -> jax.Array:
    b, t, n, h = x_BTNH.shape
    return x_BTNH.reshape(b, t, kv, n // kv, h).transpose(0, 2, 3, 1, 4)


def _rows(x_BKGTH: jax.Array, start: int, end: int) -> jax.Array:
    b, k, g, _, h = x_BKGTH.shape
    return x_BKGTH[:, :, :, start:end].reshape(b, k, g * (end - start), h)


def _by_time(blocks: list[jax.Array], groups: int) -> jax.Array:
    b, k, _, h = blocks[0].shape
    x_BKGTH = jnp.concatenate([block.reshape(b, k, groups, -1, h) for block in blocks], axis=3)
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(b, -1, k * groups, h)


def _scores(q_BKQH: jax.Array, k_BKSH: jax.Array, segments_BT: jax.Array | None, block: tuple[int, int, int],
            window: int | None, soft_cap: float | None) -> tuple[jax.Array, jax.Array]:
    """Masked scores, and the scores before the mask."""
    start, end, first = block
    raw = jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKSH, preferred_element_type=jnp.float32)
    if soft_cap:
        raw = soft_cap * jnp.tanh(raw / soft_cap)
    distance = jnp.arange(start, end)[:, None] - jnp.arange(first, end)[None, :]
    seen = (distance >= 0)[None]
    if window:
        seen = seen & (distance < window)[None]
    if segments_BT is not None:
        seen = seen & (segments_BT[:, start:end, None] == segments_BT[:, None, first:end])
    groups = q_BKQH.shape[2] // (end - start)
    return jnp.where(jnp.tile(seen, (1, groups, 1))[:, None], raw, MASKED), raw


def _forward(q_BTNH, k_BSKH, v_BSKH, segments_BT, scale, window, soft_cap):
    kv = k_BSKH.shape[2]
    q_BKGTH = _by_head(q_BTNH * jnp.asarray(scale, q_BTNH.dtype), kv)
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    outs, logs = [], []
    for block in _blocks(q_BTNH.shape[1], window):
        start, end, first = block
        s_BKQS, _ = _scores(_rows(q_BKGTH, start, end), k_BKSH[:, :, first:end], segments_BT, block, window, soft_cap)
        top = s_BKQS.max(axis=-1, keepdims=True)
        p_BKQS = jnp.exp(s_BKQS - top)
        total = p_BKQS.sum(axis=-1, keepdims=True)
        o_BKQH = jnp.einsum("BKQS,BKSH->BKQH", p_BKQS.astype(v_BSKH.dtype), v_BKSH[:, :, first:end], preferred_element_type=jnp.float32)
        outs.append((o_BKQH / total).astype(q_BTNH.dtype))
        logs.append(top + jnp.log(total))
    o_BTNH = _by_time(outs, q_BKGTH.shape[2])
    return o_BTNH, (q_BTNH, k_BSKH, v_BSKH, segments_BT, o_BTNH, logs)


def _backward(scale, window, soft_cap, saved, do_BTNH):
    q_BTNH, k_BSKH, v_BSKH, segments_BT, o_BTNH, logs = saved
    kv, dtype = k_BSKH.shape[2], q_BTNH.dtype
    q_BKGTH = _by_head(q_BTNH * jnp.asarray(scale, dtype), kv)
    do_BKGTH, o_BKGTH = _by_head(do_BTNH, kv), _by_head(o_BTNH, kv)
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    dq, dk, dv = [], jnp.zeros(k_BKSH.shape, jnp.float32), jnp.zeros(v_BKSH.shape, jnp.float32)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    for block, log in zip(_blocks(q_BTNH.shape[1], window), logs, strict=True):
        start, end, first = block
        q, do, o = (_rows(x, start, end) for x in (q_BKGTH, do_BKGTH, o_BKGTH))
        k, v = k_BKSH[:, :, first:end], v_BKSH[:, :, first:end]
        s_BKQS, raw = _scores(q, k, segments_BT, block, window, soft_cap)
        p_BKQS = jnp.exp(s_BKQS - log)
        dv = dv.at[:, :, first:end].add(dot("BKQS,BKQH->BKSH", p_BKQS.astype(dtype), do))
        mean = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(axis=-1, keepdims=True)
        ds = p_BKQS * (dot("BKQH,BKSH->BKQS", do, v) - mean)
        if soft_cap:
            ds = ds * (1 - jnp.square(raw / soft_cap))
        ds = ds.astype(dtype)
        dk = dk.at[:, :, first:end].add(dot("BKQS,BKQH->BKSH", ds, q))
        dq.append((dot("BKQS,BKSH->BKQH", ds, k) * scale).astype(dtype))
    back = lambda x: x.transpose(0, 2, 1, 3).astype(dtype)  # noqa: E731
    return _by_time(dq, q_BKGTH.shape[2]), back(dk), back(dv), None


blockwise_attention.defvjp(_forward, _backward)
