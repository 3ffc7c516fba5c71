"""Has a running job take a trace, and waits for it."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxstack.errors import ConfigError
from maxstack.report import trace_requests
from maxstack.report.append import newest
from maxstack.report.goodput import FILE
from maxstack.report.metrics import last_step
from maxstack.report.progress import progress
from maxstack.report.trace_requests import STEPS

__all__ = ["STEPS", "take"]
SILENT = 90.0
"""Seconds without a sign of life after which a job counts as dead; it gives one every 30 s."""
PAUSE = 0.2


def take(run: Path, steps: int) -> int:
    """Have a running job trace its next steps; return the first. ConfigError if no job runs, or if
    it ends or refuses."""
    _check_alive(run)
    try:
        name = trace_requests.ask(run, steps, waits=True)
    except OSError as error:
        raise ConfigError(f"{run}: cannot be written to: {error.strerror}") from error
    try:
        return _wait(run, name, steps)
    # However the waiting ends, no request stays behind for a job that runs later.
    finally:
        trace_requests.withdraw(run, name)


def _wait(run: Path, name: str, steps: int) -> int:
    seen = time.monotonic()
    told = ""
    stamp = _stamp(run)
    with progress(steps, "trace", "steps") as bar:
        while True:
            # The job drops a request that nobody holds, so a requester that was killed leaves none.
            trace_requests.hold(run, name)
            answer = trace_requests.answered(run, name)
            state = answer["state"]
            if state == "done":
                bar.update(steps - bar.n)
                return int(answer["first"])
            if state == "refused":
                raise ConfigError(f"{run}: the job took no trace: {answer['why']}")
            if state != told:
                told = state
                bar.set_description_str(_words(answer))
            if state == "tracing":
                bar.update(max(0, min(steps, last_step(run) - answer["first"] + 1) - bar.n))
            # By change and the monotonic clock: the file may lie on a host with another clock.
            if (now_stamp := _stamp(run)) != stamp:
                seen, stamp = time.monotonic(), now_stamp
            if time.monotonic() - seen > SILENT:
                raise ConfigError(f"{run}: the job gives no more signs of life ({FILE})")
            if next(newest(run / FILE), {}).get("event") == "end":
                time.sleep(2 * PAUSE)  # its last answer may have just arrived
                if trace_requests.answered(run, name)["state"] != "done":
                    raise ConfigError(f"{run}: the job ended before the trace was taken")
            time.sleep(PAUSE)


def _words(answer: Mapping[str, Any]) -> str:
    """Describe the state of a request."""
    if answer["state"] == "waiting":
        return f"trace from step {answer['first']} on"
    if answer["state"] == "tracing":
        return f"steps {answer['first']} to {answer['last']}"
    return "asked"


def _check_alive(run: Path) -> None:
    row = next(newest(run / FILE), None)
    silent = time.time() - _stamp(run) * 1e-9
    if row is None or row.get("event") == "end" or silent > SILENT:
        ago = f"; its last sign of life is {silent:,.0f} s old" if row else ""
        raise ConfigError(
            f"{run}: no job is training this run{ago}; start it, or leave out --live to read an "
            "existing trace"
        )


def _stamp(run: Path) -> int:
    with contextlib.suppress(OSError):
        return (run / FILE).stat().st_mtime_ns
    return 0
