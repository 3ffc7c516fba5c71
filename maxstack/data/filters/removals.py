"""The documents that data.steps removed, read back."""

import io
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import zstandard

from maxstack import strict_json
from maxstack.config import storage
from maxstack.data.filters.passes import REMOVED
from maxstack.data.shards import read_manifest
from maxstack.errors import ConfigError, DataError


def read_removed(
    out: str, step: str | None, source: str | None, limit: int | None
) -> Iterator[Any]:
    """Yield objects with step, rule, value, source, split, document, where and text. ConfigError
    if there are none of the filter or source that is asked for."""
    folder = storage.join(out, REMOVED)
    names = storage.stamps_below(folder)
    if not names and "steps" in (read_manifest(out) or {}):
        print(f"{out}: data.steps removed nothing", file=sys.stderr)
        return
    if not names:
        raise ConfigError(
            f"{out}: holds no removed documents; `maxstack data prepare` with data.steps writes "
            f"them to {folder}"
        )
    seen: dict[str, set[str]] = {"step": set(), "source": set()}
    wanted = {"step": step, "source": source}

    def chosen() -> Iterator[Any]:
        for name in names:
            for row in _read(storage.join(folder, name)):
                # Kept while reading, so that a name that removed nothing is told with those that
                # did.
                for key, kept in seen.items():
                    kept.add(row[key])
                if all(each in (None, row[key]) for key, each in wanted.items()):
                    yield row

    found = False
    for row in itertools.islice(chosen(), limit):
        found = True
        yield row
    if not found and limit != 0:
        for key, each in wanted.items():
            if each is not None and each not in seen[key]:
                raise ConfigError(
                    f"--{key} {each}: it removed nothing; removed documents are of "
                    f"{', '.join(sorted(seen[key])) or 'none'}"
                )


def _read(path: str) -> Iterator[Any]:
    try:
        with storage.open_file(path) as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            for line in io.TextIOWrapper(reader, "utf-8", newline="\n"):
                yield strict_json.parse(line, path)
    except (OSError, ValueError, zstandard.ZstdError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
