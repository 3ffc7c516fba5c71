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
    from maxstack.models.block import Aux
    from maxstack.models.decoder import Decoder


class NextToken(Objective):
    """Sum over counted targets of -log p(target), plus z_loss * log(Z)^2 (PaLM, arXiv:2204.02311,
    section 5) and the terms of the model's parts."""

    section: NextTokenConfig

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Metrics: loss, and where they have a weight z_loss, mtp_loss, router_loss, these two as
        means of their own."""
        trunk = models.policy.trunk(batch)
        normed_BTD = models.policy.norm(trunk[0])
        mask_BT = batch["mask"].astype(jnp.float32)
        return self._weighted(models, batch, trunk, normed_BTD, mask_BT, self.section.z_loss)

    def _weighted(
        self,
        models: Models,
        batch: Batch,
        trunk: "tuple[jax.Array, Aux, Context]",
        normed_BTD: jax.Array,
        weights_BT: jax.Array,
        z_loss: float,
        **metrics: jax.Array,
    ) -> Loss:
        """Compute the loss from the outputs of the model's trunk and norm, with a weight for each
        target, in natural order; `metrics` are added to its own."""
        model, (x_BTD, aux, context) = models.policy, trunk
        # Losses are computed in the order of the devices: sums do not care, and nothing moves back.
        weights_BT = arrange(weights_BT)
        total, nll_BT, log_z_BT = head_losses(
            model, normed_BTD, arrange(batch["targets"]), weights_BT, z_loss
        )
        # Without z_loss, so that runs with and without it compare.
        metrics["loss"] = (nll_BT * weights_BT).sum()
        if z_loss:
            metrics["z_loss"] = z_loss * (jnp.square(log_z_BT) * weights_BT).sum()
        further = {}
        if model.cfg.mtp and model.cfg.mtp.loss:
            further["mtp_loss"], aux["mtp"] = mtp_loss(model, x_BTD, batch, context)
        return self.make_loss(batch, total, metrics, aux, **further)


def head_losses(
    model: "Decoder",
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    z_loss: float = 0.0,
    bias_V: jax.Array | None = None,
    without_gradient: bool = False,
    temperature: float = 1.0,
) -> Losses:
    """Weighted cross-entropy of a normalised residual stream by the model's head, whose logits get
    `bias_V` and are divided by `temperature`. `without_gradient`: gradients are not even made."""
    x_BTD, head_DV, own_V, kept = model.readout(x_BTD)
    if bias_V is not None:
        own_V = bias_V if own_V is None else own_V + bias_V
    # Stopped before the call, whose forward pass then makes no gradients.
    if without_gradient:
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


def mtp_loss(
    model: "Decoder", x_BTD: jax.Array, batch: Batch, context: "Context"
) -> tuple[jax.Array, dict[str, Any]]:
    """(loss of multi-token prediction, reports of its blocks): model.mtp.loss times the mean over
    depths of the sum of -log p of the token one position further each time, where it is in the same
    document (DeepSeek-V3 2024, arXiv:2412.19437, eq. 24-25)."""
    assert model.cfg.mtp
    targets_BT, mask_BT = batch["targets"], batch["mask"].astype(jnp.float32)
    segments_BT, total = batch.get("segments"), jnp.zeros((), jnp.float32)
    reports = {}
    # Where documents see each other they are one segment, but the end of one is no input.
    same_BT = shift_left(batch["tokens"]) == targets_BT
    if segments_BT is not None:
        same_BT &= shift_left(segments_BT) == segments_BT
    for key, further in sorted(model.mtp.items(), key=lambda item: int(item[0])):
        x_BTD, aux = further(x_BTD, model.embed_tokens(arrange(targets_BT)), context)
        reports[key] = {"block": aux}
        # A target counts only if all tokens between it and the position are of the same document.
        targets_BT, mask_BT = shift_left(targets_BT), mask_BT * shift_left(mask_BT) * same_BT
        # The model's own head, as in DeepSeek-V3, with the module's norm.
        losses = head_losses(model, further.norm(x_BTD), arrange(targets_BT), arrange(mask_BT))
        total = total + losses.total
    return model.cfg.mtp.loss / model.cfg.mtp.depth * total, reports


def shift_left(x_BT: jax.Array) -> jax.Array:
    """The value one position further, in natural order; zero at the end."""
    return jnp.pad(x_BT[:, 1:], ((0, 0), (0, 1)))
