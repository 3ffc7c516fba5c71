"""An engine for a model: its weights read, its cache sized, its program checked."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack.errors import ConfigError
from maxstack.inference.layout import Layout
from maxstack.inference.opened import config_of, open_prompt_tokenizer, read_weights
from maxstack.inference.scheduler import Limits

if TYPE_CHECKING:
    from maxstack.data.tokenizers import Tokenizer
    from maxstack.inference.engine import Engine
    from maxstack.schema.config import Config

log = logging.getLogger(__name__)
GIB = 2**30
SHARE = 0.5
"""Share of the memory that is free beside the weights that a cache takes by itself."""
USUAL = 2048
"""serve.max_length of a model that says nothing of its length."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A model that is ready to answer."""

    model: str
    cfg: "Config"
    engine: "Engine"
    folder: Path | None
    """Folder with config.json and the files of a tokenizer; None for a run that has none."""
    tokenizer: "Tokenizer | None"
    """None for a model that brings none, whose prompts are tokens."""
    stop_tokens: frozenset[int]
    """Tokens that end an answer."""


def start(model: str, overrides: Sequence[str], adapter: str | None = None) -> Served:
    """The engine of a run, a checkpoint or a Hugging Face folder, with the adapters of
    serve.adapters and `adapter`, a name there or a folder, which is its name then. ConfigError
    where it cannot generate or does not fit."""
    from maxstack.inference.programs import serving

    cfg, own = config_of(model, ["run.virtual_devices=null", *overrides])
    if cfg.objective.kind == "masked_diffusion":
        raise ConfigError(f"{model}: was trained by masked diffusion; `maxstack sample` is for it")
    cfg = serving(cfg)
    folder = _files(cfg, own)
    layout, longest = Layout.of(cfg.model), _longest(cfg, own, folder)
    tokenizer, stop_tokens = _tokenizer(cfg, own, folder)

    import jax

    from maxstack import sharding
    from maxstack.inference.adapters import read_adapters
    from maxstack.inference.engine import Engine
    from maxstack.run import assemble

    run = assemble(cfg, sharding.make_mesh(cfg.mesh, jax.devices()), trains=False)
    params = read_weights(model, run, own)
    folders = ({adapter: adapter} if adapter else {}) | cfg.serve.adapters
    adapters = read_adapters(run, params, folders)
    limits, max_length = limits_of(cfg, layout, longest, _free(run, adapters.weights))
    engine = Engine(run, params, limits, max_length, adapters)
    _check_identical(engine, layout)
    return Served(model, cfg, engine, folder, tokenizer, stop_tokens)


def limits_of(cfg: "Config", layout: Layout, longest: int, free: int | None) -> tuple[Limits, int]:
    """Sizes of the engine by serve.*, and the most tokens of a request, at most `longest` unless
    serve.max_length says so; `free` are bytes of a device beside the weights, None: not known.
    ConfigError where not one request fits."""
    serve = cfg.serve
    length = serve.max_length or longest
    pages = [-(-length // serve.page)] * len(layout.reaches)
    reads = [reach.window or reach.chunk or length for reach in layout.reaches]
    bounded = [
        min(whole, -(-(read + serve.rows) // serve.page) + 1)
        for whole, read in zip(pages, reads, strict=True)
    ]
    page_bytes = [layout.token_bytes(i) * serve.page for i in range(len(bounded))]
    snapshots = serve.snapshots if layout.recurrent and serve.prefix_cache else 0
    states = layout.request_bytes * (1 + serve.max_requests + snapshots)
    each = sum(count * size for count, size in zip(bounded, page_bytes, strict=True))
    wanted = each * serve.max_requests
    allowed = None if free is None else int(free * SHARE)
    if serve.cache is not None:
        allowed = wanted = int(serve.cache * GIB)
    budget = (wanted if allowed is None else min(wanted, allowed)) - states * (
        serve.cache is not None
    )
    requests = budget / each if each else serve.max_requests
    if requests < 1 and serve.max_length is None and serve.cache is None:
        # the longest text that fits, in place of the longest that the model could read
        length = max(serve.page, int(requests * length) // serve.page * serve.page)
        smaller = cfg.model_copy(update={"serve": serve.model_copy(update={"max_length": length})})
        log.warning(
            "serve.max_length: %d tokens fit the memory that is free, of the %d that the model "
            "reads; set serve.cache or serve.max_length to say otherwise",
            length,
            longest,
        )
        return limits_of(smaller, layout, longest, free)
    if requests < 1:
        raise ConfigError(
            f"serve.max_length={length}: a request needs {each / GIB:.3f} GiB of cache, and there "
            f"are {max(budget, 0) / GIB:.3f}; make it shorter, or give more in serve.cache"
        )
    counts = tuple(max(count, int(count * requests)) for count in bounded)
    sizes = serve.rows, serve.page, counts, serve.max_requests
    return Limits(*sizes, snapshots, serve.snapshot, serve.prefix_cache), length


def _check_identical(engine: "Engine", layout: Layout) -> None:
    """ConfigError or a warning where a request's bits depend on its company."""
    from maxstack.inference.identity import differing

    asked = engine.cfg.serve.identical
    if asked == "off":
        return
    ways = differing(engine.programs, layout, engine.cfg.model.vocab, engine.max_length)
    if not ways:
        return
    message = (
        f"serve.identical={asked}: on this device a request's logits change in their last bits "
        f"when it is {' and '.join(ways)}"
    )
    if asked == "strict":
        raise ConfigError(f"{message}; set serve.identical=check to serve nevertheless")
    log.warning("%s", message)


def _free(run: Any, adapters: Any) -> int | None:
    """Bytes of a device that the weights, and those of adapters, leave; None where it does not
    say."""
    from maxstack.plan.fit import shard_bytes, usable
    from maxstack.state import count

    limit = usable(run.mesh.local_devices[0], run.mesh.size)
    weights = shard_bytes(run.abstract.params) + count(adapters)[1]
    return None if limit is None else int(limit) - weights


def _files(cfg: "Config", own: Path | None) -> Path | None:
    """The folder with a model's config.json and tokenizer."""
    from maxstack.data import hub

    if own is not None:
        return own / "hf" if (own / "hf").is_dir() else None
    assert cfg.model.weights
    folder = Path(cfg.model.weights)
    return folder if folder.is_dir() else hub.model_folder(cfg.model.weights, weights=False)


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _longest(cfg: "Config", own: Path | None, folder: Path | None) -> int:
    """Most tokens of a text that the model was made for."""
    outer = _json(folder / "config.json") if folder else {}
    config = outer.get("text_config") or outer
    lengths = [
        cfg.model.positions or 0,
        config.get("max_position_embeddings") or 0,
        cfg.data.seq_len if own else 0,
    ]
    return cfg.model.positions or max(lengths) or USUAL


def _tokenizer(
    cfg: "Config", own: Path | None, folder: Path | None
) -> tuple["Tokenizer | None", frozenset[int]]:
    """The model's tokenizer, and the tokens that end its answers."""
    from maxstack.data.tokenizers import open_tokenizer

    stops: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        ends = _json(folder / name).get("eos_token_id") if folder else None
        stops.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    if own is None and "tokenizer" not in cfg.data.model_fields_set:
        return None, frozenset(stops)
    stops.update(open_tokenizer(cfg.data.tokenizer).eos)
    return open_prompt_tokenizer(cfg), frozenset(stops)
