"""Output to streams whose reader may be gone."""

import contextlib
import os
import sys
from typing import Any, TextIO


def tell(text: str) -> None:
    """Write to stderr from a signal handler; errors are ignored."""
    # os.write and not print: a handler may interrupt a print that holds the stream's lock.
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), text.encode())


class Lasting:
    """A stream that ignores a broken pipe; the text is in log.txt."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """See TextIO."""
        with contextlib.suppress(BrokenPipeError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """See TextIO."""
        with contextlib.suppress(BrokenPipeError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
