"""Rules between the model, the data and the objective; each yields (key, what is wrong and what to
do)."""

from collections.abc import Iterator

from maxstack.config import Fault
from maxstack.schema.config import Config
from maxstack.schema.data import BYTE_IDS, SyntheticSource
from maxstack.schema.decoder import DecoderConfig
from maxstack.schema.dit import DiTConfig
from maxstack.schema.image_stack import ImageStackConfig


def faults(cfg: Config) -> Iterator[Fault]:
    """Data or an objective that does not fit the model."""
    if isinstance(cfg.model, DecoderConfig):
        yield from _decoder(cfg.model, cfg)
    elif isinstance(cfg.model, ImageStackConfig):
        yield from _images(cfg.model, cfg)
    if cfg.model.weights:
        yield from unsaid(cfg)


def unsaid(cfg: Config) -> Iterator[Fault]:
    """What neither a folder of weights nor the configuration says of them."""
    if isinstance(cfg.model, DiTConfig) and "prediction" not in cfg.objective.model_fields_set:
        yield (
            "objective.prediction",
            "a folder does not say what its model predicts; say what the weights of model.from "
            "were trained to predict, or of `maxstack import` with the command: "
            "objective.prediction=eps objective.path=vp for the published DiT, "
            "objective.prediction=velocity for a model of maxstack",
        )


def _decoder(model: DecoderConfig, cfg: Config) -> Iterator[Fault]:
    spare = model.vocab - cfg.objective.token_ids(model.vocab)
    for key, data in cfg.data_sections.items():
        for index, source in enumerate(data.sources):
            if isinstance(source, SyntheticSource) and source.vocab > model.vocab:
                yield (
                    f"{key}.sources.{index}.vocab",
                    f"vocab={source.vocab} makes token ids that model.vocab={model.vocab} has no "
                    f"embedding for; use {model.vocab} or less",
                )
        if data.cut_into_bytes and model.vocab < BYTE_IDS + spare:
            beside = f" beside {spare} of objective.kind={cfg.objective.kind}" if spare else ""
            yield (
                "model.vocab",
                f"vocab={model.vocab} is too small for {key}.tokenizer kind bytes, which has "
                f"{BYTE_IDS} ids{beside}; use model.vocab={BYTE_IDS + spare} or more",
            )
        if model.positions and data.seq_len > model.positions:
            yield (
                f"{key}.seq_len",
                f"seq_len={data.seq_len} is longer than the learned table of "
                f"model.positions={model.positions}; use {model.positions} or less",
            )


def _images(model: ImageStackConfig, cfg: Config) -> Iterator[Fault]:
    for key, data in cfg.data_sections.items():
        if data.seq_len != model.tokens:
            yield (
                f"{key}.seq_len",
                f"seq_len={data.seq_len}, but an image of model.image_size={model.image_size} is "
                f"{model.tokens} tokens; leave it out",
            )
        if data.packing != "none":
            yield f"{key}.packing", "each image is a row: set none, or leave it out"
        if (data.image.resize or model.image_size) < model.image_size:
            yield (
                f"{key}.image.resize",
                f"resize={data.image.resize} is less than model.image_size={model.image_size}, "
                "which is cut out of it; use as much or more, or leave it out",
            )
        for name in ("mean", "std"):
            given = len(getattr(data.image, name))
            if given not in (1, model.channels):
                yield (
                    f"{key}.image.{name}",
                    f"holds {given} numbers, and model.channels={model.channels}; give one for "
                    "each channel, or one for all",
                )
        classes = getattr(model, "classes", None)
        for index, source in enumerate(data.sources):
            if isinstance(source, SyntheticSource) and classes and source.vocab > classes:
                yield (
                    f"{key}.sources.{index}.vocab",
                    f"vocab={source.vocab} makes classes that model.classes={classes} does not "
                    f"have; use {classes} or less",
                )
