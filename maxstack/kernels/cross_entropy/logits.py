"""Cross-entropy of logits. Shapes: B batch  T time  V vocab."""

import jax
import jax.numpy as jnp


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood in nats and log-partition, both float32 [B, T].

    The target's logit is picked by comparison, not by index, so that a vocabulary that is sharded
    over the mesh is not moved.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    top_BT = jax.lax.stop_gradient(logits_BTV.max(axis=-1))
    log_z_BT = top_BT + jnp.log(jnp.exp(logits_BTV - top_BT[:, :, None]).sum(axis=-1))
    is_target_BTV = jnp.arange(logits_BTV.shape[2]) == targets_BT[:, :, None]
    return log_z_BT - jnp.where(is_target_BTV, logits_BTV, 0.0).sum(axis=-1), log_z_BT
