"""The definition of linear cross-entropy, with all logits in memory. Shapes: M rows  D embed  V
vocab."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from maxstack.kernels.cross_entropy.differentiable import on_one_device, summed
from maxstack.kernels.cross_entropy.request import Case, Gradients, Request
from maxstack.kernels.cross_entropy.softmax import scores


def supports(case: Case) -> str | None:
    """It serves everything, in memory that grows with rows times vocabulary."""
    return None


def forward(
    x_MD: jax.Array,
    head_DV: jax.Array,
    bias_V: jax.Array | None,
    targets_M: jax.Array,
    request: Request,
    axes: tuple[str, ...] = (),
    blocks: Mapping[str, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(nll [M], log Z [M]). Logits are float32, or float64 where x is; their gradient is jax's
    own."""
    logits_MV, targets_M = _whole(
        scores(x_MD, head_DV.astype(x_MD.dtype), bias_V, request.soft_cap), targets_M, axes
    )
    log_z_M = jax.nn.logsumexp(logits_MV, axis=1)
    return log_z_M - jnp.where(
        jnp.arange(logits_MV.shape[1]) == targets_M[:, None], logits_MV, 0
    ).sum(axis=1), log_z_M


def _whole(
    logits_MV: jax.Array, targets_M: jax.Array, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Logits of all slices, of which this device's own alone have a gradient, and targets that
    count all columns."""
    if not axes:
        return logits_MV, targets_M
    first = jax.lax.axis_index(axes) * logits_MV.shape[1]
    every = jax.lax.all_gather(jax.lax.stop_gradient(logits_MV), axes, axis=1, tiled=True)
    return jax.lax.dynamic_update_slice_in_dim(every, logits_MV, first, 1), targets_M + first


def graded(
    x_MD: jax.Array,
    head_DV: jax.Array,
    bias_V: jax.Array | None,
    targets_M: jax.Array,
    weights_M: jax.Array,
    request: Request,
    axes: tuple[str, ...] = (),
    blocks: Mapping[str, int] | None = None,
) -> tuple[tuple[jax.Array, jax.Array], Gradients]:
    """The same and the gradients of the total."""

    def total(
        x_MD: jax.Array, head_DV: jax.Array, bias_V: jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        nll_M, log_z_M = forward(x_MD, head_DV, bias_V, targets_M, request, axes)
        return summed(nll_M, log_z_M, weights_M, request).total, (nll_M, log_z_M)

    gradients, found = jax.grad(total, (0, 1, 2), has_aux=True)(x_MD, head_DV, bias_V)
    return found, Gradients(*gradients)


run = on_one_device(forward, graded)
