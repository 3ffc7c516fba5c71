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
                # Everything that still waits, in order: a later line must not stand before an
                # earlier one.
                _append(self._path, self._waiting, self._lines)
                self._waiting = b""
                self._failing = False
            except OSError as error:
                # Once for each outage. To stderr, because the log itself is an Appender on perhaps
                # the same disk.
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
            # The first line may be cut at its beginning; the reader of JSON skips it.
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
            lines = file.read().splitlines()
    except OSError:
        return
    yield from filter(None, map(strict_json.read, reversed(lines)))


def _append(path: Path, data: bytes, lines: bool) -> None:
    """Append all data or nothing, lines on a new line; OSError if that fails."""
    # Unbuffered: one write call, which says how many bytes it took.
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        # A process that was killed within a write leaves half a line; the next row must not be
        # glued to it.
        if lines and size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data
        if file.write(data) != len(data):
            # On a full disk a write may take a part. It is cut off, so that the whole can be
            # written later.
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
