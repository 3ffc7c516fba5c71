"""Errors that a user can correct, and values as their messages show them. Imports only the standard
library, so that `--help` is quick."""

import errno
import reprlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 4
_REPR.maxlevel = 3
LASTING = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
)
"""Errors of a path that only the user can correct."""


class ConfigError(ValueError):
    """A user's mistake in a configuration: one paragraph that says what, where and what to do. Exit
    code 1."""

    exit_code = 1


class DataError(ValueError):
    """Data that cannot be used: one paragraph that names the file and record and says what to do.
    Exit code 2."""

    exit_code = 2


class DataEnded(DataError):
    """All sources ended before the last step."""


class TransientError(ValueError):
    """A failure that may go away: the same command resumes. Exit code 42, RETRY of
    cluster/exit_codes.py."""

    exit_code = 42


class StoreError(DataError):
    """A store that did not answer, or an object that changed since it was listed. The record itself
    is not known to be bad, so it is not skipped as damaged."""


class StoreUnavailable(TransientError, StoreError):
    """A store that did not answer for as long as it was retried."""


def call_rust(where: str, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function of a library in Rust -> its result. DataError where it fails: by a bare
    Exception, or by a panic, which is a BaseException that no handler of errors expects."""
    try:
        return call(*args, **options)
    except BaseException as error:
        if type(error) is not Exception and type(error).__module__ != "pyo3_runtime":
            raise
        raise DataError(f"{where}: {shortened(str(error), 300)}") from error


def installing(extra: str) -> str:
    """The command that installs an extra into the running Python; from a checkout the checkout
    itself, since a registry may not have it."""
    root = Path(__file__).resolve().parents[1]
    package = f"'maxstack[{extra}]'"
    if (root / "pyproject.toml").is_file():
        package = f"-e '{_near(root)}[{extra}]'"
    python = Path(sys.executable)
    own = shutil.which("pip") == f"{python.with_name('pip')}"
    pip = "pip" if own else f"{_near(python)} -m pip"
    return f"{pip} install {package}"


def _near(path: Path) -> Path:
    """The path relative to the working folder, where it lies inside."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def quoted(value: object) -> str:
    """A value in Python's notation, with `...` for what is left out."""
    return shortened(_REPR.repr(value))


def shortened(text: str, most: int = 120) -> str:
    """A text with its middle left out beyond `most` characters, and with escapes for unprintable
    characters."""
    if len(text) > most:
        text = f"{text[: most * 2 // 3]}...{text[-(most // 3) :]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
