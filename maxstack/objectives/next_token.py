"""Next-token cross-entropy. Shapes: B batch  T time  D embed  V vocab."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import config_scope
from maxstack.kernels.cross_entropy import Losses, Request, linear_cross_entropy
from maxstack.kernels.sequences import arrange
from maxstack.objectives.objective import Batch, Loss, Models, Objective
from maxstack.schema.objective import NextTokenConfig

if TYPE_CHECKING:
    from maxstack.layers.context import Context
    from maxstack.models.decoder import Decoder


class NextToken(Objective):
    """Sum over counted targets of -log p(target), plus z_loss * log(Z)^2 (PaLM, arXiv:2204.02311,
    section 5) and what the model's parts add."""

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Metrics: loss, and where they have a weight z_loss, mtp_loss, router_loss, these two as
        means of their own."""
        assert isinstance(self.cfg.objective, NextTokenConfig)
        model, z_loss = models.policy, self.cfg.objective.z_loss
        x_BTD, aux, context = model.trunk(batch)
        mask_BT = arrange(batch["mask"].astype(jnp.float32))
        total, nll_BT, log_z_BT = head_losses(
            model, model.norm(x_BTD), arrange(batch["targets"]), mask_BT, z_loss
        )
        metrics = {"loss": (nll_BT * mask_BT).sum()}
        if z_loss:
            metrics["z_loss"] = z_loss * (jnp.square(log_z_BT) * mask_BT).sum()
        further = {}
        if model.cfg.mtp and model.cfg.mtp.loss:
            further["mtp_loss"], aux["mtp"] = further_loss(model, x_BTD, batch, context)
        return self.whole(batch, total, metrics, aux, **further)


def head_losses(
    model: "Decoder",
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    z_loss: float = 0.0,
    bias_V: jax.Array | None = None,
    still: bool = False,
    temperature: float = 1.0,
) -> Losses:
    """Weighted cross-entropy of a normed residual stream by the model's head, with `bias_V` added
    to its logits, and these divided by `temperature`; `still`: without gradient, which spares its
    making."""
    x_BTD, head_DV, own_V, kept = model.readout(x_BTD)
    if bias_V is not None:
        own_V = bias_V if own_V is None else own_V + bias_V
    if still:
        x_BTD, head_DV, own_V = jax.lax.stop_gradient((x_BTD, head_DV, own_V))
    cap = model.cfg.head.soft_cap
    if temperature != 1:
        # c tanh(l / c) / t is (c / t) tanh((l / t) / (c / t))
        x_BTD = x_BTD / temperature
        own_V = None if own_V is None else own_V / temperature
        cap = cap and cap / temperature
    request, backend = Request(cap, z_loss), model.cfg.head.backend
    with config_scope("model.head"):
        return linear_cross_entropy(
            x_BTD, head_DV, targets_BT, weights_BT, request, backend, own_V, kept
        )


def further_loss(
    model: "Decoder", x_BTD: jax.Array, batch: Batch, context: "Context"
) -> tuple[jax.Array, dict[str, Any]]:
    """model.mtp.loss times the mean over all depths of the sum of -log p of the token that lies one
    further each time, where it is in the same document; what the blocks report."""
    assert model.cfg.mtp
    targets_BT, mask_BT, reports = batch["targets"], batch["mask"].astype(jnp.float32), {}
    segments_BT, total = batch.get("segments"), jnp.zeros((), jnp.float32)
    # Where documents see each other they are one segment, but the end of one is no input.
    same_BT = following(batch["tokens"]) == targets_BT
    if segments_BT is not None:
        same_BT &= following(segments_BT) == segments_BT
    for key, further in sorted(model.mtp.items(), key=lambda item: int(item[0])):
        x_BTD, aux = further(x_BTD, model.embedded(arrange(targets_BT)), context)
        reports[key] = {"block": aux}
        targets_BT, mask_BT = following(targets_BT), mask_BT * following(mask_BT) * same_BT
        losses = head_losses(model, further.norm(x_BTD), arrange(targets_BT), arrange(mask_BT))
        total = total + losses.total
    return model.cfg.mtp.loss / model.cfg.mtp.depth * total, reports


def following(x_BT: jax.Array) -> jax.Array:
    """The number one position further, in natural order; zero at the end."""
    return jnp.pad(x_BT[:, 1:], ((0, 0), (0, 1)))
