"""The diffusion transformer's configuration: blocks whose norms a time and a class shift and
scale."""

from collections.abc import Iterator
from typing import Any, Literal, Self

from maxstack.config import Fault, SizeInt
from maxstack.schema.image_stack import ImageStackConfig
from maxstack.schema.parts import Dim, Part, Parts, Weight, matrix, vector

FREQUENCIES = 256
"""Sines and cosines that encode a time."""


class ConditionConfig(Part):
    """Turns a time and a class into a vector: an MLP on the sines and cosines of the time, plus the
    class's row of a table, whose last row stands for no class."""

    LAYER = "maxstack.layers.condition:Condition"
    COMPONENT = "condition"

    classes: SizeInt
    """Number of classes."""

    def parts(self, width: Dim) -> Parts:
        """Two projections with biases, and the table."""
        waves, hidden = Dim("latent", FREQUENCIES), width._replace(axis="norm")
        rows = Dim("latent", self.classes + 1)
        return {
            "time_in": matrix(waves, width),
            "time_in_bias": vector(hidden),
            "time_out": matrix(width, hidden),
            "time_out_bias": vector(hidden),
            "table": Weight((rows, width), "rows", std=0.02, scaled="in"),
        }


class DiTConfig(ImageStackConfig):
    """A diffusion transformer with adaptive norms that begin as the identity (adaLN-zero, Peebles &
    Xie 2023, arXiv:2212.09748)."""

    MODEL = "maxstack.models.dit:DiT"
    OBJECTIVE = "flow"

    kind: Literal["dit"]
    """Selects this architecture."""
    out_channels: SizeInt | None = None
    """Number of output channels, of which only the first `channels` are used; null: `channels`."""
    classes: SizeInt
    """Number of classes; the table has one more row, for no class."""

    @property
    def own_conditions(self) -> bool:
        """Whether each block makes its own conditions."""
        return any(block.modulation == "own" for block in self.blocks.values())

    @property
    def as_exported(self) -> Self:
        blocks = {
            name: block.model_copy(update={"modulation": "own"})
            for name, block in self.blocks.items()
        }
        return self.model_copy(update={"blocks": blocks})

    @property
    def output_channels(self) -> int:
        """Numbers per pixel in the output."""
        return self.out_channels or self.channels

    @property
    def outputs(self) -> int:
        return self.patch**2 * self.output_channels

    def products_outside_blocks(self, seq_len: int) -> Iterator[tuple[str, float]]:
        size, images = self.embed, 1 / seq_len
        yield "patches", self.patch**2 * self.channels * size
        conditions = self.layers if self.own_conditions else 1
        yield "condition", conditions * (FREQUENCIES + size) * size * images
        yield "condition", (6 * self.layers + 2) * size**2 * images
        yield "head", size * self.outputs

    def placeholder(self, length: int) -> dict[str, Any]:
        return {"sources": [{"kind": "synthetic", "vocab": max(self.classes, 2)}]}

    def own_faults(self) -> Iterator[Fault]:
        yield from super().own_faults()
        if self.embed % 4:
            yield "embed", f"embed={self.embed} must be a multiple of 4, for positions in two ways"
        if self.output_channels < self.channels:
            yield "out_channels", f"must be at least channels={self.channels}"
        if len({block.modulation for block in self.blocks.values()}) > 1:
            yield "blocks", "modulation must be the same in all"
        for name, block in self.blocks.items():
            if block.modulation is None:
                yield (
                    f"blocks.{name}.modulation",
                    "is how a time and a class reach a block: set shared, or own",
                )
            if block.mixer.ropes:
                yield f"blocks.{name}.mixer.rope", "positions are added; set rope: null"
