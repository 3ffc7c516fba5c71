"""Flow matching (Lipman et al. 2022, arXiv:2210.02747) and diffusion of images.

A time from 0 (the image) to 1 (noise) mixes the two along a path; the model predicts velocity,
image or noise. `path=line` mixes linearly; `path=vp` has the variances of DDPM's 1,000 steps (Ho et
al. 2020, arXiv:2006.11239). Shapes: B batch  S side of an image  C channels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.models.block import Aux
from maxstack.objectives.images import ImageObjective
from maxstack.objectives.objective import Batch, Loss, Models, content_keys, row_keys
from maxstack.schema.dit import DiTConfig
from maxstack.schema.objective import FlowConfig

UNITS = 1000
"""The model's time at pure noise; 0 is the image."""
BETAS = 1e-4, 0.02
"""The first and last variance of noise that a step of path=vp adds."""
LEAST = 1e-3
"""Smallest share of image or noise by which a prediction of the other is divided."""


class Flow(ImageObjective):
    """Sum over images of the mean squared error of the prediction over their pixels."""

    section: FlowConfig
    model: DiTConfig

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """Draw `time` float32 [B] and `noise` float32 [B, S, S, C], and hide some classes: `label`
        is then the number of classes. Each depends on the row alone."""
        section, shape = self.section, batch["image"].shape
        # A key for each row, so that microbatches and meshes draw the same.
        keys_B = jax.random.wrap_key_data(row_keys(key, shape[0]), impl="threefry2x32")

        def drawn(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            first, second, third = jax.random.split(key, 3)
            if section.times == "uniform":
                time = jax.random.uniform(first)
            else:
                # Logit-normal: more of the times in the middle.
                time = jax.nn.sigmoid(jax.random.normal(first))
            return time, jax.random.normal(second, shape[1:]), jax.random.uniform(third)

        time_B, noise, hidden_B = jax.vmap(drawn)(keys_B)
        label_B = jnp.where(hidden_B < section.drop, self.model.classes, batch["label"])
        return {**batch, "time": self.shifted(time_B), "noise": noise, "label": label_B}

    def shifted(self, time: jax.Array) -> jax.Array:
        """Shift times by objective.shift."""
        shift = self.section.shift
        return shift * time / (1.0 + (shift - 1.0) * time)

    def shares(self, time: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The shares of image and noise at times from 0 (all image) to 1."""
        if self.section.path == "line":
            return 1.0 - time, time
        betas = np.linspace(*BETAS, UNITS)
        # Entry n is what n steps leave of the image's variance; entry 0 is the image itself.
        kept = jnp.asarray(np.concatenate([[1.0], np.cumprod(1.0 - betas)]), jnp.float32)
        image = kept[self._steps(time).astype(jnp.int32)]
        return jnp.sqrt(image), jnp.sqrt(1.0 - image)

    def units(self, time: jax.Array) -> jax.Array:
        """Times as the model reads them."""
        if self.section.path == "line":
            return UNITS * time
        # DDPM counts its steps from 0.
        return jnp.maximum(self._steps(time) - 1, 0)

    @staticmethod
    def _steps(time: jax.Array) -> jax.Array:
        """Number of steps up to a time; rounding of its last bit does not change it."""
        return jnp.ceil(jnp.maximum(UNITS * time - 1e-3, 0))

    def ends(self, made: jax.Array, x: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The image and the noise that follow from a prediction at x and a time."""
        image, noise = self.shares(time)
        if self.section.prediction == "velocity":
            # By x_t = (1 - t) x + t e and v = e - x.
            return x - noise * made, x + image * made
        if self.section.prediction == "x0":
            return made, (x - image * made) / jnp.maximum(noise, LEAST)
        return (x - noise * made) / jnp.maximum(image, LEAST), made

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Metrics: loss."""
        errors_B, aux = self._errors(models, batch)
        total = (errors_B * batch["real"]).sum()
        return self.make_loss(batch, total, {"loss": total}, aux)

    def evaluate(self, models: Models, batch: Batch) -> dict[str, jax.Array]:
        """The mean of the loss over eval_times fixed times; noise follows from an image alone."""
        times, total = self.section.eval_times, jnp.zeros((), jnp.float32)
        rows = batch["image"].shape[0]
        for part in range(times):
            # The same times at every evaluation, the middles of equal parts.
            middle = jnp.full((rows,), (part + 0.5) / times)
            normal = functools.partial(jax.random.normal, shape=batch["image"].shape[1:])
            noise = jax.vmap(normal)(content_keys(batch["image"], part))
            at = {**batch, "time": self.shifted(middle), "noise": noise}
            errors_B, _ = self._errors(models, at)
            total += (errors_B * batch["real"]).sum() / times
        return {"nll": total, "weight": batch["real"].sum(), "bytes": jnp.zeros(())}

    def _errors(self, models: Models, batch: Batch) -> tuple[jax.Array, Aux]:
        """Mean squared errors float32 [B], and reports of the blocks."""
        x, noise = self.pixels(batch["image"]), batch["noise"]
        time_B = batch["time"]
        of_image, of_noise = self.shares(time_B[:, None, None, None])
        pixels = of_image * x + of_noise * noise
        given = {**batch, "pixels": pixels, "time": self.units(time_B)}
        made, aux = models.policy(given)
        wanted = {"velocity": noise - x, "x0": x, "eps": noise}[self.section.prediction]
        # Further channels, which an imported model may have, do not count.
        made = made[..., : self.model.channels]
        return jnp.square(made - wanted).mean(axis=(1, 2, 3)), aux
