"""The gated delta rule by its definition, one position after the other.

Shapes: B batch  T time  K key heads  N value heads  H key dim  V value dim.
"""

import jax
import jax.numpy as jnp

EXACT = jax.lax.Precision.HIGHEST


def run(
    q_BTKH: jax.Array,
    k_BTKH: jax.Array,
    v_BTNV: jax.Array,
    decay_BTN: jax.Array,
    beta_BTN: jax.Array,
    segments_BT: jax.Array | None,
    chunk: int = 64,
) -> jax.Array:
    """A step a token; `chunk` has no effect."""
    k, n = k_BTKH.shape[2], v_BTNV.shape[2]
    q, key = (jnp.repeat(x.astype(jnp.float32), n // k, axis=2) for x in (q_BTKH, k_BTKH))
    runs_BT = jnp.broadcast_to(document_numbers(segments_BT, v_BTNV.shape[1]), v_BTNV.shape[:2])
    # Documents are numbered from 0, so -1 makes the first position begin one.
    begins_BT = jnp.diff(runs_BT, axis=1, prepend=-1) != 0

    def next_position(s_BNHV: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        *position, begins_B = now
        # The state is cleared before a document's first position.
        return jax.vmap(step)(jnp.where(begins_B[:, None, None, None], 0.0, s_BNHV), *position)

    inputs = [q, key, *(x.astype(jnp.float32) for x in (v_BTNV, decay_BTN, beta_BTN)), begins_BT]
    start = jnp.zeros((v_BTNV.shape[0], n, k_BTKH.shape[3], v_BTNV.shape[3]))
    _, o_TBNV = jax.lax.scan(next_position, start, tuple(jnp.moveaxis(x, 1, 0) for x in inputs))
    return jnp.moveaxis(o_TBNV, 0, 1).astype(v_BTNV.dtype)


def step(
    s_NHV: jax.Array,
    q_NH: jax.Array,
    k_NH: jax.Array,
    v_NV: jax.Array,
    decay_N: jax.Array,
    beta_N: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(state [N, H, V] after a position, the position's output [N, V]), in float32 without matmuls,
    so that the bits do not depend on what else is computed."""
    s_NHV = s_NHV * jnp.exp(decay_N)[:, None, None]
    # The error of what the decayed state predicts for this key; the rule writes that error.
    missed_NV = v_NV - (s_NHV * k_NH[:, :, None]).sum(axis=1)
    s_NHV += k_NH[:, :, None] * (beta_N[:, None] * missed_NV)[:, None]
    return s_NHV, (s_NHV * q_NH[:, :, None]).sum(axis=1)


def document_numbers(segments_BT: jax.Array | None, length: int) -> jax.Array:
    """The number of the document of each position, from 0, counted by their boundaries; [1, T] of
    zeros for None."""
    if segments_BT is None:
        return jnp.zeros((1, length), jnp.int32)
    return jnp.cumsum(jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1]) != 0, axis=1)
