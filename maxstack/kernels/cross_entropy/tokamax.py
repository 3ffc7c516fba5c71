"""Linear cross-entropy by tokamax's Mosaic kernel for TPUs. An optional package; nothing else needs
it.

It gives -log p alone; log Z is that and the target's logit, which is made here from the target's
column of the head. Shapes: M rows  D embed  V vocab.
"""

import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxstack.kernels import tokamax
from maxstack.kernels.cross_entropy.differentiable import on_one_device
from maxstack.kernels.cross_entropy.request import Case, Gradients, Request

LEAST = (0, 0, 17)
"""The first release that gives the loss of each token, so that tokens can have weights."""


def supports(case: Case) -> str | None:
    """Why tokamax cannot serve `case`; None: it can."""
    if reason := tokamax.absent():
        return reason
    if _version() < LEAST:
        return (
            f"tokamax {importlib.metadata.version('tokamax')} gives no loss of each token; "
            f"{'.'.join(map(str, LEAST))} does"
        )
    for name, asked in (
        ("soft cap", case.request.soft_cap),
        ("z-loss", case.request.z_loss),
        ("bias", case.bias),
    ):
        if asked:
            return f"it has no {name}"
    if case.split:
        return (
            "it knows no vocabulary that is split over devices; mesh.rules.vocab: null would "
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


def forward(
    x_MD: jax.Array,
    head_DV: jax.Array,
    bias_V: jax.Array | None,
    targets_M: jax.Array,
    request: Request,
    axes: tuple[str, ...] = (),
    blocks: Mapping[str, int] | None = None,
    implementation: str = "mosaic_tpu",
) -> tuple[jax.Array, jax.Array]:
    """(nll [M], log Z [M])."""
    return _with_log_z(
        _nll(x_MD, head_DV.astype(x_MD.dtype), targets_M, implementation), x_MD, head_DV, targets_M
    )


def graded(
    x_MD: jax.Array,
    head_DV: jax.Array,
    bias_V: jax.Array | None,
    targets_M: jax.Array,
    weights_M: jax.Array,
    request: Request,
    axes: tuple[str, ...] = (),
    blocks: Mapping[str, int] | None = None,
    implementation: str = "mosaic_tpu",
) -> Any:
    """((nll, log Z), Gradients)."""
    assert bias_V is None and not axes and request == Request(), "supports() refuses these"
    nll_M, back = jax.vjp(
        functools.partial(_nll, targets_M=targets_M, implementation=implementation),
        x_MD,
        head_DV.astype(x_MD.dtype),
    )
    of_x, of_head = back(weights_M.astype(nll_M.dtype))
    return _with_log_z(nll_M, x_MD, head_DV, targets_M), Gradients(of_x, of_head, None)


run = on_one_device(forward, graded)


def _version() -> tuple[int, ...]:
    return tuple(
        int(part) for part in importlib.metadata.version("tokamax").split(".")[:3] if part.isdigit()
    )


def _nll(
    x_MD: jax.Array, head_DV: jax.Array, targets_M: jax.Array, implementation: str
) -> jax.Array:
    return tokamax.package().linear_softmax_cross_entropy_loss(
        x_MD, targets_M, head_DV, reduction="none", implementation=implementation
    )


def _with_log_z(
    nll_M: jax.Array, x_MD: jax.Array, head_DV: jax.Array, targets_M: jax.Array
) -> tuple[jax.Array, jax.Array]:
    nll_M, columns_MD = nll_M.astype(jnp.float32), head_DV.astype(x_MD.dtype).T[targets_M]
    return nll_M, nll_M + jnp.einsum(
        "MD,MD->M", x_MD, columns_MD, preferred_element_type=jnp.float32
    )
