"""Measured block sizes of kernels: a JSON table by device kind, op, backend and shape class, to
which `maxstack tune` adds rows.

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

import pydantic

from maxstack import strict_json
from maxstack.config import storage
from maxstack.errors import ConfigError
from maxstack.sharding import holding

SHIPPED = Path(__file__).with_name("tuned.json")
KEYS = ("device", "op", "backend", "shape")
_own: contextvars.ContextVar[str | None] = contextvars.ContextVar("tuned", default=None)


def use(path: str | None) -> contextlib.AbstractContextManager[None]:
    """Use a user's own table for kernels that are traced inside; it need not exist."""
    return holding(_own, os.path.expanduser(path) if path else None)


class _Row(pydantic.BaseModel):
    """A measurement; further keys (microseconds, date) are for readers."""

    model_config = pydantic.ConfigDict(strict=True)
    device: str
    op: str
    backend: str
    shape: dict[str, int | str]
    blocks: dict[str, pydantic.PositiveInt]


_TABLE = pydantic.TypeAdapter(list[_Row])


def blocks(
    op: str, backend: str, device: str, shape: Mapping[str, int | str]
) -> dict[str, int] | None:
    """The measured block sizes of a backend for a shape class on a kind of device; None where the
    tables have no row."""
    key = [device, op, backend, dict(shape)]
    # A user's own table comes first.
    for path in (_own.get(), SHIPPED):
        for row in rows(path) if path else ():
            if _key(row) == key:
                return dict(row["blocks"])
    return None


def rows(path: str | Path) -> list[Mapping[str, Any]]:
    """Read the rows of a table at a path or URL; none where there is no file. ConfigError for
    anything but a table."""
    try:
        # The stamp is part of the cache's key, so a table that `tune` rewrote is read again.
        return _read(str(path), *storage.stamp(str(path)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the table of block sizes: {error.strerror}; give a file, or set "
            "run.tuned: null"
        ) from error


def _key(row: Mapping[str, Any]) -> list[Any]:
    return [row[name] for name in KEYS]


@functools.lru_cache(maxsize=4)
def _read(path: str, *version: object) -> list[Mapping[str, Any]]:
    try:
        table = strict_json.parse(storage.read_whole(path))
        _TABLE.validate_python(table)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        problem = f"{place}: {first['msg']}" if place else first["msg"]
    except ValueError as error:
        problem = f"not JSON: {error}"
    else:
        return table
    raise ConfigError(
        f"{path}: not a table of block sizes ({problem}); delete it, and run maxstack tune to "
        "measure again"
    )


def check_writable(path: str) -> None:
    """Raise ConfigError if the file at `path` is not a table or cannot be written."""
    rows(path)
    if storage.is_url(path):
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(path).with_suffix(".unfinished")
        # Tried before anything is measured.
        unfinished.touch()
        unfinished.unlink()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot write: {error.strerror}; give --out FILE in a writable folder"
        ) from error


def add(path: str, new: list[dict[str, Any]]) -> None:
    """Write rows into a table, replacing those with the same keys; a reader never sees half a
    file."""
    replaced = [_key(row) for row in new]
    table = [*(row for row in rows(path) if _key(row) not in replaced), *new]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in table)
    with storage.replacing(path) as unfinished:
        unfinished.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
