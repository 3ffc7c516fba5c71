"""maxstack in Python: the names of docs/PYTHON.md, each imported when it is first used."""

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from maxstack.errors import ConfigError, DataError
    from maxstack.llm import LLM, CompletionOutput, RequestOutput, SamplingParams
    from maxstack.run import Run, assemble
    from maxstack.schema.config import Config

    # Checkers of types would take these for modules.
    def load(config: str | Path | dict[str, Any], *overrides: str) -> Config: ...


_PLACES = {
    "CompletionOutput": "maxstack.llm",
    "Config": "maxstack.schema.config",
    "ConfigError": "maxstack.errors",
    "DataError": "maxstack.errors",
    "LLM": "maxstack.llm",
    "RequestOutput": "maxstack.llm",
    "Run": "maxstack.run",
    "SamplingParams": "maxstack.llm",
    "assemble": "maxstack.run",
    "load": "maxstack",
}
__all__ = [
    "LLM",
    "CompletionOutput",
    "Config",
    "ConfigError",
    "DataError",
    "RequestOutput",
    "Run",
    "SamplingParams",
    "assemble",
    "load",
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


def _call(module: str, function: Callable[..., Any]) -> None:
    """Let a module be called as a function of its name: whichever is imported first,
    `maxstack.load` is both."""
    own: Any = sys.modules[module]
    own.__class__ = type("CallableModule", (ModuleType,), {"__call__": staticmethod(function)})
    own.__signature__, own.__doc__ = inspect.signature(function), function.__doc__
