"""Masked diffusion on a language model that sees both sides: each row hides its tokens with a
probability t of its own, and the model predicts them, weighted by 1 / t. Shapes: B batch  T time  V
vocab."""

import functools

import jax
import jax.numpy as jnp

from maxstack.kernels.sequences import arrange
from maxstack.objectives.next_token import head_losses, shift_left
from maxstack.objectives.objective import (
    Batch,
    Loss,
    Models,
    Objective,
    content_keys,
    row_keys,
)
from maxstack.schema.objective import MaskedDiffusionConfig

EXCLUDED = -1e9
"""Added to the logit of the mask token, which is never predicted; finite, so that gradients are."""
ACCURACY_AT = 0.15
"""Share of tokens that evaluation hides to count which are filled right."""


class MaskedDiffusion(Objective):
    """Sum over hidden tokens of -log p(token) / t, where a row's tokens are hidden with probability
    t, uniform in [least, 1] and stratified over the batch: a bound on the negative log-likelihood
    (Sahoo et al. 2024, arXiv:2406.07524, eq. 10; Nie et al. 2025, arXiv:2502.09992, eq. 3).

    The sequence is what next_token predicts: `targets`, or with `shift` the tokens, of which
    position i predicts the one at i + 1 (Dream 2025, arXiv:2508.15487).
    """

    section: MaskedDiffusionConfig

    @property
    def mask_token(self) -> int:
        """Id of a hidden token."""
        given = self.section.mask_token
        return self.cfg.decoder.vocab - 1 if given is None else given

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """Draw `time` float32 [B] and `draw` float32 [B, T], uniform in [0, 1): a token whose draw
        is below its row's time is hidden."""
        rows, length = batch["tokens"].shape
        # One offset and equal strata cover [0, 1) evenly in every batch; `rows` is the number of no
        # row.
        offset = jax.random.uniform(jax.random.fold_in(key, rows))
        strata = (offset + jnp.arange(rows) / rows) % 1.0
        time_B = self.section.least + (1.0 - self.section.least) * strata
        keys_B = jax.random.wrap_key_data(row_keys(key, rows), impl="threefry2x32")
        draw_BT = jax.vmap(lambda key: jax.random.uniform(key, (length,)))(keys_B)
        return {**batch, "time": time_B, "draw": draw_BT}

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Metrics: loss, and router_loss where the model has one."""
        model, time_B1 = models.policy, batch["time"][:, None]
        hidden_BT = (batch["draw"] < time_B1) & (self._maskable(batch) > 0)
        x_BTD, aux, _ = model.trunk(self._corrupt(batch, hidden_BT))
        targets_BT, predicted_BT = self._targets(batch, hidden_BT)
        losses = head_losses(
            model,
            model.norm(x_BTD),
            arrange(targets_BT),
            # 1 / t makes rows with few and with many hidden tokens count alike in expectation.
            arrange(predicted_BT / time_B1),
            # The mask token is no answer, and its share of the softmax would be a loss that nothing
            # can lower.
            bias_V=self._exclusion_bias(),
        )
        return self.make_loss(batch, losses.total, {"loss": losses.total}, aux)

    def weight(self, batch: Batch) -> jax.Array:
        # All positions that may be predicted, hidden or not: 1 / t makes up for those that are not.
        return self._predicting(batch).sum()

    def evaluate(self, models: Models, batch: Batch) -> dict[str, jax.Array]:
        """The mean of the bound over eval_times fixed t, and hidden_accuracy: the share of 15 %
        hidden tokens that are the likeliest. Which tokens are hidden depends on the row's tokens
        alone."""
        targets_BT = batch["targets"]
        uniform = functools.partial(jax.random.uniform, shape=targets_BT.shape[1:])
        draw_BT = jax.vmap(uniform)(content_keys(targets_BT))
        rows, times = draw_BT.shape[0], self.section.eval_times
        total = jnp.zeros((), jnp.float32)
        for part in range(times):
            time = (part + 0.5) / times
            # Draws are turned, so that each time hides other tokens, and still the same ones in
            # each evaluation.
            at = {**batch, "time": jnp.full((rows,), time), "draw": (draw_BT + part / times) % 1.0}
            total += self.loss(models, at).metrics["loss"] / times
        counted_BT = self._predicting(batch)
        right, hidden = self._infilling_accuracy(models, batch, draw_BT)
        return {
            "nll": total,
            "weight": counted_BT.sum(),
            "bytes": (batch["bytes"] * counted_BT).sum(),
            "hidden_accuracy": right,
            "hidden_accuracy/weight": hidden,
        }

    def _infilling_accuracy(
        self, models: Models, batch: Batch, draw_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        model = models.policy
        hidden_BT = (draw_BT < ACCURACY_AT) & (self._maskable(batch) > 0)
        logits_BTV = model.logits(model.hidden(self._corrupt(batch, hidden_BT)))
        best_BT = (logits_BTV + self._exclusion_bias()).argmax(-1)
        targets_BT, predicted_BT = self._targets(batch, hidden_BT)
        right_BT = jnp.where(best_BT == targets_BT, predicted_BT, 0.0)
        return right_BT.sum(), predicted_BT.sum()

    def _maskable(self, batch: Batch) -> jax.Array:
        """Positions of the sequence that may be hidden, float32 [B, T]."""
        mask_BT = batch["mask"].astype(jnp.float32)
        if not self.section.shift:
            return mask_BT
        segments_BT = batch.get("segments", jnp.ones_like(batch["tokens"]))
        before_BT = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)))
        # The first token of a document has no state before it.
        return jnp.where(before_BT == segments_BT, mask_BT, 0.0)

    def _predicting(self, batch: Batch) -> jax.Array:
        """Positions whose state predicts a token of the sequence, float32 [B, T]."""
        known_BT = self._maskable(batch)
        return shift_left(known_BT) if self.section.shift else known_BT

    def _corrupt(self, batch: Batch, hidden_BT: jax.Array) -> Batch:
        clean_BT = batch["tokens" if self.section.shift else "targets"]
        return {**batch, "tokens": jnp.where(hidden_BT, self.mask_token, clean_BT)}

    def _targets(self, batch: Batch, hidden_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Target of each position, and 1 where it is hidden, float32."""
        hidden_BT = hidden_BT.astype(jnp.float32)
        return batch["targets"], shift_left(hidden_BT) if self.section.shift else hidden_BT

    def _exclusion_bias(self) -> jax.Array:
        return jnp.zeros(self.cfg.decoder.vocab).at[self.mask_token].set(EXCLUDED)
