"""Files from one process's disk to another's, over the hosts' network: what keeps a copy of a lost
disk.

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

from maxstack.cluster.peers import Processes

BLOCK = 1 << 22
"""Bytes of a message."""


class Peers:
    """This process's files for the others, and theirs for it. Made by all processes at the same
    time."""

    def __init__(self, folder: Path, processes: Processes):
        self._folder = folder.resolve()
        self._key = bytes.fromhex(
            processes.tell("peers", secrets.token_hex(32) if processes.number == 0 else "")[0]
        )
        self._listener = Listener((processes.own_address(), 0), authkey=self._key)
        threading.Thread(target=self._serve, name="peers", daemon=True).start()
        self._addresses = [
            (str(host), int(port))
            for host, port in processes.tell("peers", [*self._listener.address])
        ]

    def fetch(self, process: int, name: str) -> Iterator[bytes]:
        """The file `name` below another process's folder, block by block. OSError where it cannot
        be had."""
        try:
            with contextlib.closing(
                Client(self._addresses[process], authkey=self._key)
            ) as connection:
                connection.send_bytes(json.dumps(name).encode())
                if reason := connection.recv_bytes():
                    raise OSError(f"process {process}: {name}: {reason.decode()}")
                while block := connection.recv_bytes():
                    yield block
        except EOFError as error:
            raise OSError(f"process {process}: {name}: the connection broke") from error

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except Exception:  # a stranger without the key, or a connection that broke
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with contextlib.closing(connection), contextlib.suppress(OSError, EOFError):
            path = (self._folder / json.loads(connection.recv_bytes())).resolve()
            if not path.is_relative_to(self._folder) or not path.is_file():
                connection.send_bytes(b"no such file")
                return
            with path.open("rb") as file:
                connection.send_bytes(b"")
                while block := file.read(BLOCK):
                    connection.send_bytes(block)
                connection.send_bytes(b"")
