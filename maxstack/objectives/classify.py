"""Cross-entropy of images' classes. Shapes: B batch  S side of an image  C channels  K classes."""

import jax
import jax.numpy as jnp

from maxstack.errors import ConfigError
from maxstack.models.block import Aux
from maxstack.objectives.images import ImageObjective
from maxstack.objectives.objective import Batch, Loss, Models
from maxstack.schema.objective import ClassifyConfig


class Classify(ImageObjective):
    """Sum over images of the cross-entropy of their classes, with smoothing and mixup."""

    section: ClassifyConfig

    def check_trains(self) -> None:
        if not self.cfg.model.has_head:
            raise ConfigError(
                "model.classes: classify needs a number of classes; set model.classes"
            )

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """Add mixup (Zhang et al. 2017, arXiv:1710.09412): `image` float32, mixed with another
        row's, that row's class `other`, int32 [B], and `share`, the weight of the row's own."""
        if not self.section.mixup:
            return batch
        # One share for the whole batch, and the row before: both need the batch before it is cut.
        share = jax.random.beta(key, self.section.mixup, self.section.mixup)
        # The larger share for the row's own class; Beta(a, a) is symmetric.
        share = jnp.maximum(share, 1.0 - share)
        image = batch["image"].astype(jnp.float32)
        mixed = share * image + (1.0 - share) * jnp.roll(image, 1, axis=0)
        return {**batch, "image": mixed, "other": jnp.roll(batch["label"], 1), "share": share}

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Metrics: loss and accuracy."""
        logits_BK, aux = self._logits(models, batch)
        losses_B = self._losses(logits_BK, batch["label"])
        if "other" in batch:
            others_B = self._losses(logits_BK, batch["other"])
            losses_B = batch["share"] * losses_B + (1.0 - batch["share"]) * others_B
        real_B = batch["real"]
        nll, right = (losses_B * real_B).sum(), self._right(logits_BK, batch, 1)
        return self.make_loss(batch, nll, {"loss": nll, "accuracy": right}, aux)

    def evaluate(self, models: Models, batch: Batch) -> dict[str, jax.Array]:
        """Cross-entropy without smoothing, accuracy, and with more than five classes top5, the
        share of images whose class is among the five likeliest."""
        logits_BK, _ = self._logits(models, batch)
        real_B = batch["real"]
        log_p_BK = jax.nn.log_softmax(logits_BK)
        log_p_B1 = jnp.take_along_axis(log_p_BK, batch["label"][:, None], axis=1)
        nll = -(log_p_B1[:, 0] * real_B).sum()
        sums = {"nll": nll, "weight": real_B.sum(), "bytes": jnp.zeros(())}
        for name, most in {"accuracy": 1, "top5": 5}.items():
            # Among as many as there are classes every image would be right.
            if most < logits_BK.shape[1]:
                sums[name] = self._right(logits_BK, batch, most)
                sums[f"{name}/weight"] = real_B.sum()
        return sums

    def _logits(self, models: Models, batch: Batch) -> tuple[jax.Array, Aux]:
        """float32 [B, K], and reports of the blocks."""
        model = models.policy
        x_BTD, aux, _ = model.trunk({**batch, "pixels": self.pixels(batch["image"])})
        return model.logits(model.features(x_BTD)), aux

    def _losses(self, logits_BK: jax.Array, label_B: jax.Array) -> jax.Array:
        log_p_BK = jax.nn.log_softmax(logits_BK)
        own_B = jnp.take_along_axis(log_p_BK, label_B[:, None], axis=1)[:, 0]
        smoothing = self.section.smoothing
        return -(1.0 - smoothing) * own_B - smoothing * log_p_BK.mean(axis=1)

    @staticmethod
    def _right(logits_BK: jax.Array, batch: Batch, most: int) -> jax.Array:
        """The number of images whose class is among the `most` likeliest; ties count as wrong."""
        own_B1 = jnp.take_along_axis(logits_BK, batch["label"][:, None], axis=1)
        # Counts the class itself, hence ties are wrong: a
        # model that says the same of all classes gets none.
        above_B = (logits_BK >= own_B1).sum(axis=1)
        return jnp.where(above_B <= most, batch["real"], 0.0).sum()
