"""The key of a job, which proves that a process belongs to it.

A launcher gives it to all processes by a variable. Without one, process 0 draws it and shares it,
until all have met, by a file in the run's folder, which all hosts see and no other user can read.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from maxstack.errors import ConfigError

VARIABLE = "MAXSTACK_JOB_KEY"
FILE = ".job.key"
LEAST, MOST = 32, 1024
"""Characters of a key."""

current = b""
"""The key of the job that this process has joined."""


@contextlib.contextmanager
def share(folder: Path, first: bool) -> Iterator[Callable[[], bytes]]:
    """Yield a function that finds the key, while processes meet; `first`: this is process 0. The
    variable is removed from the environment, so that child processes do not get it. The function
    raises OSError where there is no key yet. ConfigError for a key that could be guessed."""
    if given := os.environ.pop(VARIABLE, "").strip():
        if not LEAST <= len(given) <= MOST:
            raise ConfigError(
                f"{VARIABLE} in the environment: has {len(given)} characters; give all processes "
                f"of the job the same {LEAST} to {MOST} random ones, as of openssl rand -hex 32"
            )
        yield given.encode
        return
    path = folder / FILE
    if not first:
        yield lambda: _read(path)
        return
    # A new one for each start: a process that was left over from the last one is a stranger.
    key = secrets.token_hex(LEAST).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, key)
    except OSError as error:
        raise ConfigError(
            f"run.output_dir: cannot write to {folder}: {error.strerror}; choose another "
            "run.output_dir"
        ) from error
    try:
        yield lambda: key
    finally:
        # All have met: it need not lie there for longer.
        path.unlink(missing_ok=True)


def _write(path: Path, key: bytes) -> None:
    new = path.with_name(f"{FILE}.{secrets.token_hex(4)}")
    # Never readable by others, not even before a chmod, and renamed once it is whole.
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
    new.replace(path)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            key = file.read(MOST)
    except OSError as error:
        raise OSError(
            f"the job's key, {path}, cannot be read: {error.strerror}; process 0 writes it, so all "
            f"hosts must see run.output_dir, or give all processes {VARIABLE}"
        ) from error
    if len(key) < LEAST:
        raise OSError(f"{path} holds no key of a job")
    return key
