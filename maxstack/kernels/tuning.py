"""Sizes of kernels' blocks that were measured: a JSON table by device kind, op, backend and shape
class. `maxstack tune` adds to it.

What ships stands in tuned.json beside this file; a table of one's own, `run.tuned`, goes before it.
Where neither has a row, a kernel takes its default.
"""

import contextlib
import contextvars
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxstack.config import ConfigError, atomic
from maxstack.sharding import holding

SHIPPED = Path(__file__).with_name("tuned.json")
KEYS = ("device", "op", "backend", "shape")
_own: contextvars.ContextVar[Path | None] = contextvars.ContextVar("tuned", default=None)


def use(path: str | None) -> contextlib.AbstractContextManager[None]:
    """The table of one's own for kernels that are traced inside; it need not exist."""
    return holding(_own, Path(path).expanduser() if path else None)


def blocks(
    op: str, backend: str, device: str, shape: Mapping[str, int | str]
) -> dict[str, int] | None:
    """The measured sizes of a backend's blocks for a shape class on a kind of device; None: it
    takes its default."""
    asked = dict(zip(KEYS, (device, op, backend, dict(shape)), strict=True))
    for path in (_own.get(), SHIPPED):
        for row in rows(path) if path else ():
            if all(row[name] == asked[name] for name in KEYS):
                return dict(row["blocks"])
    return None


def rows(path: Path) -> list[Mapping[str, Any]]:
    """The rows of a table, none where there is no file; ConfigError where it is no table."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read as a table of block sizes: {error.strerror}; give a "
            "file, or set run.tuned: null"
        ) from error


@functools.lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        wrong = None if isinstance(found, list) else "it is no list"
    except ValueError as error:
        found, wrong = [], f"no JSON: {error}"
    wrong = wrong or next(
        (f"row {number}: {told}" for number, row in enumerate(found, 1) if (told := _wrong(row))),
        None,
    )
    if wrong:
        raise ConfigError(
            f"{path}: is no table of block sizes ({wrong}); delete it, and maxstack tune "
            "makes it anew"
        )
    return found


def _wrong(row: Any) -> str | None:
    if not isinstance(row, dict):
        return "no mapping"
    if missing := [name for name in KEYS[:3] if not isinstance(row.get(name), str)]:
        return f"{missing[0]} is no text"
    if missing := [name for name in ("shape", "blocks") if not isinstance(row.get(name), dict)]:
        return f"{missing[0]} is no mapping"
    odd = (name for name, size in row["blocks"].items() if type(size) is not int or size < 1)
    return next(
        (f"blocks.{name}={row['blocks'][name]!r} is no whole number of 1 or more" for name in odd),
        None,
    )


def claim(path: Path) -> None:
    """ConfigError where the table at `path` is none, or could not be written."""
    rows(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.touch()
        unfinished.unlink()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}; give --out FILE in a folder that can"
        ) from error


def keep(path: Path, found: list[dict[str, Any]]) -> None:
    """Put rows into a table, in place of those with the same keys; other rows stay, and a reader
    never sees half a file."""
    same = [[row[name] for name in KEYS] for row in found]
    kept = [row for row in rows(path) if [row[name] for name in KEYS] not in same]
    with atomic.writing(path) as unfinished:
        unfinished.write_text(
            "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in [*kept, *found]) + "\n]\n",
            encoding="utf-8",
        )
