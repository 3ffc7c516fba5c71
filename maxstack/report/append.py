"""Appends whole lines or records to files. What a full disk refuses is reported once, kept in
memory, and written later."""

import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxstack import strict_json
from maxstack.regular_file import open_regular

TAIL = 1 << 16
"""Bytes at the end of a file that hold at least one row."""


class Appender:
    """Appends lines or binary records to a file. An unfinished line at its end is ended first."""

    def __init__(self, path: Path, *, lines: bool = True):
        self._path = path
        self._lines = lines
        self._lock = threading.Lock()
        self._waiting = b""
        self._failing = False

    def add(self, data: str | bytes) -> None:
        """Write whole lines or records after those that are still waiting. Thread-safe."""
        with self._lock:
            self._waiting += data.encode() if isinstance(data, str) else data
            try:
                _append(self._path, self._waiting, self._lines)
                self._waiting = b""
                self._failing = False
            except OSError as error:
                if not self._failing:
                    print(
                        f"{self._path}: {error.strerror}; the run continues and retries later",
                        file=sys.stderr,
                    )
                self._failing = True


def newest(path: Path, tail: int = TAIL) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the last `tail` bytes of a file, the newest first; none if it
    cannot be read. Other lines are skipped."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
            lines = file.read().splitlines()
    except OSError:
        return
    yield from filter(None, map(strict_json.read, reversed(lines)))


def _append(path: Path, data: bytes, lines: bool) -> None:
    """Append all data or nothing, lines on a new line; OSError if that fails."""
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if lines and size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data
        if file.write(data) != len(data):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
