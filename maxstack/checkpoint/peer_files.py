"""Copies of files from one process's disk to another's, over the hosts' network.

Each process serves the files below one folder, only to processes that know the job's key.
"""

import contextlib
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from maxstack.cluster.connections import Acceptor, connect
from maxstack.cluster.environment import say
from maxstack.cluster.peers import Peers

BLOCK = 1 << 22
"""Bytes of a message."""
LONGEST = 1 << 16
"""Bytes of a name."""
PURPOSE = "files of the other processes"


class PeerFiles:
    """A server of this process's files and a client of the others'. All processes make it at the
    same time."""

    def __init__(self, folder: Path, peers: Peers):
        # Resolved, since a name is held to it after its own links are followed.
        self._folder = folder.resolve()
        self._key = peers.key
        listener = socket.create_server((peers.own_address(), 0), backlog=peers.count)
        address = listener.getsockname()
        self._acceptor = Acceptor(listener, self._key, PURPOSE, self._answer, say)
        self._addresses = [*map(tuple, peers.exchange("peers", address))]

    def fetch(self, process: int, name: str) -> Iterator[bytes]:
        """Fetch the file `name` below another process's folder, block by block. OSError where that
        fails."""
        try:
            with connect(self._addresses[process], self._key, PURPOSE) as connection:
                connection.send_bytes(name.encode())
                # An empty message stands for success, and one after the last block for the end.
                if reason := connection.recv_bytes(BLOCK):
                    raise OSError(f"process {process}: {name}: {reason.decode()}")
                while block := connection.recv_bytes(BLOCK):
                    yield block
        except EOFError as error:
            raise OSError(f"process {process}: {name}: the connection broke") from error

    def _answer(self, connection: Connection) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            path = (self._folder / connection.recv_bytes(LONGEST).decode()).resolve()
            # A peer that knows the key may still not read other files of this host.
            if not path.is_relative_to(self._folder) or not path.is_file():
                connection.send_bytes(b"no such file")
                return
            with path.open("rb") as file:
                connection.send_bytes(b"")
                while block := file.read(BLOCK):
                    connection.send_bytes(block)
                connection.send_bytes(b"")
