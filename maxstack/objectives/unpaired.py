"""Preference optimization of single answers that are wanted or not: KTO, BCO. An answer's log-ratio
to the reference is compared with a reference point of the whole batch (not in apo_zero), so all
microbatches are measured before the first gradient. Shapes: B batch  T time.

Values of an answer are at its last position [B, T].
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import log_sigmoid, sigmoid

from maxstack.objectives.log_probs import LogProbs, Terms
from maxstack.objectives.objective import Batch, Models
from maxstack.objectives.sequences import is_last, running_sums
from maxstack.schema.objective import UnpairedConfig


class Unpaired(LogProbs):
    """Sum over answers of a loss of their log-ratio u to the reference: kto w (1 - S(+-beta (u -
    k))), with k the mean over answers to other prompts, at least 0; apo_zero the same without k;
    bco -log S(+-(beta u - d)), with d the mean of the mean rewards of both kinds."""

    section: UnpairedConfig

    unit = "answers"

    @property
    def coupled(self) -> bool:  # type: ignore[override]
        """True where the reference point is a mean over the batch."""
        return self.section.loss != "apo_zero"

    @property
    def needs_reference(self) -> bool:
        return self.section.reference != "stored"

    def weight(self, batch: Batch) -> Array:
        return self._answers(batch).sum().astype(jnp.float32)

    def terms(self, batch: Batch) -> Terms:
        """Metrics: rewards/chosen, rewards/rejected, logps/chosen, logps/rejected (means over
        answers of that kind), and kl, or of bco shift."""
        cfg, segments_BT = self.section, batch["segments"]
        answers_BT, mask_BT = self._answers(batch), batch["mask"]
        own_BT = running_sums(batch["logps"] * mask_BT, segments_BT)
        if "reference" in batch:
            reference_BT = batch["reference"]
        else:
            reference_BT = running_sums(batch["reference_logps"] * mask_BT, segments_BT)
        ratio_BT = own_BT - reference_BT
        wanted_BT = batch["label"] > 0
        # A point of comparison, through which nothing is learnt.
        shift = jax.lax.stop_gradient(self._shift(batch, ratio_BT, answers_BT, wanted_BT))
        # 0 elsewhere, so that losses and their derivatives are finite under the mask.
        z_BT = jnp.where(answers_BT, cfg.beta * ratio_BT - shift, 0.0)
        z_BT = jnp.where(wanted_BT, z_BT, -z_BT)
        loss_BT = -log_sigmoid(z_BT) if cfg.loss == "bco" else 1 - sigmoid(z_BT)
        weights_BT = jnp.where(wanted_BT, cfg.desirable_weight, cfg.undesirable_weight)
        rewards_BT = cfg.beta * ratio_BT
        metrics = {}
        for name, kind_BT in (("chosen", wanted_BT), ("rejected", ~wanted_BT)):
            of_kind_BT = answers_BT & kind_BT
            for figure, x_BT in (("rewards", rewards_BT), ("logps", own_BT)):
                metrics[f"{figure}/{name}"] = jnp.where(of_kind_BT, x_BT, 0.0)
                # Weights by kind, so that a batch without one kind reports nothing of it.
                metrics[f"{figure}/{name}/weight"] = of_kind_BT.astype(jnp.float32)
        metrics["kl" if cfg.loss == "kto" else "shift"] = (
            answers_BT * shift / (cfg.beta if cfg.loss == "kto" else 1.0)
        )
        return Terms(jnp.where(answers_BT, weights_BT * loss_BT, 0.0), metrics)

    def evaluate(self, models: Models, batch: Batch) -> dict[str, Array]:
        """The loss, and the mean rewards of both kinds."""
        return self.evaluate_loss(
            models, batch, rewards_chosen="rewards/chosen", rewards_rejected="rewards/rejected"
        )

    def _answers(self, batch: Batch) -> Array:
        """True at the last position of each answer that has a label."""
        return is_last(batch["segments"]) & (batch["label"] != 0)

    def _shift(self, batch: Batch, ratio_BT: Array, answers_BT: Array, wanted_BT: Array) -> Array:
        """The reference point that rewards are compared with."""
        beta = self.section.beta
        if self.section.loss == "kto":
            # Answers of other prompts estimate KL; at least 0, as KL is.
            others_BT = is_last(batch["segments"]) & (batch["mismatched"] > 0)
            return beta * jnp.maximum(_mean_where(ratio_BT, others_BT), 0.0)
        if self.section.loss == "apo_zero":
            return jnp.zeros(())
        # The mean of two means, so that the more frequent kind does not decide.
        wanted = _mean_where(beta * ratio_BT, answers_BT & wanted_BT)
        return (wanted + _mean_where(beta * ratio_BT, answers_BT & ~wanted_BT)) / 2


def _mean_where(x_BT: Array, where_BT: Array) -> Array:
    return jnp.where(where_BT, x_BT, 0.0).sum() / jnp.maximum(where_BT.sum(), 1)
