"""Next-token cross-entropy. Shapes: B batch  T time  D embed  V vocab."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxstack.kernels.backends import config_scope
from maxstack.kernels.cross_entropy import Losses, Request, linear_cross_entropy
from maxstack.kernels.sequences import arrange

if TYPE_CHECKING:
    from maxstack.layers.context import Context
    from maxstack.models.decoder import Decoder


class Loss(NamedTuple):
    """Sums and a weight, never means: accumulation, padding and devices stay exact. All float32."""

    total: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]
    """The summands of `total`; nll is the cross-entropy itself. Gradients come by `total`."""
    loads: dict[tuple[str, ...], jax.Array]
    """Path of a mixture of experts -> how many tokens chose each expert."""
    dropped: jax.Array
    """How many of those choices an expert's capacity left out, in all layers."""


def next_token(model: "Decoder", batch: Mapping[str, jax.Array], z_loss: float) -> Loss:
    """Sum over counted targets of -log p(target), plus z_loss * log(Z)^2 (PaLM, arXiv:2204.02311,
    section 5) and what the model's parts add."""
    x_BTD, aux, context = model.trunk(batch)
    mask_BT = arrange(batch["mask"].astype(jnp.float32))
    total, nll_BT, log_z_BT = _losses(
        model, model.norm(x_BTD), arrange(batch["targets"]), mask_BT, z_loss
    )
    metrics = {"nll": (nll_BT * mask_BT).sum()}
    if z_loss:
        metrics["z_loss"] = z_loss * (jnp.square(log_z_BT) * mask_BT).sum()
    if model.cfg.mtp and model.cfg.mtp.loss:
        further, aux["mtp"] = _further_tokens(model, x_BTD, batch, context)
        metrics["mtp_loss"] = model.cfg.mtp.loss / model.cfg.mtp.depth * further
        total = total + metrics["mtp_loss"]
    reports = nnx.traversals.flatten_mapping(aux)
    if router := [value.sum() for path, value in reports.items() if path[-1] == "router_loss"]:
        metrics["router_loss"] = sum(router[1:], router[0])
        total = total + metrics["router_loss"]
    loads = {path[:-1]: value for path, value in reports.items() if path[-1] == "load"}
    dropped = sum(
        (value.sum() for path, value in reports.items() if path[-1] == "dropped"), jnp.zeros(())
    )
    return Loss(total, mask_BT.sum(), metrics, loads, dropped)


def _losses(
    model: "Decoder", x_BTD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, z_loss: float
) -> Losses:
    """Of a normed residual stream, by the model's head."""
    x_BTD, head_DV, bias_V, kept = model.readout(x_BTD)
    request, backend = Request(model.cfg.head.soft_cap, z_loss), model.cfg.head.backend
    with config_scope("model.head"):
        return linear_cross_entropy(
            x_BTD, head_DV, targets_BT, weights_BT, request, backend, bias_V, kept
        )


def _further_tokens(
    model: "Decoder", x_BTD: jax.Array, batch: Mapping[str, jax.Array], context: "Context"
) -> tuple[jax.Array, dict[str, Any]]:
    """Sum over all depths of -log p of the token that lies one further each time, where it is in
    the same document; what the blocks report."""
    targets_BT, mask_BT, reports = batch["targets"], batch["mask"].astype(jnp.float32), {}
    segments_BT, total = batch.get("segments"), jnp.zeros((), jnp.float32)
    same_BT = 1.0 if segments_BT is None else _shifted(segments_BT) == segments_BT
    for key, further in sorted(model.mtp.items(), key=lambda item: int(item[0])):
        x_BTD, aux = further(x_BTD, model.embedded(arrange(targets_BT)), context)
        reports[key] = {"block": aux}
        targets_BT, mask_BT = _shifted(targets_BT), mask_BT * _shifted(mask_BT) * same_BT
        total = (
            total
            + _losses(model, further.norm(x_BTD), arrange(targets_BT), arrange(mask_BT), 0.0).total
        )
    return total, reports


def _shifted(x_BT: jax.Array) -> jax.Array:
    """What stands one position further in natural order; zero at the end."""
    return jnp.pad(x_BT[:, 1:], ((0, 0), (0, 1)))
