"""Measured sizes of kernels' blocks: a JSON table by device kind, op, backend and shape class, to
which `maxstack tune` adds.

The table of the package is tuned.json beside this file; a user's own, `run.tuned`, takes
precedence. Without a row in either, a kernel uses its default.
"""

import contextlib
import contextvars
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxstack import strict_json
from maxstack.config import storage
from maxstack.errors import ConfigError
from maxstack.sharding import holding

SHIPPED = Path(__file__).with_name("tuned.json")
KEYS = ("device", "op", "backend", "shape")
_own: contextvars.ContextVar[str | None] = contextvars.ContextVar("tuned", default=None)


def use(path: str | None) -> contextlib.AbstractContextManager[None]:
    """The user's own table for kernels that are traced inside; it need not exist."""
    return holding(_own, os.path.expanduser(path) if path else None)


def blocks(
    op: str, backend: str, device: str, shape: Mapping[str, int | str]
) -> dict[str, int] | None:
    """The measured block sizes of a backend for a shape class on a kind of device; None where the
    tables have no row."""
    key = [device, op, backend, dict(shape)]
    for path in (_own.get(), SHIPPED):
        for row in rows(path) if path else ():
            if _key(row) == key:
                return dict(row["blocks"])
    return None


def rows(path: str | Path) -> list[Mapping[str, Any]]:
    """The rows of a table at a path or URL, none where there is no file; ConfigError for anything
    but a table."""
    try:
        return _read(str(path), *storage.stamp(str(path)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read as a table of block sizes: {error.strerror}; give a "
            "file, or set run.tuned: null"
        ) from error


def _key(row: Mapping[str, Any]) -> list[Any]:
    return [row[name] for name in KEYS]


@functools.lru_cache(maxsize=4)
def _read(path: str, *version: object) -> list[Mapping[str, Any]]:
    try:
        table = strict_json.parse(storage.read_whole(path))
        problem = _table_problem(table)
    except ValueError as error:
        problem = f"no JSON: {error}"
    if problem:
        raise ConfigError(
            f"{path}: is no table of block sizes ({problem}); delete it, and maxstack tune "
            "makes it anew"
        )
    return table


def _table_problem(table: Any) -> str | None:
    if not isinstance(table, list):
        return "it is no list"
    problems = ((number, _row_problem(row)) for number, row in enumerate(table, 1))
    return next((f"row {number}: {problem}" for number, problem in problems if problem), None)


def _row_problem(row: Any) -> str | None:
    if not isinstance(row, dict):
        return "no mapping"
    for name in ("device", "op", "backend"):
        if not isinstance(row.get(name), str):
            return f"{name} is no text"
    for name in ("shape", "blocks"):
        if not isinstance(row.get(name), dict):
            return f"{name} is no mapping"
    for name, size in row["blocks"].items():
        if type(size) is not int or size < 1:
            return f"blocks.{name}={size!r} is no whole number of 1 or more"
    return None


def check_writable(path: str) -> None:
    """ConfigError where the file at `path` is no table, or cannot be written."""
    rows(path)
    if storage.is_url(path):
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(path).with_suffix(".unfinished")
        unfinished.touch()
        unfinished.unlink()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}; give --out FILE in a folder that can"
        ) from error


def add(path: str, new: list[dict[str, Any]]) -> None:
    """Write rows into a table, in place of those with the same keys; other rows stay, and a reader
    never sees half a file."""
    replaced = [_key(row) for row in new]
    table = [*(row for row in rows(path) if _key(row) not in replaced), *new]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in table)
    with storage.replacing(path) as unfinished:
        unfinished.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
