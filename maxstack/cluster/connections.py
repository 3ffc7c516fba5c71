"""Connections between the processes of a job, where both sides prove that they know its key.

The listener sends a nonce. The caller answers with its own and an HMAC-SHA256 (RFC 2104) of both,
and the listener with one of both in turn. Each HMAC names its side and the purpose of the
connection, so that none can be used twice. Before that nothing is sent and nothing is believed.
What follows is neither encrypted nor signed: the network between the hosts is trusted to deliver
what was sent. The authentication of multiprocessing.connection has no deadline: one silent stranger
would hold up all that come after it.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SIZE = 32
"""Bytes of a nonce, and of an HMAC."""
PROVING = 5.0
"""Seconds that the other side has in all to prove that it knows the key."""
STRANGERS = 256
"""Unproven connections at a time; beyond them the oldest is closed."""
STALLED = 30
"""Seconds after which an unfinished message is given up."""


def connect(address: Any, key: bytes, purpose: str) -> Connection:
    """Connect to a listener of the job. OSError where none is there, or it does not know the
    key."""
    with socket.create_connection(address, PROVING) as found:
        deadline = time.monotonic() + PROVING
        # Both sides give a nonce: with one alone, the other side could replay an HMAC that it has
        # seen.
        nonces = _receive(found, SIZE, deadline) + secrets.token_bytes(SIZE)
        found.sendall(nonces[SIZE:] + _proof(key, f"caller {purpose}", nonces))
        given = _receive(found, SIZE, deadline)
        # In constant time, so that the answer's time does not tell how many bytes were right.
        if not hmac.compare_digest(given, _proof(key, f"listener {purpose}", nonces)):
            raise ConnectionError("the listener does not know the job's key")
        return _with_messages(found)


class Acceptor:
    """Accepts callers of `listener` that know the key: `admitted` gets each connection, in a thread
    of its own. All others are closed and counted; `say` gets a line about the first, and their
    number at the end. A context manager, which closes the listener."""

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        purpose: str,
        admitted: Callable[[Connection], None],
        say: Callable[[str], None],
    ):
        self._listener = listener
        self._key, self._purpose = key, purpose
        self._admitted = admitted
        self._say = say
        self._lock = threading.Lock()
        self._proving: list[socket.socket] = []
        self._open = True
        self._strangers = 0
        listener.settimeout(1.0)
        self._thread = threading.Thread(target=self._accept, name=purpose, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Acceptor":
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        _hang_up(self._listener)  # wakes the thread; where it does not, the listener's timeout does
        self._thread.join()
        self._listener.close()
        with self._lock:
            strangers = self._strangers + len(self._proving)
            for connection in self._proving:
                _hang_up(connection)
        if strangers > 1:
            self._say(f"{strangers} connections without the job's key were closed")

    def _accept(self) -> None:
        while self._open:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if self._open and not isinstance(error, TimeoutError):  # out of descriptors
                    time.sleep(0.1)
                continue
            with self._lock:
                self._proving.append(connection)
                # The oldest, since a process of the job proves itself in a moment: strangers that
                # stay silent only close each other's connections.
                if len(self._proving) > STRANGERS:
                    _hang_up(self._proving.pop(0))
            caller = connection, address[0]
            # A thread each: one silent stranger holds up nobody.
            threading.Thread(target=self._admit, args=caller, daemon=True).start()

    def _admit(self, connection: socket.socket, host: str) -> None:
        with connection:
            try:
                self._check(connection)
            except OSError:
                with self._lock:
                    self._strangers += 1
                    told = self._strangers == 1
                if told:
                    self._say(
                        f"closed a connection from {host} without the job's key ({self._purpose}); "
                        "others are counted"
                    )
                return
            finally:
                with self._lock, contextlib.suppress(ValueError):  # closed for newer ones
                    self._proving.remove(connection)
            proven = _with_messages(connection)
        self._admitted(proven)

    def _check(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + PROVING
        nonce = secrets.token_bytes(SIZE)
        connection.settimeout(PROVING)
        connection.sendall(nonce)
        given = _receive(connection, 2 * SIZE, deadline)
        nonces = nonce + given[:SIZE]
        expected = _proof(self._key, f"caller {self._purpose}", nonces)
        if not hmac.compare_digest(given[SIZE:], expected):
            raise ConnectionError
        connection.sendall(_proof(self._key, f"listener {self._purpose}", nonces))


def _proof(key: bytes, side: str, nonces: bytes) -> bytes:
    return hmac.digest(key, side.encode() + b"\0" + nonces, "sha256")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Receive so many bytes. OSError after `deadline`, even while bytes still come."""
    data = b""
    while len(data) < size:
        # Of what is left in all: a timeout for each read would let a byte now and then go on for
        # ever.
        connection.settimeout(max(deadline - time.monotonic(), 1e-6))
        if not (more := connection.recv(size - len(data))):
            raise ConnectionError("the connection was closed")
        data += more
    return data


def _with_messages(connection: socket.socket) -> Connection:
    """Make a socket a Connection, on which a message that has begun is given up after STALLED s."""
    # Blocking, since Connection reads the descriptor itself; its time limits are then the kernel's.
    connection.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALLED, 0))
    return Connection(connection.detach())


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has left already
        connection.shutdown(socket.SHUT_RDWR)
