"""The connections of a server: how many there may be, of whom, and how long the server waits for a
client.

A connection waits for its client before and within the head of a request (the handshake of TLS
too), within a body, between two requests, and where an answer is not read. Each wait has a time
limit that no trickle of bytes extends. Where the limit of connections is reached, the address with
most of them loses the one that waits longest, so whoever opens many pushes out their own.
"""

import asyncio
import collections
import contextlib
import errno
import os
import socket
import ssl
import time
from typing import Any

from maxstack.errors import ConfigError
from maxstack.hardware.descriptors import allow_files

HEAD = "head"
BODY = "body"
ANSWER = "answer"
IDLE = "idle"
READING = "reading"
SECONDS = {HEAD: 10.0, IDLE: 75.0, READING: 30.0}
"""How long a client may keep the server waiting; admission.py has the time of bodies."""
PROGRESS = 32 << 10
"""Bytes of an answer that a client must read in its time."""
CROWD = "crowd"
"""Closed to make room for another connection."""
REFUSED = "refused"
"""Closed because none could make room."""
INVALID = "invalid"
"""Closed because it sent no HTTP request."""
RESERVE = 128
"""Descriptors that are kept for the server's own files."""
ENDING = 16
"""Connections that may be closing while others are accepted."""
BUFFER = 256 << 10
"""Bytes that the system keeps for a client that does not read; Linux takes twice that."""
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: text/plain\r\nContent-Length: 21\r\n\r\ntoo many connections\n"
)


class Connection(socket.socket):
    """The connection of a client; its listener counts it until it is closed."""

    def begin(self, listener: "Listener", address: str) -> None:
        """Count the connection and wait for the head of a request."""
        self.listener = listener
        self.address = address
        # Kept, because a closed socket has none any more.
        self.number = self.fileno()
        self.transport: asyncio.Transport | None = None
        self.state = ""
        self.since = 0.0
        """When it entered its state."""
        self.left = 0
        """Bytes of an answer that the client had not read then."""
        self._timer: asyncio.TimerHandle | None = None
        listener.open.add(self)
        listener.known[self.number] = self
        self.enter(HEAD)

    def enter(self, state: str) -> None:
        """Record what the connection waits for; entering the same state again adds no time."""
        # Entering a state again must not start its time anew, or a byte a second would hold it for
        # ever.
        if state == self.state or self not in self.listener.open:
            return
        self.state = state
        self.since = time.monotonic()
        self.left = self.transport.get_write_buffer_size() if self.transport else 0
        self._arm()

    def end(self, reason: str) -> None:
        """Abort the connection, whatever is under way."""
        if self in self.listener.open:
            self.listener.closed[reason] += 1
            self._leave()
            if self.transport:
                self.transport.abort()
            else:
                # In the handshake of TLS or before it: the transport will read the end.
                with contextlib.suppress(OSError):
                    self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        if self in self.listener.open:
            self._leave()
        self.listener.known.pop(self.number, None)
        super().close()

    def _leave(self) -> None:
        self.listener.open.discard(self)
        if self._timer:
            self._timer.cancel()

    def _arm(self) -> None:
        if self._timer:
            self._timer.cancel()
        if seconds := SECONDS.get(self.state):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self.state == READING and self.transport:
            # A slow client that reads 32 KiB in its time may go on.
            before, self.left = self.left, self.transport.get_write_buffer_size()
            if before - self.left >= PROGRESS:
                return self._arm()
        self.end(self.state)


class Listener(socket.socket):
    """The listening socket of a server, which limits the connections that it accepts."""

    def limit(self, most: int, each: int) -> None:
        """Accept `most` connections, `each` of one address, and raise the process's limit of open
        files for them where allowed. ConfigError where that leaves no connections."""
        # Descriptors of clients must run out before those that the server needs for itself.
        files = allow_files(most + RESERVE)
        if (most := min(most, files - RESERVE)) < 1:
            raise ConfigError(
                f"this process may open {files} files, and a server needs {RESERVE} beside those "
                "of its clients; raise that limit (ulimit -n)"
            )
        self.most = most
        self.each = min(each, most)
        self.known: dict[int, Connection] = {}
        """All connections by descriptor; `open` are those that are not closing."""
        self.open: set[Connection] = set()
        self.closed: collections.Counter[str] = collections.Counter()
        # By closing this one, `_drop` can accept and refuse a connection when descriptors run out.
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self.tls: ssl.SSLContext | None = None
        # The system's own buffers took 4 MB of an answer that nobody read, so the server could not
        # see it.
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. The event loop calls this until BlockingIOError."""
        # Closing sockets still hold descriptors. Let them end before more are accepted.
        if len(self.known) - len(self.open) >= ENDING:
            raise BlockingIOError
        try:
            found, address = super().accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._drop()
            raise
        # uvicorn's limit_concurrency counts accepted connections alone: descriptors run out before.
        if not self._make_room(address[0]):
            self.closed[REFUSED] += 1
            with found, contextlib.suppress(OSError):
                if not self.tls:
                    found.send(BUSY)
            raise ConnectionAbortedError
        connection = Connection(fileno=found.detach())
        connection.begin(self, address[0])
        return connection, address

    def of(self, transport: asyncio.Transport) -> Connection:
        """Return the connection of a transport."""
        connection = self.known[transport.get_extra_info("socket").fileno()]
        connection.transport = transport
        # It was pushed out during the handshake.
        if connection not in self.open:
            transport.abort()
        return connection

    def end_all(self) -> None:
        """Abort every connection, when the server ends."""
        for connection in [*self.open]:
            connection.end("server")

    def text(self) -> str:
        """Return metrics for Prometheus."""
        lines = [
            "# TYPE maxstack_connections_open gauge",
            f"maxstack_connections_open {len(self.open)}",
            "# TYPE maxstack_connections_closed counter",
        ]
        for reason in (*SECONDS, CROWD, REFUSED, INVALID):
            labels = f'reason="{reason}"'
            lines.append(f"maxstack_connections_closed_total{{{labels}}} {self.closed[reason]}")
        return "\n".join(lines) + "\n"

    def _make_room(self, address: str) -> bool:
        """Return True where one more connection may be open, if need be in place of another."""
        crowd = collections.Counter(each.address for each in self.open)
        own = crowd[address] >= self.each
        if not own and len(self.open) < self.most:
            return True
        waiting = [
            each
            for each in self.open
            if each.state != ANSWER and (not own or each.address == address)
        ]
        if not waiting:
            return False
        # Of the address with most connections first: whoever opens many pushes out their own.
        max(waiting, key=lambda each: (crowd[each.address], -each.since)).end(CROWD)
        return True

    def _drop(self) -> None:
        """Refuse the next connection with the descriptor that is kept for this. Otherwise it would
        stay in the backlog, and the event loop would spin on it."""
        # asyncio's own pause here leaves the server without any client for a second, with a
        # traceback each time.
        os.close(self._spare)
        with contextlib.suppress(OSError):
            super().accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY)
        raise ConnectionAbortedError


def text_of(app: Any) -> str:
    """Return metrics of the connections of an application that is served."""
    listener = getattr(app.state, "listener", None)
    return listener.text() if listener else ""
