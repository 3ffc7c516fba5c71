"""The softmax over a vocabulary of which a device may hold a slice: statistics of a slice,
their combination over slices, and the gradient of the logits.

Shapes: R rows  D embed  V vocab.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxstack.kernels.cross_entropy.request import Request

LOWEST = -1e30


class Statistics(NamedTuple):
    """Statistics of each row's logits [R]."""

    top: jax.Array
    sum: jax.Array
    """Sum of exp(logits - top)."""
    picked: jax.Array
    """The target's logit; 0 where the target is not in this slice."""

    def with_logits(self, logits: Any, is_target: Any, inside: Any = None) -> "Statistics":
        """Running statistics after one logit for each element; `inside` is False for columns past
        the last one, None where there are none."""
        greater = logits > self.top
        # One exponential serves both cases, since the greater of the two counts as 1.
        decay = jnp.exp(-jnp.abs(logits - self.top))
        total = jnp.where(greater, self.sum * decay + 1, self.sum + decay)
        if inside is not None:
            greater, is_target = inside & greater, inside & is_target
            total = jnp.where(inside, total, self.sum)
        return Statistics(
            jnp.where(greater, logits, self.top), total, jnp.where(is_target, logits, self.picked)
        )

    def over_lanes(self, **axis: Any) -> "Statistics":
        """Combine the statistics that the elements of a row kept -> those of the row."""
        top = self.top.max(**axis)
        total = (self.sum * jnp.exp(self.top - top)).sum(**axis)
        return Statistics(top, total, self.picked.sum(**axis))


def apply_soft_cap(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """soft_cap * tanh(logits / soft_cap)."""
    return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits


def multiply(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product over one dimension of each, accumulated in float32, or in float64 where they
    are."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
    )


def scores(
    x_RD: jax.Array, head_DV: jax.Array, bias_V: jax.Array | None, soft_cap: float | None
) -> jax.Array:
    """Logits [R, V]: the product, plus the bias, then capped."""
    logits_RV = multiply(x_RD, head_DV)
    if bias_V is not None:
        logits_RV = logits_RV + bias_V.astype(logits_RV.dtype)
    return apply_soft_cap(logits_RV, soft_cap)


def statistics(logits_RV: jax.Array, targets_R: jax.Array) -> Statistics:
    """Statistics of this slice; targets outside of it belong to other slices."""
    top_R = logits_RV.max(axis=1)
    vocab = logits_RV.shape[1]
    inside_R = (targets_R >= 0) & (targets_R < vocab)
    # A gather here, since nothing differentiates the statistics; `gradient` compares instead.
    picked_R1 = jnp.take_along_axis(logits_RV, jnp.clip(targets_R, 0, vocab - 1)[:, None], axis=1)
    return Statistics(
        top_R,
        jnp.exp(logits_RV - top_R[:, None]).sum(axis=1),
        jnp.where(inside_R, picked_R1[:, 0], 0),
    )


def combine(part: Statistics, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """(-log p(target), log Z) over all slices, which lie along the mesh axes; without axes this
    slice is the whole vocabulary."""
    top_R, sum_R, picked_R = part
    if axes:
        # One collective for all three statistics.
        tops, sums, picked = jnp.moveaxis(jax.lax.all_gather(jnp.stack(part), axes), 1, 0)
        top_R = tops.max(axis=0)
        sum_R, picked_R = (sums * jnp.exp(tops - top_R)).sum(axis=0), picked.sum(axis=0)
    log_z_R = top_R + jnp.log(sum_R)
    return log_z_R - picked_R, log_z_R


def gradient(
    logits: jax.Array, is_target: jax.Array, weights: jax.Array, log_z: jax.Array, request: Request
) -> jax.Array:
    """Gradient of sum(weights * loss) by the logits before the cap. `weights` and `log_z` belong to
    rows, in shapes that broadcast."""
    # d/dlogits of z_loss log(Z)^2 is 2 z_loss log(Z)
    # softmax, so it only scales the softmax's share.
    share = weights * (1 + 2 * request.z_loss * log_z) if request.z_loss else weights
    d = share * jnp.exp(logits - log_z) - jnp.where(is_target, weights, 0)
    return d * (1 - jnp.square(logits / request.soft_cap)) if request.soft_cap else d


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood in nats and log-partition, both float32 [B, T].

    The target's logit is picked by comparison, not by index, so that a vocabulary that is sharded
    over the mesh is not moved.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    # The maximum cancels in log Z, so its gradient is zero and need not be computed.
    top_BT = jax.lax.stop_gradient(logits_BTV.max(axis=-1))
    log_z_BT = top_BT + jnp.log(jnp.exp(logits_BTV - top_BT[:, :, None]).sum(axis=-1))
    is_target_BTV = jnp.arange(logits_BTV.shape[2]) == targets_BT[:, :, None]
    return log_z_BT - jnp.where(is_target_BTV, logits_BTV, 0.0).sum(axis=-1), log_z_BT
