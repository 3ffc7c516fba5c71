"""Supervised fine-tuning: the loss of next_token with a weight for each target (by token, by
sequence, or DFT's), and NEFTune's noise on embeddings. Shapes: B batch  T time  D embed."""

import jax
import jax.numpy as jnp
from jax import Array

from maxstack.kernels.sequences import natural
from maxstack.objectives.log_probs import log_probs
from maxstack.objectives.next_token import NextToken
from maxstack.objectives.objective import Batch, Loss, Models, divisor, row_keys
from maxstack.objectives.sequences import broadcast_last, is_last, running_sums
from maxstack.objectives.statistics import statistics
from maxstack.schema.objective import SFTConfig


class SFT(NextToken):
    """Sum over targets that count of -log p(target), each with its weight."""

    section: SFTConfig

    def prepare(self, batch: Batch, key: Array) -> Batch:
        """Add random keys of rows for NEFTune (Jain et al. 2023, arXiv:2310.05914)."""
        if not self.section.neftune:
            return batch
        return {**batch, "neftune": row_keys(key, batch["tokens"].shape[0])}

    def weight(self, batch: Batch) -> Array:
        """Targets that count, or sequences that have one."""
        if self.section.weigh != "sequence":
            return super().weight(batch)
        counts_BT, segments_BT = _counts(batch)
        return (is_last(segments_BT) & (counts_BT > 0)).sum().astype(jnp.float32)

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Metrics: those of next_token, and where they are asked for entropy and token_accuracy."""
        cfg, model = self.section, models.policy
        if "neftune" in batch:
            batch = {**batch, "embedding_noise": self._noise(batch)}
        trunk = model.trunk(batch)
        normed_BTD = model.norm(trunk[0])
        weights_BT = self._by_sequence(batch) if cfg.weigh == "sequence" else batch["mask"]
        if cfg.dft:
            # A weight without gradient: p times the gradient of -log p.
            weights_BT = weights_BT * jnp.exp(log_probs(model, normed_BTD, batch["targets"]))
        more = self._statistics(models, batch, normed_BTD) if cfg.statistics else {}
        return self._weighted(models, batch, trunk, normed_BTD, weights_BT, cfg.z_loss, **more)

    def evaluate(self, models: Models, batch: Batch) -> dict[str, Array]:
        """The loss, entropy and token_accuracy."""
        x_BTD, _, _ = models.policy.trunk(batch)
        normed_BTD = models.policy.norm(x_BTD)
        # Without weights, noise and z_loss, so that runs compare.
        logps_BT = log_probs(models.policy, normed_BTD, batch["targets"])
        return {
            "nll": -(logps_BT * batch["mask"]).sum(),
            "weight": batch["mask"].sum(),
            **self._statistics(models, batch, normed_BTD),
        }

    def _statistics(self, models: Models, batch: Batch, normed_BTD: Array) -> dict[str, Array]:
        found = statistics(models.policy, natural(normed_BTD), batch["targets"])
        mask_BT = batch["mask"]
        figures = {"entropy": found.entropy, "token_accuracy": found.right}
        sums = {name: (x_BT * mask_BT).sum() for name, x_BT in figures.items()}
        return sums | {f"{name}/weight": mask_BT.sum() for name in figures}

    @staticmethod
    def _by_sequence(batch: Batch) -> Array:
        """Weights of targets that make each sequence's loss a mean [B, T]."""
        counts_BT, segments_BT = _counts(batch)
        return batch["mask"] / divisor(broadcast_last(counts_BT, segments_BT))

    def _noise(self, batch: Batch) -> Array:
        """Noise of embeddings [B, T, D]."""
        embed, length = self.cfg.model.embed, batch["tokens"].shape[1]
        segments_BT = batch.get("segments", jnp.ones_like(batch["tokens"]))
        sizes_BT = broadcast_last(
            running_sums(jnp.ones_like(batch["mask"]), segments_BT), segments_BT
        )
        # A key for each row of the global batch, so that microbatches change no noise.
        keys_B = jax.random.wrap_key_data(batch["neftune"], impl="threefry2x32")
        noise_BTD = jax.vmap(
            lambda key: jax.random.uniform(key, (length, embed), minval=-1.0, maxval=1.0)
        )(keys_B)
        # alpha / sqrt(length x embed), with the length
        # of the token's own sequence in the packed row.
        scale_BT = self.section.neftune / jnp.sqrt(jnp.maximum(sizes_BT, 1.0) * embed)
        return noise_BTD * scale_BT[:, :, None]


def _counts(batch: Batch) -> tuple[Array, Array]:
    """For each position [B, T] the number of counted targets of its sequence so far, and its
    segment."""
    segments_BT = batch.get("segments", jnp.ones_like(batch["tokens"]))
    return running_sums(batch["mask"], segments_BT), segments_BT
