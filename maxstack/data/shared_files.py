"""Files that the processes of an engine, which may be on several machines, must all see."""

import functools
import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from maxstack.config import storage
from maxstack.errors import ConfigError


@dataclass(frozen=True)
class SharedFiles:
    """Files to read, and a note in the folder to write to, as the main process sees them."""

    sizes: tuple[tuple[str, int], ...]
    """Path and size of each local file that is read."""
    note: str
    """Path of the note, whose text is of this call alone."""
    text: str


def shared_files(read: Iterable[str], note: str) -> SharedFiles:
    """Write the note and look at the files."""
    text = secrets.token_hex(8)
    with storage.replacing(note) as unfinished:
        unfinished.write_text(text)
    local = sorted({path for path in read if not storage.is_url(path)})
    return SharedFiles(tuple((path, os.path.getsize(path)) for path in local), note, text)


@functools.lru_cache(maxsize=4)
def check_shared(files: SharedFiles) -> None:
    """ConfigError where this process sees other files than the main process; looked at once."""
    for path, size in files.sizes:
        if not os.path.isfile(path) or os.path.getsize(path) != size:
            raise ConfigError(
                f"{_where()}: {path}: not there, or of another size than on the machine that "
                f"began; {_ADVICE}"
            )
    try:
        text = storage.read_whole(files.note).decode()
    except FileNotFoundError:
        text = ""
    if text != files.text:
        folder = files.note.rpartition("/")[0]
        raise ConfigError(
            f"{_where()}: {folder}: not the folder to which the machine that began writes; "
            f"{_ADVICE}"
        )


_ADVICE = (
    "sources and --out must be the same files on every node: put them in a folder that all nodes "
    "mount, or give URLs"
)


def _where() -> str:
    return f"a worker on {socket.gethostname()} in {os.getcwd()}"
