"""Clients that mean no good: connections that keep a server waiting, each kind by a function."""

import contextlib
import socket
from collections.abc import Iterator

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = (
    b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)
Address = tuple[str, int]


@contextlib.contextmanager
def opened(
    at: Address, count: int, first: bytes = b"", come_from: str = "127.0.0.1"
) -> Iterator[list[socket.socket]]:
    """So many connections, each of which has sent `first` and reads nothing."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            each = socket.create_connection(at, 10, (come_from, 0))
            found.append(stack.enter_context(each))
            if first:
                with contextlib.suppress(OSError):  # it may have had to give way
                    each.sendall(first)
        yield found


def silent(at: Address, count: int = 400):
    """Connections that never send anything."""
    return opened(at, count)


def slow_heads(at: Address, count: int = 100):
    """Requests whose heads do not end; `trickle` goes on with them."""
    return opened(at, count, HEAD + b"X-Slow: ")


def slow_bodies(at: Address, path: bytes, count: int = 300):
    """Requests whose bodies do not end."""
    return opened(at, count, POST % (path, 1000) + b"{")


def idle(at: Address, count: int = 400):
    """Connections that were answered once, and are kept."""
    return opened(at, count, HEAD + b"\r\n")


def unread(at: Address, path: bytes, body: bytes, count: int = 16):
    """Requests whose answers are not read."""
    return opened(at, count, POST % (path, len(body)) + body)


def trickle(connections: list[socket.socket]) -> int:
    """A byte more on each connection; how many of them took it."""
    took = 0
    for each in connections:
        with contextlib.suppress(OSError):
            took += each.send(b"a")
    return took


def ended(connection: socket.socket, seconds: float = 10.0) -> bool:
    """True where the server has ended a connection, or does within so many seconds."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True
