"""The op around a backend: gradients are made with the losses and wait for the cotangent of the
total. Shapes: M rows  D embed  V vocab."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxstack.kernels.cross_entropy.request import Gradients, Losses, Request

Forward = Callable[..., tuple[jax.Array, jax.Array]]
Graded = Callable[..., tuple[tuple[jax.Array, jax.Array], Gradients]]


def differentiable(
    plain: Callable[..., Losses], graded: Callable[..., tuple[Losses, Gradients]]
) -> Callable[..., Losses]:
    """op(x, head, bias, targets, weights) -> Losses; `plain` serves calls that nothing
    differentiates.

    `graded` gives gradients in the dtypes of what they belong to. Targets and weights have no
    gradient, and neither have nll and log_z.
    """
    op = jax.custom_vjp(plain)

    def backward(gradients: Gradients, cotangents: Losses) -> tuple[Any, ...]:
        return (
            *jax.tree.map(lambda g: (g * cotangents.total).astype(g.dtype), tuple(gradients)),
            None,
            None,
        )

    op.defvjp(graded, backward)

    def losses(*given: Any) -> Losses:
        total, nll, log_z = op(*given)
        return Losses(total, jax.lax.stop_gradient(nll), jax.lax.stop_gradient(log_z))

    return losses


def on_one_device(forward: Forward, graded: Graded) -> Callable[..., Losses]:
    """A backend's `run`, of its `forward` and `graded`."""

    def run(
        x_MD: jax.Array,
        head_DV: jax.Array,
        targets_M: jax.Array,
        weights_M: jax.Array,
        request: Request,
        bias_V: jax.Array | None = None,
        blocks: Mapping[str, int] | None = None,
        **kinds: Any,
    ) -> Losses:
        """x [M, D], head [D, V], targets and weights [M] -> Losses with nll and log_z [M];
        differentiable by x, head and bias."""

        def plain(x, head, bias, targets, weights):
            return summed(
                *forward(x, head, bias, targets, request, blocks=blocks, **kinds), weights, request
            )

        def with_gradients(x, head, bias, targets, weights):
            found, gradients = graded(
                x, head, bias, targets, weights, request, blocks=blocks, **kinds
            )
            return summed(*found, weights, request), in_dtypes_of(gradients, x, head, bias)

        return differentiable(plain, with_gradients)(x_MD, head_DV, bias_V, targets_M, weights_M)

    return run


def summed(nll: jax.Array, log_z: jax.Array, weights: jax.Array, request: Request) -> Losses:
    """With the total over these rows."""
    loss = nll + request.z_loss * jnp.square(log_z) if request.z_loss else nll
    return Losses((weights.astype(loss.dtype) * loss).sum(), nll, log_z)


def in_dtypes_of(
    gradients: Gradients, x: jax.Array, head: jax.Array, bias: jax.Array | None
) -> Gradients:
    """Each gradient in the dtype of what it belongs to."""
    of_bias = None if bias is None or gradients.bias is None else gradients.bias.astype(bias.dtype)
    return Gradients(gradients.x.astype(x.dtype), gradients.head.astype(head.dtype), of_bias)
