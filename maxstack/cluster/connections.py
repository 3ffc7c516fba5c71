"""Connections between the processes of a job, of which both sides prove that they know its key.

The listener sends random bytes, the caller its own with an HMAC-SHA256 (RFC 2104) of both, and the
listener one of both in turn. Each names its side and what the connection is for, so that none
serves twice. Before that nothing is told and nothing is believed. What follows is neither encrypted
nor signed: the network between the hosts is trusted to deliver what was sent.
"""

import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

SIZE = 32
"""Bytes of a nonce, and of an HMAC."""
PROVING = 5.0
"""Seconds that the other side has in all to prove itself."""
STRANGERS = 256
"""Connections that may be proving themselves; the oldest gives way."""
LONGEST = 1 << 20
"""Bytes of a line."""


def connect(address: Any, key: bytes, purpose: str, seconds: float = PROVING) -> socket.socket:
    """A connection to a listener of the job. OSError where none is there, or it does not know the
    key."""
    connection = socket.create_connection(address, seconds)
    try:
        deadline = time.monotonic() + PROVING
        nonces = _receive(connection, SIZE, deadline) + secrets.token_bytes(SIZE)
        connection.sendall(nonces[SIZE:] + _proof(key, f"caller {purpose}", nonces))
        expected = _proof(key, f"listener {purpose}", nonces)
        if not hmac.compare_digest(_receive(connection, SIZE, deadline), expected):
            raise ConnectionError("what answers does not know the job's key")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


class Door:
    """Admits callers of `listener` that know the key: `admitted` gets each connection, in a thread
    of its own. All others are closed and counted; `say` is told of the first, and how many there
    were at the end. A context manager, which closes the listener."""

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        purpose: str,
        admitted: Callable[[socket.socket], None],
        say: Callable[[str], None],
    ):
        self._listener, self._key, self._purpose = listener, key, purpose
        self._admitted, self._say = admitted, say
        self._lock, self._proving = threading.Lock(), list[socket.socket]()
        self._open, self.strangers = True, 0
        listener.settimeout(1.0)
        self._thread = threading.Thread(target=self._accept, name=purpose, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        except OSError:  # not on every system; its time-out does
            pass
        self._thread.join()
        self._listener.close()
        with self._lock:
            strangers = self.strangers + len(self._proving)
            for connection in self._proving:
                _hang_up(connection)
        if strangers > 1:
            self._say(f"{strangers} connections without the job's key were closed")

    def _accept(self) -> None:
        while self._open:
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # it was closed, or there are no more descriptors
                if self._open:
                    time.sleep(0.1)
                continue
            with self._lock:
                self._proving.append(connection)
                if len(self._proving) > STRANGERS:
                    _hang_up(self._proving.pop(0))
            arguments = connection, address[0]
            threading.Thread(target=self._admit, args=arguments, daemon=True).start()

    def _admit(self, connection: socket.socket, host: str) -> None:
        try:
            proven = self._proves(connection)
        except OSError:
            proven = False
        with self._lock:
            if connection in self._proving:
                self._proving.remove(connection)
            self.strangers += not proven
            told = not proven and self.strangers == 1
        if told:
            self._say(
                f"closed a connection from {host} without the job's key ({self._purpose}); others "
                "are counted"
            )
        if not proven:
            return connection.close()
        connection.settimeout(None)
        self._admitted(connection)

    def _proves(self, connection: socket.socket) -> bool:
        deadline, nonce = time.monotonic() + PROVING, secrets.token_bytes(SIZE)
        connection.settimeout(PROVING)
        connection.sendall(nonce)
        given = _receive(connection, 2 * SIZE, deadline)
        nonces = nonce + given[:SIZE]
        if not hmac.compare_digest(
            given[SIZE:], _proof(self._key, f"caller {self._purpose}", nonces)
        ):
            return False
        connection.sendall(_proof(self._key, f"listener {self._purpose}", nonces))
        return True


class Line:
    """A connection that carries JSON objects, one in a line. A context manager, which closes it."""

    def __init__(self, connection: socket.socket):
        self._connection, self._rest = connection, bytearray()

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, word: dict[str, Any], seconds: float = PROVING) -> None:
        """Send an object. OSError where the other side is gone, or does not read."""
        self._connection.settimeout(seconds)
        self._connection.sendall(json.dumps(word).encode() + b"\n")

    def read(self, seconds: float) -> dict[str, Any]:
        """The next object, which must have come whole in `seconds`. OSError where it has not;
        ValueError for what is none, or is longer than LONGEST."""
        deadline = time.monotonic() + seconds
        while (end := self._rest.find(b"\n")) < 0:
            if len(self._rest) > LONGEST:
                raise ValueError(f"a line is longer than {LONGEST} bytes")
            self._rest += _some(self._connection, 1 << 16, deadline)
        line, self._rest = self._rest[:end], self._rest[end + 1 :]
        try:
            word = json.loads(line)
        except RecursionError:
            raise ValueError("a line is nested too deeply") from None
        if not isinstance(word, dict):
            raise ValueError("a line is no object")
        return word

    @property
    def ended(self) -> bool:
        """True where the other side has closed it, or sends what it was not asked for."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(0))


def _proof(key: bytes, side: str, nonces: bytes) -> bytes:
    return hmac.digest(key, side.encode() + b"\0" + nonces, "sha256")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        data += _some(connection, size - len(data), deadline)
    return data


def _some(connection: socket.socket, most: int, deadline: float) -> bytes:
    """What has come, `most` bytes of it. OSError after `deadline`, however often a byte comes."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("too slow")
    connection.settimeout(left)
    if not (data := connection.recv(most)):
        raise ConnectionError("the connection was closed")
    return data


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has left already
        pass
