"""Keys and rules of models of images, which cut an image into patches."""

from collections.abc import Iterator
from typing import ClassVar

from maxstack.config import CountInt, Fault, SizeInt
from maxstack.schema.stack import StackConfig


class ImageStackConfig(StackConfig):
    """Keys shared by image models."""

    WHOLE: ClassVar[bool] = True
    """Whether patches must cover the whole image."""

    image_size: SizeInt
    """Height and width of an image in pixels, or of a latent."""
    patch: CountInt
    """Height and width of a patch."""
    channels: SizeInt = 3
    """Number of channels per pixel."""

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return (self.image_size // self.patch) ** 2

    def own_faults(self) -> Iterator[Fault]:
        yield from super().own_faults()
        if self.image_size < self.patch or (self.WHOLE and self.image_size % self.patch):
            near = max(self.image_size // self.patch, 1) * self.patch
            yield (
                "image_size",
                f"image_size={self.image_size} is not a multiple of patch={self.patch}; use {near}",
            )
        for name, block in self.blocks.items():
            if not block.mixer.two_sided:
                yield (
                    f"blocks.{name}.mixer.causal",
                    "patches have no order for a causal mask; set causal: false",
                )
