"""The softmax over a vocabulary of which a device may hold a slice: statistics of its logits, all
slices together, and the gradient of the logits.

Shapes: R rows  D embed  V vocab.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxstack.kernels.cross_entropy.request import Request


class Statistics(NamedTuple):
    """Of each row's logits [R]."""

    top: jax.Array
    sum: jax.Array
    """Of exp(logits - top)."""
    picked: jax.Array
    """The target's logit; 0 where the target is not in this slice."""


def capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """soft_cap * tanh(logits / soft_cap)."""
    return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits


def multiply(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product over one dimension of each, accumulated in float32, or in float64 where they
    are."""
    number = jnp.promote_types(a.dtype, jnp.float32)
    return jax.lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=number
    )


def scores(
    x_RD: jax.Array, head_DV: jax.Array, bias_V: jax.Array | None, soft_cap: float | None
) -> jax.Array:
    """Logits [R, V]: the product, the bias, then the cap."""
    logits_RV = multiply(x_RD, head_DV)
    return capped(
        logits_RV if bias_V is None else logits_RV + bias_V.astype(logits_RV.dtype), soft_cap
    )


def statistics(logits_RV: jax.Array, targets_R: jax.Array) -> Statistics:
    """`targets_R` count this slice's columns; those outside of it are other slices'."""
    top_R = logits_RV.max(axis=1)
    vocab, here_R = logits_RV.shape[1], (targets_R >= 0) & (targets_R < logits_RV.shape[1])
    picked_R1 = jnp.take_along_axis(logits_RV, jnp.clip(targets_R, 0, vocab - 1)[:, None], axis=1)
    return Statistics(
        top_R,
        jnp.exp(logits_RV - top_R[:, None]).sum(axis=1),
        jnp.where(here_R, picked_R1[:, 0], 0),
    )


def together(found: Statistics, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """(-log p(target), log Z) of all slices, which lie along these mesh axes; none: this one is
    all."""
    top_R, sum_R, picked_R = found
    if axes:
        tops, sums, picked = jnp.moveaxis(jax.lax.all_gather(jnp.stack(found), axes), 1, 0)
        top_R = tops.max(axis=0)
        sum_R, picked_R = (sums * jnp.exp(tops - top_R)).sum(axis=0), picked.sum(axis=0)
    log_z_R = top_R + jnp.log(sum_R)
    return log_z_R - picked_R, log_z_R


def gradient(
    logits_RV: jax.Array,
    targets_R: jax.Array,
    weights_R: jax.Array,
    log_z_R: jax.Array,
    request: Request,
) -> jax.Array:
    """Of sum(weights * loss) by the logits before the cap [R, V]."""
    share_R = weights_R if not request.z_loss else weights_R * (1 + 2 * request.z_loss * log_z_R)
    is_target_RV = (
        jax.lax.broadcasted_iota(targets_R.dtype, logits_RV.shape, 1) == targets_R[:, None]
    )
    d_RV = jnp.exp(logits_RV - log_z_R[:, None]) * share_R[:, None] - jnp.where(
        is_target_RV, weights_R[:, None], 0
    )
    return d_RV * (1 - jnp.square(logits_RV / request.soft_cap)) if request.soft_cap else d_RV
