"""Atomic writes: a file or folder appears under its name only once it is complete."""

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
    """Yield a temporary path beside `path` for the block to write a file or folder to; it is
    renamed to `path` at the end, or deleted where the block raises. Leftovers of a killed writer
    are deleted first. `shared`: other processes may write the same path at the same time, so the
    temporary name is unique, and leftovers stay."""
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
    """ConfigError where something exists at the path of --out, other than an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: is there already; choose another name, or delete it")


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
