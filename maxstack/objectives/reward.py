"""Reward models: a scalar head scores the last token of each answer of a pair (Bradley-Terry).
Shapes: B batch  T time."""

import jax.numpy as jnp
from jax import Array
from jax.nn import log_sigmoid

from maxstack.objectives.objective import Batch, Loss, Models, Objective
from maxstack.objectives.sequences import count_pairs, is_last, pair_sums, pairs_of
from maxstack.schema.objective import RewardConfig


class Reward(Objective):
    """Sum over pairs of -log sigmoid(a - b - margin) + centre (a + b)^2, with a and b the scores of
    the last tokens of the chosen and the rejected answer."""

    section: RewardConfig

    unit = "pairs"

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Metrics: loss, rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies; and
        router_loss where the model has one."""
        model = models.policy
        x_BTD, aux, _ = model.trunk(batch)
        sums = self.sums(batch, model.scores(model.norm(x_BTD)))
        return self.make_loss(batch, sums["loss"], sums, aux)

    def weight(self, batch: Batch) -> Array:
        return count_pairs(batch["segments"])

    def sums(self, batch: Batch, scores_BT: Array) -> dict[str, Array]:
        """The loss and the figures of a batch, by the score of each position."""
        cfg, segments_BT = self.section, batch["segments"]
        last_BT = is_last(pairs_of(segments_BT))
        # Sums of one number, an answer's score at its end, which they move to the pair's last
        # position. Zeros elsewhere keep the losses there finite; the mask below drops them.
        ends = pair_sums(scores_BT * batch["ends"], segments_BT)
        chosen_BT, rejected_BT = ends.where(last_BT, 0.0)
        gap_BT = chosen_BT - rejected_BT
        loss_BT = -log_sigmoid(gap_BT - (batch["margin"] if cfg.margins else 0.0))
        # Only differences matter to the first term, so this one keeps the scores near zero.
        loss_BT = loss_BT + cfg.centre * jnp.square(chosen_BT + rejected_BT)
        figures = {
            "loss": loss_BT,
            "rewards/chosen": chosen_BT,
            "rewards/rejected": rejected_BT,
            "rewards/margins": gap_BT,
            "rewards/accuracies": (gap_BT > 0).astype(jnp.float32),
        }
        return {name: jnp.where(last_BT, x, 0.0).sum() for name, x in figures.items()}

    def evaluate(self, models: Models, batch: Batch) -> dict[str, Array]:
        """The loss, and the share of pairs whose chosen answer has the higher score."""
        return self.evaluate_loss(models, batch, accuracy="rewards/accuracies")
