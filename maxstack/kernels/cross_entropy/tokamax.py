"""Linear cross-entropy by tokamax's Mosaic kernel for TPUs, from an optional package.

It gives -log p alone; log Z is the sum of that and the target's logit, which is made here from the
target's column of the head. Shapes: M rows  D embed  V vocab.
"""

import functools
import importlib.metadata

import jax
import jax.numpy as jnp

from maxstack.kernels import tokamax
from maxstack.kernels.cross_entropy.differentiable import differentiable
from maxstack.kernels.cross_entropy.request import (
    Call,
    CrossEntropyCase,
    Gradients,
    Inputs,
    Request,
    Scores,
)

LEAST = (0, 0, 17)
"""The first release that gives the loss of each token, so that tokens can have weights."""


def supports(case: CrossEntropyCase) -> str | None:
    """Why tokamax cannot serve `case`; None if it can."""
    if reason := tokamax.absent():
        return reason
    if _version() < LEAST:
        return (
            f"tokamax {importlib.metadata.version('tokamax')} gives no loss of each token; "
            f"{'.'.join(map(str, LEAST))} does"
        )
    for name, requested in (
        ("soft cap", case.request.soft_cap),
        ("z-loss", case.request.z_loss),
        ("bias", case.bias),
    ):
        if requested:
            return f"it has no {name}"
    if case.split:
        return (
            "it cannot take a vocabulary that is split over devices; mesh.rules.vocab: null would "
            "keep it whole"
        )
    if case.dtype != "bfloat16":
        return f"it multiplies {case.dtype} in a lower precision; bfloat16 would do"
    for name, size, multiple in (
        ("tokens", case.rows, 1024),
        ("embed", case.embed, 512),
        ("vocabulary", case.vocab, 2048),
    ):
        if size % multiple:
            return (
                f"{name} {size} is not a multiple of {multiple}, so that it would meet parts "
                "of its blocks"
            )
    return tokamax.elsewhere(case.device)


def forward(inputs: Inputs, call: Call) -> Scores:
    """(nll [M], log Z [M])."""
    return _with_log_z(_nll(inputs.x_MD, inputs.head_DV, inputs.targets_M, call), inputs)


def graded(inputs: Inputs, call: Call) -> tuple[Scores, Gradients]:
    """`forward` and the gradients of the total."""
    assert inputs.bias_V is None and not call.axes, "supports() refuses these"
    assert call.request == Request(), "supports() refuses others"
    nll_M, back = jax.vjp(
        functools.partial(_nll, targets_M=inputs.targets_M, call=call), inputs.x_MD, inputs.head_DV
    )
    d_x, d_head = back(inputs.weights_M.astype(nll_M.dtype))
    return _with_log_z(nll_M, inputs), Gradients(d_x, d_head, None)


run = differentiable(forward, graded)


def _version() -> tuple[int, ...]:
    return tuple(
        int(part) for part in importlib.metadata.version("tokamax").split(".")[:3] if part.isdigit()
    )


def _nll(x_MD: jax.Array, head_DV: jax.Array, targets_M: jax.Array, call: Call) -> jax.Array:
    return tokamax.package().linear_softmax_cross_entropy_loss(
        x_MD,
        targets_M,
        head_DV,
        reduction="none",
        implementation="xla" if call.interpret else "mosaic_tpu",
    )


def _with_log_z(nll_M: jax.Array, inputs: Inputs) -> Scores:
    nll_M, columns_MD = nll_M.astype(jnp.float32), inputs.head_DV.T[inputs.targets_M]
    return nll_M, nll_M + jnp.einsum(
        "MD,MD->M", inputs.x_MD, columns_MD, preferred_element_type=jnp.float32
    )
