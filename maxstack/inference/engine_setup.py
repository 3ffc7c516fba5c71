"""Setup of an engine for a model: read its weights, size its cache, check its programs.

Cheap checks come first, so that a mistake is told before weights are read for minutes: mesh, kind
of model, layout of the cache, tokenizer. Then the run is assembled on the mesh and its weights and
adapters are read; and the memory that these leave decides how far the cache may grow.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maxstack.data.byte_level import read_json
from maxstack.data.chat import (
    ChatTemplate,
    answer_ends,
    open_template,
    read_chat_template,
    read_ends,
)
from maxstack.errors import ConfigError
from maxstack.inference.layout import Layout
from maxstack.inference.page_cache import Limits
from maxstack.inference.trained_model import config_of, read_layers, read_weights
from maxstack.report.progress import progress
from maxstack.report.table import bytes_text
from maxstack.schema.mesh import AXES

if TYPE_CHECKING:
    from maxstack.data.tokenizers import Tokenizer
    from maxstack.inference.engine import Engine
    from maxstack.schema.config import Config

log = logging.getLogger(__name__)
GIB = 2**30
SHARE = 0.5
"""Share of the memory left by the weights that a cache takes by default."""
OVERRIDES = (
    "run.virtual_devices=null",
    "train.accumulate=1",
    *(f"mesh.{axis}=1" for axis in AXES),
    "mesh.rules.seq=null",
    "mesh.rules.residual=null",
)
"""A run's own mesh is for training; tokens of inference have no sequence to shard."""
Opened = tuple["Config", Path | None]
"""A configuration, and the run's folder, None for a Hugging Face folder."""
USUAL = 2048
"""serve.max_length of a model that does not state its length."""


class First(NamedTuple):
    """The first request, as far as it is known before weights are read: what is compiled while they
    are, and how large a cache to begin with."""

    prompt: int | None = 1
    """Tokens; None: any number."""
    answer: int = 0
    """Tokens at most."""
    draws: bool = True
    """False: each token is the likeliest."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A model with an engine."""

    model: str
    cfg: "Config"
    engine: "Engine"
    own: Path | None
    """The run's folder; None for a Hugging Face folder."""
    folder: Path | None
    """Folder with config.json and tokenizer files; None for a run without one."""
    tokenizer: "Tokenizer | None"
    """None for a model without one, whose prompts are tokens."""
    stop_tokens: frozenset[int]
    """Tokens that end an answer."""
    template: ChatTemplate | None = None
    """The chat template that a package brings."""


def start(
    model: str,
    overrides: Sequence[str],
    adapter: str | None = None,
    check: Callable[["Tokenizer | None", int], First] = lambda tokenizer, vocab: First(),
) -> Served:
    """Set up the engine of a run, a checkpoint or a Hugging Face folder, with the adapters of
    serve.adapters and `adapter`, the name of one of them or a folder, which is its own name.
    `check` returns the first request, and may raise for the tokenizer and the size of the
    vocabulary, before weights are read.
    ConfigError where the model cannot generate or does not fit."""
    import jax

    from maxstack.inference.programs import inference_config

    cfg, own = place_on_devices(functools.partial(config_of, model), overrides, jax.device_count())
    if cfg.decoder.head.scores:
        raise ConfigError(f"{model}: is a reward model; use `maxstack score --records`")
    if not cfg.objective.FORWARD:
        raise ConfigError(f"{model}: was trained by masked diffusion; use `maxstack sample`")
    cfg = inference_config(cfg)
    folder = model_files(cfg, own)
    layout = Layout.of(cfg.decoder, cfg.serve, jax.devices()[0].platform)
    longest = max_length_of(cfg, own, folder)
    tokenizer, stop_tokens = open_model_tokenizer(cfg, own, folder)
    first = check(tokenizer, cfg.decoder.vocab)

    from maxstack import sharding
    from maxstack.hardware.compiling import keep_programs
    from maxstack.inference.adapters import Adapters, read_adapters
    from maxstack.inference.engine import Engine
    from maxstack.run import assemble

    # Before the first program is compiled.
    keep_programs(cfg.run.compilation_cache)
    run = assemble(cfg, sharding.make_mesh(cfg.mesh, jax.devices()), trains=False)
    # A name of serve.adapters wins over a folder of the same name.
    folders = ({adapter: adapter} if adapter else {}) | cfg.serve.adapters
    # Adapters are placed by the weights that they change.
    params = read_weights(model, run, own) if folders else None
    adapters = read_adapters(run, params, folders) if folders else Adapters()
    free = _free(run, layout, adapters.weights)
    limits, max_length = make_limits(cfg, layout, longest, free)
    length = min(max_length, (first.prompt or 0) + first.answer)
    engine = Engine(run, params, limits, max_length, adapters, on_demand=length)
    if params is None:
        # The compiler and the disk work at the same time.
        with ThreadPoolExecutor(1, "compiler") as compiler:
            compiling = compiler.submit(engine.compile, first.prompt, first.draws)
            kept = engine.programs.kept() if own is None else None
            if kept is None:
                engine.programs.load(read_weights(model, run, own))
            else:
                engine.programs.load_prepared(read_layers(run, kept))
            with progress(1, "compiling for the first answer", "steps", delay=0.5) as shown:
                compiling.result()
                shown.update()
    if cfg.serve.identical == "strict" and engine.sizes:
        engine.sizes.try_all()
    engine.scheduler.keep_prefixes(False)
    return Served(model, cfg, engine, own, folder, tokenizer, stop_tokens)


def place_on_devices(
    opened: Callable[[Sequence[str]], Opened], overrides: Sequence[str], devices: int
) -> Opened:
    """Open a configuration with the mesh of `overrides`, or by default with as many devices over
    `tensor` as divide the model's sizes, and replicas over the rest."""
    # The rules of training hold for the configuration too, so give it a batch that divides
    # anywhere.
    each = *OVERRIDES, *_rollout_overrides(opened, devices), f"train.batch_size={devices}"
    if any(override.startswith("mesh") for override in overrides):
        return opened([*each, *overrides])
    # As many devices to a replica as the model's sizes allow: a ConfigError means that this number
    # does not divide them.
    for tensor in range(devices, 1, -1):
        sizes = f"mesh.tensor={tensor}", f"mesh.data={devices // tensor}"
        if devices % tensor == 0:
            with contextlib.suppress(ConfigError):
                return opened([*each, *sizes, *overrides])
    return opened([*each, f"mesh.data={devices}", *overrides])


def _rollout_overrides(opened: Callable[[Sequence[str]], Opened], devices: int) -> Sequence[str]:
    """Return sizes of rollouts that fit any batch, for a run trained by reinforcement learning."""
    with contextlib.suppress(ConfigError):  # which is raised again where the sizes are right
        if opened(["run.virtual_devices=null"])[0].rollout:
            sizes = f"prompts={devices}", "samples=2", "minibatches=1", "max_tokens=1"
            return [f"rollout.{size}" for size in sizes]
    return ()


def make_limits(
    cfg: "Config", layout: Layout, longest: int, free: int | None
) -> tuple[Limits, int]:
    """Return the sizes of the engine by serve.*, and the most tokens of a request, which is at most
    `longest` unless serve.max_length is set. `free`: bytes of a replica beside the weights, None:
    unknown. ConfigError where not one request fits."""
    serve = cfg.serve
    length = serve.max_length or longest
    bounded = layout.pages(length, serve.page, serve.rows)
    page_bytes = [layout.token_bytes(i) * serve.page for i in range(len(bounded))]
    snapshots = layout.snapshots(serve)
    states = _state_bytes(layout, serve.max_requests, snapshots)
    each = sum(count * size for count, size in zip(bounded, page_bytes, strict=True))
    wanted = each * serve.max_requests
    if serve.cache is not None:
        budget = int(serve.cache * GIB) - states
    elif free is not None:
        # No more than serve.max_requests can use at the full length.
        budget = min(wanted, int(free * SHARE))
    else:
        budget = wanted
    # A model of states alone has no pages; its requests cost nothing here.
    requests = budget / each if each else serve.max_requests
    if requests < 1 and serve.max_length is None and serve.cache is None:
        # Serve the longest text that fits rather than refuse a model made for longer ones. A length
        # that was asked for is refused below instead.
        length = max(serve.page, int(requests * length) // serve.page * serve.page)
        smaller = cfg.model_copy(update={"serve": serve.model_copy(update={"max_length": length})})
        log.warning(
            "serve.max_length: %d of the model's %d tokens fit in free memory; set serve.cache or "
            "serve.max_length to change that",
            length,
            longest,
        )
        return make_limits(smaller, layout, longest, free)
    if requests < 1:
        raise ConfigError(
            f"serve.max_length={length}: a request needs {each / GIB:.3f} GiB of cache, and "
            f"{max(budget, 0) / GIB:.3f} are available; lower it, or raise serve.cache"
        )
    # In each group at least what one request of the full length needs, or it would wait forever.
    counts = tuple(max(count, int(count * requests)) for count in bounded)
    sizes = serve.rows, serve.page, counts, serve.max_requests
    return Limits(*sizes, snapshots, serve.snapshot, serve.prefix_cache), length


def room(engine: "Engine") -> str:
    """Return a line that says how many requests of which length the cache has room for."""
    programs, length = engine.programs, engine.max_length
    layout, limits = programs.layout, programs.limits
    each = layout.pages(length, limits.page, limits.rows)
    fit = min(limits.requests, *(most // own for most, own in zip(limits.pages, each, strict=True)))
    pages = sum(layout.token_bytes(i) * count for i, count in enumerate(limits.pages))
    states = _state_bytes(layout, limits.requests, limits.snapshots)
    size = bytes_text(programs.replicas * (limits.page * pages + states))
    return (
        f"room for {programs.replicas * fit:,} requests of {length:,} tokens at a time: {size} of "
        "cache at most, allocated as requests need it"
    )


def _state_bytes(layout: Layout, requests: int, snapshots: int) -> int:
    """Return the bytes of recurrent states, of which one belongs to no request."""
    return layout.request_bytes * (1 + requests + snapshots)


def _free(run: Any, layout: Layout, adapters: Any) -> int | None:
    """Return the bytes that weights and adapters leave on the devices over which a replica's cache
    is sharded; None where a device does not report its memory."""
    from maxstack.plan.fit import shard_bytes, usable
    from maxstack.state import count

    # Devices of a mesh are alike, so the first stands for all.
    limit = usable(run.mesh.local_devices[0], run.mesh.size)
    if limit is None:
        return None
    weights = shard_bytes(run.abstract.params) + count(adapters)[1]
    # From a device to its replica: the cache is sharded over some of its devices and repeated on
    # others.
    return int((limit - weights) * layout.shards(run.cfg.mesh, run.mesh.shape))


def model_files(cfg: "Config", own: Path | None) -> Path | None:
    """Return the folder with a model's config.json and tokenizer."""
    from maxstack.data import hub

    if own is not None:
        return own / "hf" if (own / "hf").is_dir() else None
    assert cfg.model.weights
    folder = Path(cfg.model.weights)
    return folder if folder.is_dir() else hub.model_folder(cfg.model.weights, weights=False)


def chat_template(
    model: str, cfg: "Config", own: Path | None, file: str | None = None
) -> ChatTemplate:
    """Read the chat template of `file`, or the one that a run was trained with, or the model's own,
    to be rendered in a process with limits. ConfigError where there is none."""
    folder, data = model_files(cfg, own), cfg.data
    # A run answers in the form that it was trained with.
    if own is not None and (data.template or folder is None):
        named = file or data.template
        if named or data.tokenizer.kind != "bytes":
            return open_template(data.model_copy(update={"template": named}), guarded=True)
    return read_chat_template(folder or Path(model), file, guarded=True)


def max_length_of(cfg: "Config", own: Path | None, folder: Path | None) -> int:
    """Return the most tokens of a text that the model was made for."""
    # Models of text and images keep the language model's sizes under `text_config`.
    outer = read_json(folder / "config.json") if folder else {}
    config = outer.get("text_config") or outer
    lengths = [
        cfg.decoder.positions or 0,
        config.get("max_position_embeddings") or 0,
        cfg.data.seq_len if own else 0,
    ]
    # A learned table of positions ends there. Without one, take the longest text that config.json
    # or training names.
    return cfg.decoder.positions or max(lengths) or USUAL


def open_model_tokenizer(
    cfg: "Config", own: Path | None, folder: Path | None
) -> tuple["Tokenizer | None", frozenset[int]]:
    """Open the model's tokenizer, None where it has none, and return it with the tokens that end
    its answers. ConfigError where all of these are outside the vocabulary."""
    from maxstack.data.tokenizers import open_prompt_tokenizer, open_tokenizer

    said = read_ends(folder) if folder else set[int]()
    # Some folders name an end that their vocabulary lacks beside one that it has.
    stops = {token for token in said if 0 <= token < cfg.decoder.vocab}
    if said and not stops:
        raise ConfigError(
            f"{folder}: eos_token_id={sorted(said)} of its config.json or generation_config.json: "
            f"the vocabulary has {cfg.decoder.vocab} tokens, so an answer would never end; correct "
            "it there"
        )
    if own is None and "tokenizer" not in cfg.data.model_fields_set:
        return None, frozenset(stops)
    tokenizer = open_tokenizer(cfg.data.tokenizer)
    stops.update(answer_ends(cfg.data, tokenizer) if own is not None else tokenizer.eos)
    return open_prompt_tokenizer(cfg.data.tokenizer), frozenset(stops)
