"""Requests to trace the next steps of a running job: files in its folder, which process 0 takes one
after the other, with an answer beside each. SIGUSR1 makes the same request.

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
"""Steps that a signal requests."""
STALE = 60.0
"""Seconds after which a request whose requester is gone is dropped."""

_signals = 0


def listen() -> None:
    """Handle SIGUSR1 from now on; its default action ends the process."""
    signal.signal(signal.SIGUSR1, _note)


def signalled() -> bool:
    """Return True if SIGUSR1 has arrived since the last call."""
    global _signals
    before = _signals
    _signals = 0
    return before > 0


def ask(run: Path, steps: int, waits: bool = False) -> str:
    """Request a trace of `steps` steps; return the request's name. `waits`: the caller waits for
    answers, and calls `hold` meanwhile. OSError if the run's folder cannot be written."""
    # A file for each request: two people who ask at once do not replace each other's.
    name = secrets.token_hex(8)
    _write(_request(run, name), {"request": name if waits else "", "steps": steps})
    return name


def hold(run: Path, name: str) -> None:
    """Signal that the requester is still waiting."""
    with contextlib.suppress(OSError):  # it was taken
        os.utime(_request(run, name))


def withdraw(run: Path, name: str) -> None:
    """Remove a request and its answer."""
    for path in (_request(run, name), _answer(run, name)):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def take(run: Path) -> dict[str, Any] | None:
    """Take the oldest request; None if there is none. Requests whose requester is gone are
    dropped."""
    for path in sorted((run / FOLDER).glob("request-*.json"), key=_time):
        # Files are removed whatever they hold, so that a broken one is looked at once.
        request = _read(path)
        age = time.time() - _time(path)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if request and not (request.get("request") and age > STALE):
            return request
    return None


def answer(run: Path, name: str, state: str, **more: Any) -> None:
    """Answer a request: `waiting` for a step, `tracing`, `done` or `refused`."""
    with contextlib.suppress(OSError):  # a full disk must not end the job
        _write(_answer(run, name), {"state": state, **more})


def answered(run: Path, name: str) -> dict[str, Any]:
    """Return the last answer to a request; its `state` is `asked` if there is none yet."""
    return _read(_answer(run, name)) or {"state": "asked"}


def _request(run: Path, name: str) -> Path:
    return run / FOLDER / f"request-{name}.json"


def _answer(run: Path, name: str) -> Path:
    return run / FOLDER / f"answer-{name}.json"


def _time(path: Path) -> float:
    """Return when a file was last written or touched; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _write(path: Path, row: dict[str, Any]) -> None:
    from maxstack.config import atomic  # imports pydantic, which the supervisor does not need

    with atomic.writing(path, shared=True) as unfinished:
        unfinished.write_text(json.dumps(row))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        # Not strict_json: the supervisor imports this file and should load only the standard
        # library.
        row = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _note(number: int, frame: FrameType | None) -> None:
    # The handler only counts; the thread of the tracer does the rest, outside of the signal.
    global _signals
    _signals += 1
