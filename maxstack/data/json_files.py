"""JSON of files that are not trusted: those that come with a model."""

import collections
import functools
import json
import os
from pathlib import Path
from typing import Any

from maxstack.errors import DataError, quoted

LARGEST, SMALL = 64 << 20, 1 << 20


def parse(text: bytes, where: str) -> Any:
    """The value of a JSON text. DataError, which begins with `where`, for anything else, also NaN,
    a key twice in an object, and nesting too deep for Python."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            counts = collections.Counter(key for key, _ in pairs)
            raise DataError(f"{where}: key {quoted(counts.most_common(1)[0][0])} is given twice")
        return values

    def refuse(word: str) -> None:
        raise DataError(f"{where}: {word} is not JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise DataError(f"{where}: nested deeper than any model's") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error


def read_object(path: Path, largest: int = LARGEST) -> dict[str, Any]:
    """The JSON object in a file; a small file is opened again only after it has changed. DataError
    for a file that cannot be read, has more than `largest` bytes, or holds anything else."""
    try:
        state = path.stat()
        if state.st_size > largest:
            raise DataError(f"{path}: {state.st_size:,} bytes; at most {largest:,} are read")
        if state.st_size > SMALL:
            return _object(path)
        return {**_unchanged(path, os.getcwd(), state.st_ino, state.st_size, state.st_mtime_ns)}
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _object(path: Path) -> dict[str, Any]:
    value = parse(path.read_bytes(), str(path))
    if not isinstance(value, dict):
        raise DataError(f"{path}: is no JSON object")
    return value


@functools.lru_cache(maxsize=16)
def _unchanged(path: Path, *state: object) -> dict[str, Any]:
    """The object of a file in this state."""
    return _object(path)
