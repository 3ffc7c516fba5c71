"""Records of the runs submitted from this machine: a JSON file for each name, for status, logs and
stop. A process that looks after a run holds a lock on its record, so a record without one is of a
run that ended."""

import contextlib
import fcntl
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from maxstack import strict_json
from maxstack.config import storage, trust
from maxstack.config.spelling import did_you_mean
from maxstack.errors import ConfigError

SUFFIX = ".json"
RUNNING = (
    "{name}: is running already on this machine; see maxstack status {name}, maxstack stop "
    "{name}, or give another --name and run.name"
)


def folder() -> Path:
    """Return the folder of the records: below XDG_STATE_HOME, ~/.local/state by default."""
    return storage.state_folder() / "submitted"


def path_of(name: str) -> Path:
    """Return the file of a record."""
    return folder() / f"{name}{SUFFIX}"


def check_free(name: str) -> None:
    """ConfigError where a run of that name is running on this machine."""
    if path_of(name).exists() and is_held(name):
        raise ConfigError(RUNNING.format(name=name))


@contextlib.contextmanager
def hold(name: str, record: dict[str, Any]) -> Iterator[Callable[..., None]]:
    """Write a record and hold its lock while this process looks after the run; ConfigError where
    another process does. Yield a function that adds fields."""
    trust.private(path_of(name).parent)  # it has commands that status, logs and stop will run
    with path_of(name).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(RUNNING.format(name=name)) from error

        def write(**more: Any) -> None:
            file.truncate(0)
            file.write(json.dumps(record | {"host": platform.node()} | more, indent=1))
            file.flush()

        write()
        yield write


def write(name: str, record: dict[str, Any]) -> None:
    """Write the record of a run on a cluster."""
    with hold(name, record):
        pass


def read(name: str) -> dict[str, Any]:
    """Read the record of a name; ConfigError where there is none."""
    try:
        return strict_json.parse_object(path_of(name).read_text(encoding="utf-8"), name)
    except ValueError as error:
        raise ConfigError(f"{path_of(name)} is not a whole record of a run; remove it") from error
    except FileNotFoundError as error:
        submitted = names()
        others = f"submitted are {', '.join(submitted)}" if submitted else "nothing was submitted"
        raise ConfigError(
            f"{name}: no such run was submitted from this machine{did_you_mean(name, submitted)}; "
            f"{others}"
        ) from error


def names() -> list[str]:
    """List all names, the newest last."""
    return [
        path.name.removesuffix(SUFFIX)
        for path in sorted(folder().glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    ]


def is_held(name: str) -> bool:
    """Return whether a process on this machine looks after the run."""
    with path_of(name).open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
