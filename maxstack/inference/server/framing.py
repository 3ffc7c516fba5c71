"""Requests as h11 reads them, of bounded heads and chunks, and a few parts in a turn."""

import re

import h11
from h11._receivebuffer import ReceiveBuffer  # private: see the versions in pyproject.toml

HEAD_BYTES = 16 << 10
HEAD_LINES = 101
"""What the head of a request may have, its first line and 100 fields; the trailer of one too."""
CHUNKS = 1000
CHUNK_BYTES = 512
"""A body may have so many chunks of any size, and more where they are so large on average."""
TURN = 32
"""Parts of a request, as chunks, that are read before the event loop has its turn."""

_BLANK = re.compile(rb"\n\r?\n")


class Requests(h11.Connection):
    """h11's connection of a server, which says that it needs data after `turn` parts."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)
        self._receive_buffer = _Received()
        self.turn = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next part. h11.RemoteProtocolError for what is no request or has too many parts."""
        if not self.turn:
            return h11.NEED_DATA
        self.turn -= 1
        try:
            return super().next_event()
        except ValueError as error:  # a length of more digits than Python reads
            raise h11.RemoteProtocolError(str(error)) from error


class _Received(ReceiveBuffer):
    """What has come and is not read: lines and chunks are counted before h11 parses them."""

    chunks = size = 0

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """The lines of a head or of a trailer."""
        found = _BLANK.search(self._data, 0, HEAD_BYTES)
        end = found.end() if found else HEAD_BYTES
        if self._data.count(b"\n", 0, end) > HEAD_LINES + 1 or not found and len(self) > end:
            why = f"a head has {HEAD_LINES - 1} fields and {HEAD_BYTES} bytes at most"
            raise h11.LocalProtocolError(why, error_status_hint=431)
        self.chunks = self.size = 0
        return super().maybe_extract_lines()

    def maybe_extract_next_line(self) -> bytearray | None:
        """The line before a chunk."""
        line = super().maybe_extract_next_line()
        self.chunks += line is not None
        if self.chunks > CHUNKS + self.size // CHUNK_BYTES:
            why = f"of more than {CHUNKS} chunks each has {CHUNK_BYTES} bytes or more on average"
            raise h11.LocalProtocolError(why, error_status_hint=413)
        return line

    def maybe_extract_at_most(self, count: int) -> bytearray | None:
        """Bytes of a body."""
        found = super().maybe_extract_at_most(count)
        self.size += len(found or b"")
        return found
