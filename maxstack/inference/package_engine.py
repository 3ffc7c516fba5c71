"""The engine on the programs of a package: `prefill` computes a step of rows, `logits` its head.
Tokens are chosen here and not by the package's `decode`, which is for other servers.
Shapes: R rows  O outputs  D embed  V vocab."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.data.chat import ChatTemplate
from maxstack.errors import ConfigError
from maxstack.inference.batch_invariance import StepSizes
from maxstack.inference.engine import Engine
from maxstack.inference.engine_setup import Served
from maxstack.inference.layout import PORTABLE, Layout
from maxstack.inference.page_cache import Limits
from maxstack.inference.runner import Batch, Runner, flatten_cache, unflatten_cache
from maxstack.load import load_record
from maxstack.package.loader import Package

NEEDED = "prefill", "logits"
"""Signatures by which an engine computes."""
CONFIG = "config.yml"


def can_generate(package: Package) -> bool:
    """Return True where a package has the signatures that an engine needs."""
    return {*NEEDED} <= {*package.signatures}


def start_package(package: Package) -> Served:
    """Return an engine on the programs of a package, with the settings that it was made with.
    ConfigError where this version cannot read them."""
    folder = package.folder
    text, sizes = package.manifest["text"], package.manifest["cache"]
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: has no {CONFIG}; make the package again")
    section = text["tokenizer"]
    file = section.get("path") if section else None
    cfg = load_record(folder, [f"data.tokenizer.path={folder / file}"] if file else [])
    # A package runs on any device, so its cache has no device's own layout.
    layout = Layout.of(cfg.decoder, cfg.serve, PORTABLE)
    pages = tuple(sizes["pages"])
    # The sizes are part of the programs' shapes; a user cannot change them.
    fixed = sizes["rows"], sizes["page"], pages, sizes["requests"], sizes["snapshots"]
    limits = Limits(*fixed, cfg.serve.snapshot, cfg.serve.prefix_cache)
    programs = PackageRunner(package, layout, limits, sizes["max_length"])
    engine = Engine.from_programs(cfg, layout, programs, sizes["max_length"])
    StepSizes(programs, cfg.decoder.vocab, sizes["max_length"], cfg.serve.identical).try_all()
    from maxstack.data.tokenizers import open_prompt_tokenizer

    tokenizer = open_prompt_tokenizer(cfg.data.tokenizer) if section else None
    stops = frozenset(text["stop_tokens"])
    said = text["template"]
    where = f"{folder}/manifest.json"
    template = ChatTemplate(**said, where=where, guarded=True) if said else None
    own = folder, folder / "tokenizer"
    return Served(str(folder), cfg, engine, *own, tokenizer, stops, template)


class PackageRunner(Runner):
    """Computes steps by the programs of a package."""

    has_multi_step = False

    def __init__(self, package: Package, layout: Layout, limits: Limits, max_length: int):
        super().__init__(layout, limits, max_length)
        self._package = package
        self.sizes = _rows_of(package, "prefill")
        self._outputs = _rows_of(package, "logits")
        self.renew()

    def renew(self) -> None:
        self.cache = unflatten_cache(self._package.state(), len(self.layout.arrays))

    @property
    def outputs(self) -> tuple[int, ...]:
        return self._outputs

    def load(self, params: Any, keep: bool = False) -> None:
        """The weights of a package cannot be changed."""
        raise ConfigError("a package keeps its weights")

    def forward(
        self, batch: Batch, x_RD: jax.Array | None = None, module: int | None = None
    ) -> jax.Array:
        rows = batch.rows
        tables = {f"tables.{i}": table for i, table in enumerate(batch.tables)}
        given = {"tokens": rows.tokens_R, "positions": rows.positions_R, "requests": rows.slots_R}
        cache = flatten_cache(self.cache)
        results, after = self._call("prefill", len(rows.tokens_R), cache, given | tables)
        self.cache = unflatten_cache(after, len(self.cache))
        return results["states"]

    def head(
        self, x_RD: jax.Array, rows: Sequence[int], module: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        size = next(size for size in self.outputs if size >= len(rows))
        wanted_O = np.zeros(size, np.int32)
        wanted_O[: len(rows)] = rows
        # Rows are taken here: `logits` has the number of its own rows in its shape alone.
        results, _ = self._call("logits", size, {}, {"states": jnp.take(x_RD, wanted_O, 0)})
        return results["normed"], results["logits"]

    def _call(self, name: str, rows: int, state: Any, inputs: Any) -> tuple[Any, Any]:
        signature = self._package.signatures[name]
        call, (weights, states, places) = signature.loaded(
            signature.program({"rows": rows})["file"]
        )
        own, given = jax.device_put((state, inputs), (states, places))
        return call(self._package.weights(weights), own, given)


def _rows_of(package: Package, name: str) -> tuple[int, ...]:
    """Return the numbers of rows for which a signature has programs."""
    programs = package.signatures[name].spec["programs"]
    return tuple(program["sizes"]["rows"] for program in programs)
