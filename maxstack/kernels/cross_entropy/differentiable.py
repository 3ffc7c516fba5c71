"""The custom gradient around a backend of linear cross-entropy: gradients are made with the losses
and wait for the cotangent of the total. Shapes: M rows  D embed  V vocab."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from maxstack import sharding
from maxstack.kernels.cross_entropy.layout import Layout
from maxstack.kernels.cross_entropy.request import Call, Gradients, Inputs, Losses, Request, Scores


def differentiable(
    forward: Callable[[Inputs, Call], Scores],
    forward_with_gradients: Callable[[Inputs, Call], tuple[Scores, Gradients]],
) -> Callable[..., Losses]:
    """The `run` of a backend, from its `forward` and `forward_with_gradients`."""

    def run(
        x: jax.Array,
        head_DV: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        request: Request,
        bias_V: jax.Array | None = None,
        blocks: Mapping[str, int] | None = None,
        interpret: bool = False,
        layout: Layout | None = None,
    ) -> Losses:
        """x [M, D], head [D, V], targets and weights [M] -> Losses with nll and log_z [M]; on a
        mesh with `layout`, [B, T] instead of [M]. Differentiable by x, head and bias; calls that
        are not differentiated run `forward` alone."""
        part = layout or Layout()
        call = Call(request, part.vocab, blocks or {}, interpret)

        def plain(x, head, bias, targets, weights):
            scores = forward(part.inputs(x, head, bias, targets, weights), call)
            return part.losses(scores, weights, request)

        def with_gradients(x, head, bias, targets, weights):
            scores, gradients = forward_with_gradients(
                part.inputs(x, head, bias, targets, weights), call
            )
            if layout:
                gradients = layout.reduce_gradients(gradients, x)
            floats = zip(gradients, (x, head, bias), strict=True)
            cast = (None if d is None else d.astype(like.dtype) for d, like in floats)
            return part.losses(scores, weights, request), Gradients._make(cast)

        if layout:
            specs, losses, gradients = layout.specs
            plain = sharding.per_device(plain, specs, losses)
            with_gradients = sharding.per_device(with_gradients, specs, (losses, gradients))

        def backward(gradients: Gradients, cotangents: Losses) -> tuple[Any, ...]:
            total = cotangents.total
            # nll and log_z pass no gradient, so the cotangent
            # of the total is the whole missing factor.
            scaled = jax.tree.map(lambda g: (g * total).astype(g.dtype), tuple(gradients))
            return *scaled, None, None

        op = jax.custom_vjp(plain)
        op.defvjp(with_gradients, backward)
        total, nll, log_z = op(x, head_DV, bias_V, targets, weights)
        return Losses(total, jax.lax.stop_gradient(nll), jax.lax.stop_gradient(log_z))

    return run
