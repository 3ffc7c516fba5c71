"""Rules between models of images and their data."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from maxstack.config import Fault
from maxstack.schema.data import SyntheticSource
from maxstack.schema.stack import BlockConfig

if TYPE_CHECKING:
    from maxstack.schema.config import Config


class ImageModel(Protocol):
    """What such a model says of its images."""

    @property
    def image_size(self) -> int: ...

    @property
    def patch(self) -> int: ...

    @property
    def blocks(self) -> Mapping[str, BlockConfig]: ...

    @property
    def channels(self) -> int: ...

    @property
    def tokens(self) -> int: ...


def patch_faults(model: ImageModel, whole: bool) -> Iterator[Fault]:
    """(key in the model, what is wrong and what to do) of patches and their order. `whole`: they
    must cover an image; else what is left at its right and lower edge is not seen."""
    if model.image_size < model.patch or (whole and model.image_size % model.patch):
        near = max(model.image_size // model.patch, 1) * model.patch
        yield (
            "image_size",
            f"image_size={model.image_size} is not a multiple of patch={model.patch}; use {near}",
        )
    for name, block in model.blocks.items():
        if not block.mixer.two_sided:
            yield (
                f"blocks.{name}.mixer.causal",
                "patches have no order in which one could hide the next; set causal: false",
            )


def image_faults(model: ImageModel, cfg: "Config", classes: int | None) -> Iterator[Fault]:
    """(key from the root, what is wrong and what to do) of data that does not fit a model of so
    many classes."""
    for key, data in cfg.data_sections.items():
        if data.seq_len != model.tokens:
            yield (
                f"{key}.seq_len",
                f"seq_len={data.seq_len}, but an image of model.image_size={model.image_size} is "
                f"{model.tokens} tokens; leave it out",
            )
        if data.packing != "none":
            yield f"{key}.packing", "an image is a row of its own: set none, or leave it out"
        if (data.image.resize or model.image_size) < model.image_size:
            yield (
                f"{key}.image.resize",
                f"resize={data.image.resize} is less than model.image_size={model.image_size}, "
                "which is cut out of it; give as much or more, or leave it out",
            )
        for name in ("mean", "std"):
            given = len(getattr(data.image, name))
            if given not in (1, model.channels):
                yield (
                    f"{key}.image.{name}",
                    f"holds {given} numbers, and model.channels={model.channels}; give as many, or "
                    "one for all",
                )
        for index, source in enumerate(data.sources):
            if isinstance(source, SyntheticSource) and classes and source.vocab > classes:
                yield (
                    f"{key}.sources.{index}.vocab",
                    f"vocab={source.vocab} makes classes that model.classes={classes} does not "
                    f"have; use {classes} or less",
                )
