"""Base class of objectives of images. Shapes: B batch  S side of an image  C channels."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from maxstack.objectives.objective import Batch, Objective
from maxstack.schema.objective import RowField as Field


class ImageObjective(Objective):
    """A loss over images and their classes."""

    unit = "images"

    @property
    def fields(self) -> Mapping[str, Field]:
        """`image` uint8 [B, S, S, C], float16 for latents; `label` int32 [B]; `real` float32 [B], 0
        for padding."""
        model, dtype = self.model, "float16" if self.cfg.data.has_latents else "uint8"
        side = model.image_size
        return {
            "image": Field("batch", dtype, (side, side, model.channels)),
            "label": Field("batch", "int32", below=model.classes),
            "real": Field("batch", "float32"),
        }

    def weight(self, batch: Batch) -> jax.Array:
        return batch["real"].sum()

    def tokens(self, batch: Batch) -> jax.Array:
        """All tokens of all rows, since the layers do not tell padding rows apart."""
        return jnp.asarray(batch["real"].shape[0] * self.model.tokens, jnp.float32)

    def pixels(self, image: jax.Array) -> jax.Array:
        """Values from 0 to 255, or latents, [B, S, S, C] -> float32, by data.image.mean and
        std."""
        section = self.cfg.data.image
        scaled = image.astype(jnp.float32) / (1.0 if self.cfg.data.has_latents else 255.0)
        return (scaled - jnp.asarray(section.mean)) / jnp.asarray(section.std)
