"""Linear cross-entropy in XLA, a block of rows at a time. Shapes: M rows  R rows of a block  D
embed  V vocab."""

from typing import Any

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import product_dtype
from maxstack.kernels.cross_entropy.differentiable import differentiable
from maxstack.kernels.cross_entropy.request import (
    Call,
    CrossEntropyCase,
    Gradients,
    Inputs,
    Scores,
)
from maxstack.kernels.cross_entropy.row_blocks import map_rows, map_rows_with_gradients, sizes
from maxstack.kernels.cross_entropy.softmax import combine, gradient, scores, statistics


def candidates(case: CrossEntropyCase) -> list[dict[str, int]]:
    """Rows of a block."""
    return [{"rows": rows} for rows in sizes(case)]


def forward(inputs: Inputs, call: Call) -> Scores:
    """(nll [M], log Z [M])."""
    inputs = _cast_inputs(inputs)

    def step(x_RD: jax.Array, targets_R: jax.Array) -> Scores:
        logits_RV = scores(x_RD, inputs.head_DV, inputs.bias_V, call.request.soft_cap)
        return combine(statistics(logits_RV, targets_R), call.axes)

    return map_rows(step, inputs, call)


def forward_with_gradients(inputs: Inputs, call: Call) -> tuple[Scores, Gradients]:
    """`forward` and the gradients of the total."""
    inputs = _cast_inputs(inputs)

    def step(x_RD: jax.Array, targets_R: jax.Array, weights_R: jax.Array) -> Any:
        logits_RV = scores(x_RD, inputs.head_DV, inputs.bias_V, call.request.soft_cap)
        # By block, since its gradient needs log Z over all slices.
        nll_R, log_z_R = combine(statistics(logits_RV, targets_R), call.axes)
        # Targets in other slices of the vocabulary lie
        # before or after these columns, and match none.
        is_target_RV = jnp.arange(logits_RV.shape[1]) == targets_R[:, None]
        return (nll_R, log_z_R), gradient(
            logits_RV, is_target_RV, weights_R[:, None], log_z_R[:, None], call.request
        )

    return map_rows_with_gradients(step, inputs, call, (inputs.targets_M, inputs.weights_M))


def _cast_inputs(inputs: Inputs) -> Inputs:
    dtype = product_dtype(inputs.x_MD.dtype)
    return inputs._replace(x_MD=inputs.x_MD.astype(dtype), head_DV=inputs.head_DV.astype(dtype))


run = differentiable(forward, forward_with_gradients)
