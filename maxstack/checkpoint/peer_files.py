"""Files from one process's disk to another's, over the hosts' network, for the copies of a disk
that may be lost.

Each process serves the files below one folder, to those alone that know a key which process 0 draws
and the coordination service passes on.
"""

import contextlib
import json
import secrets
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from maxstack.cluster.peers import Peers

BLOCK = 1 << 22
"""Bytes of a message."""


class PeerFiles:
    """A server of this process's files, and a client of the others'. Made by all processes at the
    same time."""

    def __init__(self, folder: Path, peers: Peers):
        self._folder = folder.resolve()
        self._key = bytes.fromhex(peers.exchange("peers", secrets.token_hex(32))[0])
        self._listener = Listener((peers.own_address(), 0), authkey=self._key)
        threading.Thread(target=self._serve, name="peers", daemon=True).start()
        self._addresses = [*map(tuple, peers.exchange("peers", self._listener.address))]

    def fetch(self, process: int, name: str) -> Iterator[bytes]:
        """The file `name` below another process's folder, block by block. OSError where it cannot
        be had."""
        try:
            with Client(self._addresses[process], authkey=self._key) as connection:
                connection.send_bytes(json.dumps(name).encode())
                if reason := connection.recv_bytes():
                    raise OSError(f"process {process}: {name}: {reason.decode()}")
                while block := connection.recv_bytes():
                    yield block
        except EOFError as error:
            raise OSError(f"process {process}: {name}: the connection broke") from error

    def _serve(self) -> None:
        while True:
            # A stranger without the key, or a connection that broke, ends nothing.
            with contextlib.suppress(Exception):
                connection = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            path = (self._folder / json.loads(connection.recv_bytes())).resolve()
            if not path.is_relative_to(self._folder) or not path.is_file():
                connection.send_bytes(b"no such file")
                return
            with path.open("rb") as file:
                connection.send_bytes(b"")
                while block := file.read(BLOCK):
                    connection.send_bytes(block)
                connection.send_bytes(b"")
