"""maxstack in Python: the names of docs/PYTHON.md, each imported when it is first used."""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from maxstack.callbacks import Callback, Training
    from maxstack.convert import export_folder, import_folder
    from maxstack.errors import ConfigError, DataError
    from maxstack.library import Model, dataset, evaluate, model
    from maxstack.llm import LLM, CompletionOutput, RequestOutput, SamplingParams
    from maxstack.plan.report import Plan
    from maxstack.run import Run, assemble
    from maxstack.schema.config import Config
    from maxstack.train import Trained

    # Checkers of types would take these for modules.
    def load(config: str | Path | dict[str, Any], *overrides: str) -> Config: ...
    def plan(
        config: Config | str | Path, topology: str = "here", *, exact: bool = False
    ) -> Plan: ...
    def train(
        config: Config | str | Path | dict[str, Any],
        *,
        callbacks: Sequence[Callback] = (),
        force_config: Sequence[str] = (),
    ) -> Trained: ...


_PLACES = {
    "Callback": "maxstack.callbacks",
    "CompletionOutput": "maxstack.llm",
    "Config": "maxstack.schema.config",
    "ConfigError": "maxstack.errors",
    "DataError": "maxstack.errors",
    "LLM": "maxstack.llm",
    "RequestOutput": "maxstack.llm",
    "Model": "maxstack.library",
    "Run": "maxstack.run",
    "SamplingParams": "maxstack.llm",
    "Trained": "maxstack.train",
    "Training": "maxstack.callbacks",
    "assemble": "maxstack.run",
    "dataset": "maxstack.library",
    "evaluate": "maxstack.library",
    "export_folder": "maxstack.convert",
    "import_folder": "maxstack.convert",
    "load": "maxstack",
    "model": "maxstack.library",
    "plan": "maxstack",
    "train": "maxstack",
}
__all__ = [
    "LLM",
    "Callback",
    "CompletionOutput",
    "Config",
    "ConfigError",
    "DataError",
    "Model",
    "RequestOutput",
    "Run",
    "SamplingParams",
    "Trained",
    "Training",
    "assemble",
    "dataset",
    "evaluate",
    "export_folder",
    "import_folder",
    "load",
    "model",
    "plan",
    "train",
]


def __getattr__(name: str) -> Any:
    # Not at once: `import maxstack` imports no jax, and a command only what it needs.
    if name not in _PLACES:
        raise AttributeError(f"module 'maxstack' has no attribute {name!r}")
    place = _PLACES[name]
    if place == __name__:
        return importlib.import_module(f"{place}.{name}")
    value = globals()[name] = getattr(importlib.import_module(place), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _plan(config: "Config | str | Path", topology: str = "here", *, exact: bool = False) -> "Plan":
    """Compile a run's step for hardware that need not be here, such as v5p:8x8x16 or h100:32x8
    (hosts x GPUs per host) -> what it needs and sends, and a bound on its speed: `fits`, `json()`,
    and a report as its text. `exact`: with full optimization, as training does. ConfigError where
    it cannot."""
    # Not by `import`: library.py imports modules that import this one.
    planned: Plan = importlib.import_module("maxstack.library").plan(config, topology, exact=exact)
    return planned


def _call(module: str, function: Callable[..., Any]) -> None:
    """Let a module be called as a function of its name: whichever is imported first,
    `maxstack.load` is both."""
    own: Any = sys.modules[module]
    own.__class__ = type("CallableModule", (ModuleType,), {"__call__": staticmethod(function)})
    own.__signature__, own.__doc__ = inspect.signature(function), function.__doc__
