"""Sizes of kernels' blocks that were measured: a JSON table by device kind, op, backend and shape class. `maxstack tune` adds to it.

What ships stands in tuned.json beside this file; a table of one's own, `run.tuned`, goes before it. Where neither has a row, a kernel takes its
default.
"""

import contextlib
import contextvars
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maxstack.config import ConfigError

SHIPPED = Path(__file__).with_name("tuned.json")
KEYS = ("device", "op", "backend", "shape")
_own: contextvars.ContextVar[Path | None] = contextvars.ContextVar("tuned", default=None)


@contextlib.contextmanager
def use(path: str | None) -> Iterator[None]:
    """The table of one's own for kernels that are traced inside; it need not exist."""
    token = _own.set(Path(path).expanduser() if path else None)
    try:
        yield
    finally:
        _own.reset(token)


def blocks(op: str, backend: str, device: str, shape: Mapping[str, int | str]) -> dict[str, int] | None:
    """The measured sizes of a backend's blocks for a shape class on a kind of device; None: it takes its default."""
    asked = dict(zip(KEYS, (device, op, backend, dict(shape)), strict=True))
    for path in (_own.get(), SHIPPED):
        for row in rows(path) if path else ():
            if all(row[name] == asked[name] for name in KEYS):
                return dict(row["blocks"])
    return None


def rows(path: Path) -> list[Mapping[str, Any]]:
    """The rows of a table, none where there is no file; ConfigError where it is no table."""
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return []
    return _read(path, changed)


@functools.lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if all(isinstance(row[name], str) for row in found for name in KEYS[:3]) and all(isinstance(row["blocks"], dict) for row in found):
            return found
        wrong = "a row has no device, op, backend, shape or blocks"
    except (ValueError, KeyError, TypeError) as error:
        wrong = f"{type(error).__name__}: {error}"
    raise ConfigError(f"run.tuned: {path} is no table of block sizes ({wrong}); delete it, or write it again with maxstack tune")


def keep(path: Path, found: list[dict[str, Any]]) -> None:
    """Put rows into a table, in place of those with the same keys; other rows stay, and a reader never sees half a file."""
    same = [[row[name] for name in KEYS] for row in found]
    kept = [row for row in rows(path) if [row[name] for name in KEYS] not in same]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in [*kept, *found]) + "\n]\n", encoding="utf-8")
    unfinished.replace(path)
