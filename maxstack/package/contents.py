"""Contents of a package: the model's signatures, the weights that they read, their cache.

A model is opened as the engine opens it. Encoders and diffusion transformers become functions of
images; decoders become functions of whole texts and, unless they are reward models, the engine's
steps over a paged cache of fixed sizes. All signatures of a decoder read one set of weights, layers
apart: `score` stacks them again, which copies the weights in each call but gives equal bits.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from maxstack import sharding
from maxstack.config.spelling import did_you_mean
from maxstack.data.chat import ChatTemplate
from maxstack.errors import ConfigError
from maxstack.inference.adapters import Adapters
from maxstack.inference.engine_setup import (
    chat_template,
    make_limits,
    max_length_of,
    model_files,
    open_model_tokenizer,
    place_on_devices,
)
from maxstack.inference.layout import PORTABLE, Layout
from maxstack.inference.pooling import read_pooling
from maxstack.inference.programs import Programs, inference_config
from maxstack.inference.runner import flatten_cache
from maxstack.inference.trained_model import config_of, read_weights
from maxstack.package.image_signatures import image_signatures, sampling_signatures
from maxstack.package.signature import Arrays, Signature
from maxstack.package.text_signatures import (
    Weights,
    generation_signatures,
    lengths_of,
    text_signatures,
)
from maxstack.run import assemble
from maxstack.schema.decoder import DecoderConfig
from maxstack.state import flat

if TYPE_CHECKING:
    from maxstack.inference.images import Solver
    from maxstack.run import Run
    from maxstack.schema.config import Config

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Options:
    """How a model becomes functions."""

    devices: int = 1
    lengths: Sequence[int] = ()
    """Lengths of padded texts that programs take; none: the longest and quarters of it."""
    steps: int = 50
    solver: "Solver" = "euler"
    guidance: float = 1.0


@dataclasses.dataclass(frozen=True)
class Text:
    """How texts become tokens and back."""

    tokenizer: dict[str, Any] | None
    """data.tokenizer; None for a model that brings none."""
    stop_tokens: frozenset[int]
    template: ChatTemplate | None


@dataclasses.dataclass(frozen=True)
class Contents:
    """The functions of a model, and what they read."""

    run: "Run"
    signatures: Sequence[Signature]
    weights: Arrays
    state: Arrays
    """The cache as shapes; empty where no signature has one."""
    text: Text | None = None
    cache: dict[str, Any] | None = None
    """Sizes of the cache and of steps."""


def open_contents(model: str, overrides: Sequence[str], options: Options) -> Contents:
    """Read a run, one of its checkpoints or a Hugging Face folder. ConfigError for a model that
    cannot be packaged."""
    # Export needs no devices, but weights are read onto the mesh.
    if (there := jax.device_count()) < options.devices:
        raise ConfigError(
            f"--devices {options.devices}: there are {there} here; run.virtual_devices="
            f"{options.devices} makes as many of this CPU"
        )
    opened = functools.partial(config_of, model)
    cfg, own = place_on_devices(opened, overrides, options.devices)
    text = isinstance(cfg.model, DecoderConfig)
    if text and not cfg.objective.FORWARD:
        raise ConfigError(
            f"{model}: was trained by masked diffusion, which cannot be packaged; use `maxstack "
            "sample`"
        )
    # Experts drop no tokens, whatever the run's capacity: a text must not depend on its batch.
    cfg = inference_config(cfg) if text else cfg
    mesh = sharding.make_mesh(cfg.mesh, jax.devices()[: options.devices])
    run = assemble(cfg, mesh, trains=False)
    if not text:
        return _pictures(model, run, own, options)
    return _texts(model, run, own, options)


def select_signatures(signatures: Sequence[Signature], names: Sequence[str]) -> Sequence[Signature]:
    """Return the signatures with these names, all if none are given. ConfigError for an unknown
    one."""
    known = [signature.name for signature in signatures]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--signature {name}: no such signature of this model"
                f"{did_you_mean(name, known)}; there are {', '.join(known)}"
            )
    return [signature for signature in signatures if not names or signature.name in names]


def _pictures(model: str, run: "Run", own: Path | None, options: Options) -> Contents:
    flow = run.cfg.objective.kind == "flow"
    params = read_weights(model, run, own)
    made = (
        sampling_signatures(run, options.steps, options.solver, options.guidance)
        if flow
        else image_signatures(run)
    )
    return Contents(run, [*made], flat(params), {})


def _texts(model: str, run: "Run", own: Path | None, options: Options) -> Contents:
    cfg = run.cfg
    folder = model_files(cfg, own)
    longest = max_length_of(cfg, own, folder)
    normalize = read_pooling(folder).normalize if folder else True
    if too_long := [length for length in options.lengths if length > longest]:
        raise ConfigError(f"--lengths: {too_long[0]}: the model reads {longest} tokens at most")
    lengths = sorted({*options.lengths}) or lengths_of(cfg.serve.max_length or longest)
    text = _text(model, cfg, own, folder)
    if cfg.decoder.head.scores:
        weights = Weights(read_weights(model, run, own))
        return Contents(
            run, [*text_signatures(run, weights, lengths, normalize)], weights.arrays, {}, text
        )
    # One program is for all platforms, so the cache has no device's own layout.
    layout = Layout.of(cfg.decoder, cfg.serve, PORTABLE)
    # None: the memory here says nothing about where the package will run.
    limits, length = make_limits(cfg, layout, longest, None)
    programs = Programs(run, layout, limits, length, Adapters())
    weights = Weights(programs.prepare(read_weights(model, run, own), keep=False))
    # Shapes alone: nothing runs here.
    state = flatten_cache(jax.eval_shape(programs.empty))
    signatures = [
        *text_signatures(run, weights, lengths, normalize),
        *generation_signatures(run, programs, weights, layout, limits.pages, length),
    ]
    cache = {
        "rows": limits.rows,
        "page": limits.page,
        "pages": [*limits.pages],
        "snapshots": limits.snapshots,
        "max_length": length,
        "requests": limits.requests,
        "slots": programs.slots,
        "width": programs.width,
    }
    return Contents(run, signatures, weights.arrays, state, text, cache)


def _text(model: str, cfg: "Config", own: Path | None, folder: Path | None) -> Text:
    tokenizer, stops = open_model_tokenizer(cfg, own, folder)
    template = None
    try:
        template = chat_template(model, cfg, own)
    # Most functions need no template, so its lack is told and refuses nothing.
    except ConfigError as error:
        log.warning("the package has no chat template: %s", error)
    section = None if tokenizer is None else cfg.data.tokenizer.model_dump(mode="json")
    return Text(section, stops, template)
