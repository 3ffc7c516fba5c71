"""Messages between processes: JSON, one in a line, over a socket of its own."""

import json
import select
import socket
import time
from typing import Any

from maxstack import strict_json

_LONGEST = 64 * 2**20
"""Bytes of a message."""
_CHUNK = 2**16


class Lines:
    """One end of a socket. A method raises TimeoutError where `seconds` (None: any number) have
    passed, and EOFError where the other end is closed or this one cannot be used."""

    def __init__(self, end: socket.socket):
        self._socket = end
        self._buffer, self._searched = bytearray(), 0
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
        """The next message. ValueError if it is too long or not JSON."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
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

    def waiting(self) -> bool:
        """True where there is something to be received, or the other end is closed."""
        return bool(self._buffer or select.select([self._socket], [], [], 0)[0])

    def hung_up(self) -> bool:
        """True where the other end is closed."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return bool(poll.poll(0))

    def hang_up(self) -> None:
        """End both directions for every process that holds this end, and wake who waits for it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # ended already
            return

    def close(self) -> None:
        """Give up this process's hold of the socket."""
        self._socket.close()

    def _wait(self, event: int, deadline: float | None) -> None:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(None if left is None else left * 1000):
            raise TimeoutError
