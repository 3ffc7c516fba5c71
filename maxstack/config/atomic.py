"""The atomic write: a file or folder appears under its name only once all of it is there."""

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from maxstack.errors import ConfigError

UNFINISHED = ".unfinished"
"""The end of a temporary's name."""


@contextlib.contextmanager
def writing(path: Path, shared: bool = False) -> Iterator[Path]:
    """A temporary path beside `path`, for the block to write a file or folder to; renamed to `path`
    at the block's end, deleted where the block raises. What a killed writer left is deleted first.

    `shared`: other processes may write the same path at the same time, so the temporary's name is
    this call's own, and what a killed writer left stays.
    """
    own = f".{secrets.token_hex(4)}" if shared else ""
    unfinished = path.with_name(f".{path.name}{own}{UNFINISHED}")
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete(unfinished)
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        _delete(unfinished)


def check_absent(out: Path) -> None:
    """ConfigError where something lies at the path of --out; an empty folder does not count."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: is there already; choose another name, or delete it")


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
