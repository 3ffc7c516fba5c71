"""Requests to trace the next steps of a job that runs: a file in its folder, which process 0 takes,
and an answer beside it. SIGUSR1 asks for the same.

The file imports only the standard library, for the supervisor.
"""

import contextlib
import json
import secrets
import signal
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER = "profile"
"""Folder of a run's traces."""
STEPS = 3
"""Steps that a signal asks for."""

_signals = 0


def listen() -> None:
    """Let SIGUSR1 ask from now on; before, the system's default would end the process."""
    signal.signal(signal.SIGUSR1, _note)


def signalled() -> bool:
    """True where SIGUSR1 came since the last call."""
    global _signals
    before, _signals = _signals, 0
    return before > 0


def ask(run: Path, steps: int) -> str:
    """Ask for a trace of `steps` steps -> the request's name, which its answers hold. OSError where
    the run's folder cannot be written."""
    name = secrets.token_hex(8)
    _write(run / FOLDER / "request.json", {"request": name, "steps": steps})
    return name


def withdraw(run: Path, name: str) -> None:
    """Take a request back, if nobody has taken it."""
    if (_read(run / FOLDER / "request.json") or {}).get("request") == name:
        take(run)


def take(run: Path) -> dict[str, Any] | None:
    """The request that waits, which then waits no longer; None where there is none."""
    path = run / FOLDER / "request.json"
    request = _read(path)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    return request


def answer(run: Path, name: str, state: str, **more: Any) -> None:
    """Say what became of a request: `waiting` until a step, `tracing`, `done` or `refused`."""
    with contextlib.suppress(OSError):  # a full disk must not end the job
        _write(run / FOLDER / "answer.json", {"request": name, "state": state, **more})


def answered(run: Path, name: str) -> dict[str, Any]:
    """The last answer to a request; its `state` is `asked` where there is none yet."""
    found = _read(run / FOLDER / "answer.json") or {}
    return found if found.get("request") == name else {"state": "asked"}


def _write(path: Path, row: dict[str, Any]) -> None:
    from maxstack.config import atomic  # it brings pydantic, which no supervisor needs to start

    with atomic.writing(path, shared=True) as unfinished:
        unfinished.write_text(json.dumps(row))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        row = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) else None


def _note(number: int, frame: FrameType | None) -> None:
    global _signals
    _signals += 1
