"""HTTP of a connection: uvicorn's protocol over h11, with bounds on heads and chunks, and a few
parts of a request in a turn of the event loop.

uvicorn parses all of a read of 256 KiB in one go, so a client that sent one-byte chunks held the
event loop for as long as it sent: a good client waited 4.5 s beside one such connection and 17.5 s
beside eight, now 0.01 and 0.03 s. Heads and trailers are counted before h11 parses them. What a
connection waits for is told to connections.py, which ends it in time.
"""

import asyncio
import re
import sys
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer  # private: see the versions in pyproject.toml
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from maxstack.inference.server.connections import (
    ANSWER,
    BODY,
    HEAD,
    IDLE,
    INVALID,
    READING,
    Listener,
)

HEAD_BYTES = 16 << 10
HEAD_LINES = 101
"""Limits of the head of a request, its first line and 100 fields, and of its trailer."""
CHUNKS = 1000
CHUNK_BYTES = 512
"""A body may have `CHUNKS` chunks of any size, more if they average `CHUNK_BYTES`."""
TURN = 32
"""Parts of a request, such as chunks, that are read before other connections have a turn."""

_BLANK = re.compile(rb"\n\r?\n")


class Requests(h11.Connection):
    """h11's connection of a server, which asks for more data after `turn` parts."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)
        self._receive_buffer = _Received()
        self.turn = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next part. h11.RemoteProtocolError for an invalid one or too many parts."""
        # The turn is over: as if no more data were there, until `_continue`.
        if not self.turn:
            return h11.NEED_DATA
        self.turn -= 1
        try:
            return super().next_event()
        except ValueError as error:
            # A Content-Length of more digits than Python reads.
            raise h11.RemoteProtocolError(str(error)) from error


class _Received(ReceiveBuffer):
    """Received bytes; lines and chunks are counted before h11 parses them."""

    chunks = size = 0

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of a head or of a trailer."""
        # No head may be longer, so look no further.
        found = _BLANK.search(self._data, 0, HEAD_BYTES)
        end = found.end() if found else HEAD_BYTES
        if self._data.count(b"\n", 0, end) > HEAD_LINES + 1 or not found and len(self) > end:
            why = f"a head has {HEAD_LINES - 1} fields and {HEAD_BYTES} bytes at most"
            raise h11.LocalProtocolError(why, error_status_hint=431)
        self.chunks = self.size = 0
        return super().maybe_extract_lines()

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the line before a chunk."""
        line = super().maybe_extract_next_line()
        self.chunks += line is not None
        # Small chunks cost time for each, not for their bytes.
        if self.chunks > CHUNKS + self.size // CHUNK_BYTES:
            why = f"of more than {CHUNKS} chunks each has {CHUNK_BYTES} bytes or more on average"
            raise h11.LocalProtocolError(why, error_status_hint=413)
        return line

    def maybe_extract_at_most(self, count: int) -> bytearray | None:
        """Return bytes of a body."""
        found = super().maybe_extract_at_most(count)
        self.size += len(found or b"")
        return found


class Protocol(H11Protocol):
    """uvicorn's protocol, which tells its connection what it waits for, and gives other connections
    a turn while a client sends many small parts."""

    def __init__(self, listener: Listener, **given: Any):
        super().__init__(**given)
        self.conn: Requests = Requests()
        self._listener, self._more = listener, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connection = self._listener.of(transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._settle()

    def handle_events(self) -> None:
        if self.transport.is_closing():
            return
        self.conn.turn = TURN
        super().handle_events()
        if not self.conn.turn:
            # Pause the transport behind uvicorn's back: with its own flag set, the end of a request
            # would resume reading.
            self.flow.read_paused = False
            self.transport.pause_reading()
            if not self._more:
                self._more = True
                self.loop.call_soon(self._continue)

    def _continue(self) -> None:
        self._more = False
        self.transport.resume_reading()
        # uvicorn paused reading for a full body; resuming above has undone it.
        if self.cycle and len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.handle_events()
        self._settle()

    def send_400_response(self, msg: str) -> None:
        """Answer the error that h11 has just raised, if no answer has begun, and close."""
        error = sys.exc_info()[1]
        assert isinstance(error, h11.RemoteProtocolError)
        self._listener.closed[INVALID] += 1
        # An answer is under way: its application has to learn that the client is gone.
        if self.cycle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # Only where no answer has begun: a second one would be read as part of the first.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            text = f"{error}\n".encode()
            headers = [("Connection", "close"), ("Content-Type", "text/plain")]
            answer = h11.Response(status_code=error.error_status_hint, headers=headers)
            for event in (answer, h11.Data(data=text), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._settle()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._settle()

    def _settle(self) -> None:
        cycle, begun = self.cycle, self.conn.their_state is h11.SEND_BODY
        if self.flow.write_paused:
            state = READING
        elif cycle and not cycle.response_complete:
            state = BODY if cycle.more_body else ANSWER
        # Bytes of a next request make it a head that is arriving, which has less time.
        elif cycle and not begun and not self.conn.trailing_data[0]:
            state = IDLE
        else:
            state = HEAD
        self._connection.enter(state)
