"""Linear cross-entropy in XLA, a block of rows at a time. Shapes: M rows  R rows of a block  D
embed  V vocab."""

from collections.abc import Mapping
from typing import Any

import jax

from maxstack.kernels.backends import multiplied
from maxstack.kernels.cross_entropy.by_rows import graded_by_rows, scores_by_rows, sizes
from maxstack.kernels.cross_entropy.differentiable import on_one_device
from maxstack.kernels.cross_entropy.request import Case, Gradients, Request
from maxstack.kernels.cross_entropy.softmax import gradient, scores, statistics, together


def supports(case: Case) -> str | None:
    """It serves everything."""
    return None


def candidates(case: Case) -> list[dict[str, int]]:
    """Rows of a block."""
    return [{"rows": rows} for rows in sizes(case)]


def forward(
    x_MD: jax.Array,
    head_DV: jax.Array,
    bias_V: jax.Array | None,
    targets_M: jax.Array,
    request: Request,
    axes: tuple[str, ...] = (),
    blocks: Mapping[str, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(nll [M], log Z [M]); the vocabulary's other slices lie along `axes`, and targets count this
    slice's columns."""
    x_MD, head_DV = _multiplied(x_MD, head_DV)

    def step(x_RD: jax.Array, targets_R: jax.Array) -> tuple[jax.Array, jax.Array]:
        return together(
            statistics(scores(x_RD, head_DV, bias_V, request.soft_cap), targets_R), axes
        )

    return scores_by_rows(step, (x_MD, targets_M), head_DV.shape[1], (blocks or {}).get("rows"))


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
    x_MD, head_DV = _multiplied(x_MD, head_DV)

    def step(x_RD: jax.Array, targets_R: jax.Array, weights_R: jax.Array) -> Any:
        logits_RV = scores(x_RD, head_DV, bias_V, request.soft_cap)
        nll_R, log_z_R = together(statistics(logits_RV, targets_R), axes)
        return (nll_R, log_z_R), gradient(logits_RV, targets_R, weights_R, log_z_R, request)

    return graded_by_rows(
        step, x_MD, head_DV, (targets_M, weights_M), bias_V is not None, (blocks or {}).get("rows")
    )


def _multiplied(x_MD: jax.Array, head_DV: jax.Array) -> tuple[jax.Array, jax.Array]:
    number = multiplied(x_MD.dtype)
    return x_MD.astype(number), head_DV.astype(x_MD.dtype).astype(number)


run = on_one_device(forward, graded)
