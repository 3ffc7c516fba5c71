"""Linear cross-entropy around a backend: gradients are made with the losses and wait for the
cotangent of the total. Shapes: M rows  D embed  V vocab."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxstack.kernels.cross_entropy.request import Call, Gradients, Inputs, Losses, Request

Scores = tuple[jax.Array, jax.Array]
"""(nll [M], log Z [M])."""
Forward = Callable[[Inputs, Call], Scores]
Graded = Callable[[Inputs, Call], tuple[Scores, Gradients]]


def differentiable(
    plain: Callable[..., Losses], graded: Callable[..., tuple[Losses, Gradients]]
) -> Callable[..., Losses]:
    """op(x, head, bias, targets, weights) -> Losses; `plain` serves calls that nothing
    differentiates.

    `graded` gives gradients in the dtypes of their arguments. Targets and weights have no
    gradient, and neither have nll and log_z.
    """
    op = jax.custom_vjp(plain)

    def backward(gradients: Gradients, cotangents: Losses) -> tuple[Any, ...]:
        scaled = jax.tree.map(lambda g: (g * cotangents.total).astype(g.dtype), tuple(gradients))
        return *scaled, None, None

    op.defvjp(graded, backward)

    def losses(*inputs: Any) -> Losses:
        total, nll, log_z = op(*inputs)
        return Losses(total, jax.lax.stop_gradient(nll), jax.lax.stop_gradient(log_z))

    return losses


def on_one_device(forward: Forward, graded: Graded) -> Callable[..., Losses]:
    """The `run` of a backend, from its `forward` and `graded`."""

    def run(
        x_MD: jax.Array,
        head_DV: jax.Array,
        targets_M: jax.Array,
        weights_M: jax.Array,
        request: Request,
        bias_V: jax.Array | None = None,
        blocks: Mapping[str, int] | None = None,
        interpret: bool = False,
    ) -> Losses:
        """x [M, D], head [D, V], targets and weights [M] -> Losses with nll and log_z [M];
        differentiable by x, head and bias."""
        call = Call(request, blocks=blocks or {}, interpret=interpret)

        def plain(x, head, bias, targets, weights):
            inputs = Inputs(x, head.astype(x.dtype), bias, targets, weights)
            return summed(*forward(inputs, call), weights, request)

        def with_gradients(x, head, bias, targets, weights):
            inputs = Inputs(x, head.astype(x.dtype), bias, targets, weights)
            scores, gradients = graded(inputs, call)
            return summed(*scores, weights, request), in_dtypes_of(gradients, x, head, bias)

        return differentiable(plain, with_gradients)(x_MD, head_DV, bias_V, targets_M, weights_M)

    return run


def summed(nll: jax.Array, log_z: jax.Array, weights: jax.Array, request: Request) -> Losses:
    """Losses with the total over these rows."""
    loss = nll + request.z_loss * jnp.square(log_z) if request.z_loss else nll
    return Losses((weights.astype(loss.dtype) * loss).sum(), nll, log_z)


def in_dtypes_of(
    gradients: Gradients, x: jax.Array, head: jax.Array, bias: jax.Array | None
) -> Gradients:
    """Each gradient in the dtype of its argument."""
    d_bias = None if bias is None or gradients.bias is None else gradients.bias.astype(bias.dtype)
    return Gradients(gradients.x.astype(x.dtype), gradients.head.astype(head.dtype), d_bias)
