"""The definition of linear cross-entropy, with all logits in memory. Shapes: M rows  D embed  V
vocab."""

from typing import Any

import jax
import jax.numpy as jnp

from maxstack.kernels.cross_entropy.differentiable import differentiable
from maxstack.kernels.cross_entropy.layout import total
from maxstack.kernels.cross_entropy.request import Call, Gradients, Inputs, Scores
from maxstack.kernels.cross_entropy.softmax import scores


def forward(inputs: Inputs, call: Call) -> Scores:
    """(nll [M], log Z [M]). Logits are float32, or float64 where x is; their gradient is jax's
    own."""
    x_MD, head_DV, bias_V, targets_M, _ = inputs
    logits_MV = scores(x_MD, head_DV, bias_V, call.request.soft_cap)
    if call.axes:  # logits of other slices have no gradient here
        # All slices together, as the definition has them; the backends combine statistics instead.
        first = jax.lax.axis_index(call.axes) * logits_MV.shape[1]
        every = jax.lax.all_gather(jax.lax.stop_gradient(logits_MV), call.axes, axis=1, tiled=True)
        logits_MV = jax.lax.dynamic_update_slice_in_dim(every, logits_MV, first, 1)
        targets_M = targets_M + first
    log_z_M = jax.nn.logsumexp(logits_MV, axis=1)
    is_target_MV = jnp.arange(logits_MV.shape[1]) == targets_M[:, None]
    return log_z_M - jnp.where(is_target_MV, logits_MV, 0).sum(axis=1), log_z_M


def forward_with_gradients(inputs: Inputs, call: Call) -> tuple[Scores, Gradients]:
    """`forward` and the gradients of the total."""

    def of_total(*floats: Any) -> tuple[jax.Array, Scores]:
        result = forward(Inputs._make([*floats, *inputs[3:]]), call)
        return total(*result, inputs.weights_M, call.request), result

    # jax differentiates the definition, so that nothing here is derived by hand.
    gradients, result = jax.grad(of_total, (0, 1, 2), has_aux=True)(*inputs[:3])
    return result, Gradients(*gradients)


run = differentiable(forward, forward_with_gradients)
