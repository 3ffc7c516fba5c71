"""Files that grow by whole lines or records, on disks that may be full: what cannot be written is
reported once, kept, and written later."""

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
"""Bytes at the end of a file that hold a row."""


class Appender:
    """Appends lines to a file, or records of any bytes. An unfinished line at its end is ended
    first."""

    def __init__(self, path: Path, *, lines: bool = True):
        self._path, self._lines, self._lock = path, lines, threading.Lock()
        self._waiting, self._failing = b"", False

    def add(self, data: str | bytes) -> None:
        """Write whole lines or records, after those that still wait. Safe from any thread."""
        with self._lock:
            self._waiting += data.encode() if isinstance(data, str) else data
            try:
                _append(self._path, self._waiting, self._lines)
                self._waiting, self._failing = b"", False
            except OSError as error:
                if not self._failing:
                    print(
                        f"{self._path}: {error.strerror}; the run goes on, and writes "
                        "there when it can",
                        file=sys.stderr,
                    )
                self._failing = True


def newest(path: Path, tail: int = TAIL) -> Iterator[dict[str, Any]]:
    """The last rows of a file of JSON objects, one a line, the newest first, as far as its last
    `tail` bytes hold them; none where it cannot be read. Lines that are no objects are passed
    over."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
            lines = file.read().splitlines()
    except OSError:
        return
    yield from filter(None, map(strict_json.read, reversed(lines)))


def _append(path: Path, data: bytes, lines: bool) -> None:
    """Append all of the data or nothing, lines from a new one on; OSError where it fails."""
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if lines and size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data
        if file.write(data) != len(data):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
