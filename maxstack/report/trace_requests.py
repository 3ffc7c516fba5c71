"""Requests to trace the next steps of a job that runs: files in its folder, which process 0 takes
one after the other, and an answer beside each. SIGUSR1 asks for the same.

The file imports only the standard library, for the supervisor.
"""

import contextlib
import json
import os
import secrets
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER = "profile"
"""Folder of a run's traces."""
STEPS = 3
"""Steps that a signal asks for."""
STALE = 60.0
"""Seconds after which a request that nobody waits for any more is dropped."""

_signals = 0


def listen() -> None:
    """Let SIGUSR1 ask from now on; before, the system's default would end the process."""
    signal.signal(signal.SIGUSR1, _note)


def signalled() -> bool:
    """True where SIGUSR1 came since the last call."""
    global _signals
    before, _signals = _signals, 0
    return before > 0


def ask(run: Path, steps: int, waits: bool = False) -> str:
    """Ask for a trace of `steps` steps -> the request's name. With `waits` somebody waits for
    answers, and calls `hold` meanwhile. OSError where the run's folder cannot be written."""
    name = secrets.token_hex(8)
    _write(_request(run, name), {"request": name if waits else "", "steps": steps})
    return name


def hold(run: Path, name: str) -> None:
    """Say that somebody still waits for a request."""
    with contextlib.suppress(OSError):  # it was taken
        os.utime(_request(run, name))


def withdraw(run: Path, name: str) -> None:
    """Take a request back, and its answer."""
    for path in (_request(run, name), _answer(run, name)):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def take(run: Path) -> dict[str, Any] | None:
    """The oldest request, which then waits no longer; None where there is none. Those whose asker
    is gone are dropped."""
    for path in sorted((run / FOLDER).glob("request-*.json"), key=_time):
        request, age = _read(path), time.time() - _time(path)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if request and not (request.get("request") and age > STALE):
            return request
    return None


def answer(run: Path, name: str, state: str, **more: Any) -> None:
    """Say what became of a request: `waiting` until a step, `tracing`, `done` or `refused`."""
    with contextlib.suppress(OSError):  # a full disk must not end the job
        _write(_answer(run, name), {"state": state, **more})


def answered(run: Path, name: str) -> dict[str, Any]:
    """The last answer to a request; its `state` is `asked` where there is none yet."""
    return _read(_answer(run, name)) or {"state": "asked"}


def _request(run: Path, name: str) -> Path:
    return run / FOLDER / f"request-{name}.json"


def _answer(run: Path, name: str) -> Path:
    return run / FOLDER / f"answer-{name}.json"


def _time(path: Path) -> float:
    """When a file was last written or touched; 0 where it is gone."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _write(path: Path, row: dict[str, Any]) -> None:
    from maxstack.config import atomic  # it brings pydantic, which no supervisor needs to start

    with atomic.writing(path, shared=True) as unfinished:
        unfinished.write_text(json.dumps(row))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        row = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _note(number: int, frame: FrameType | None) -> None:
    global _signals
    _signals += 1
