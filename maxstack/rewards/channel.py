"""Messages between processes: JSON, one a line, over a socket of their own."""

import json
import select
import socket
import time
from typing import Any

from maxstack import strict_json

_LONGEST = 64 * 2**20
"""Bytes of a message."""
_CHUNK = 2**16


class Channel:
    """One end of a socket. Methods raise TimeoutError after `seconds` (None: wait for ever), and
    EOFError where the other end is closed or this one cannot be used.

    multiprocessing.connection has no deadline for a message that has begun: user code that writes a
    byte now and then would keep its worker from looking at clock and memory. It pickles, too, and
    whoever unpickles runs what the sender chose.
    """

    def __init__(self, end: socket.socket):
        self._socket = end
        self._buffer = bytearray()
        self._searched = 0
        """Bytes of the buffer in which no end of a line was found."""
        end.setblocking(False)

    def send(self, message: dict[str, Any], seconds: float | None = None) -> None:
        """Send a message."""
        rest = memoryview(json.dumps(message).encode() + b"\n")
        deadline = None if seconds is None else time.monotonic() + seconds
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise EOFError from error

    def receive(self, seconds: float | None = None) -> Any:
        """Return the next message. ValueError if it is too long or not JSON."""
        deadline = None if seconds is None else time.monotonic() + seconds
        # Only what is new is searched: from the start each time it would be quadratic in the
        # message.
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            # Before anything is parsed: user code may write without end.
            if self._searched > _LONGEST:
                raise ValueError(f"more than {_LONGEST} bytes")
            try:
                chunk = self._socket.recv(_CHUNK)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise EOFError from error
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return strict_json.parse(line, strict=False)

    def has_input(self) -> bool:
        """True where there is something to receive, or the other end is closed."""
        return bool(self._buffer or select.select([self._socket], [], [], 0)[0])

    def is_closed(self) -> bool:
        """True where the other end is closed."""
        return bool(self._poll(0, 0))

    def hang_up(self) -> None:
        """End both directions for every process that holds this end, and wake those that wait."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # ended already
            return

    def close(self) -> None:
        """Close this process's hold of the socket."""
        self._socket.close()

    def _wait(self, event: int, deadline: float | None) -> None:
        left = None if deadline is None else 1000 * max(deadline - time.monotonic(), 0)
        if not self._poll(event, left):
            raise TimeoutError

    def _poll(self, event: int, milliseconds: float | None) -> list[tuple[int, int]]:
        poll = select.poll()
        poll.register(self._socket, event)
        return poll.poll(milliseconds)
