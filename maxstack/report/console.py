"""What is said where nobody may be left to read it: the reader of a pipe has gone."""

import contextlib
import os
import sys
from typing import Any, TextIO


def tell(text: str) -> None:
    """Words on stderr from a handler of a signal; who reads them may be gone."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), text.encode())


class Lasting:
    """A stream whose reader may go away, which ends nobody: what is written then is lost, and
    log.txt has it."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream does."""
        with contextlib.suppress(BrokenPipeError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As the stream does."""
        with contextlib.suppress(BrokenPipeError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
