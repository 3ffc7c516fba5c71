"""Cross-entropy of logits, with one softmax for both passes. Shapes: B batch  T time  V vocab."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood in nats and log-partition, both float32 [B, T].

    The target's logit is picked by comparison, not by index, so that a vocabulary sharded over the
    mesh stays where it is.
    """
    return _forward(logits_BTV, targets_BT)[0]


def _is_target(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(targets_BT.dtype, logits_BTV.shape, 2) == targets_BT[:, :, None]


def _forward(logits_BTV, targets_BT):
    logits = logits_BTV.astype(jnp.float32)
    top_BT = logits.max(axis=-1)
    log_z_BT = top_BT + jnp.log(jnp.exp(logits - top_BT[:, :, None]).sum(axis=-1))
    picked_BT = jnp.where(_is_target(logits, targets_BT), logits, 0.0).sum(axis=-1)
    return (log_z_BT - picked_BT, log_z_BT), (logits_BTV, targets_BT, log_z_BT)


def _backward(saved, grads):
    logits_BTV, targets_BT, log_z_BT = saved
    d_nll_BT, d_log_z_BT = grads
    p_BTV = jnp.exp(logits_BTV.astype(jnp.float32) - log_z_BT[:, :, None])
    d_BTV = p_BTV * (d_nll_BT + d_log_z_BT)[:, :, None] - jnp.where(
        _is_target(p_BTV, targets_BT), d_nll_BT[:, :, None], 0.0
    )
    return d_BTV.astype(logits_BTV.dtype), None


cross_entropy.defvjp(_forward, _backward)
