"""Records the time of a process by cause in goodput.jsonl, whose rows goodput.py adds up.

The training loop's thread charges elapsed time to the innermost cause of a stack, or adds finished
steps to the current row. A row ends at a refused step, a gap in the steps, a restart, or when the
writing thread asks. An Account reads the same rows at once, for the goodput so far."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from maxstack.report.append import Appender
from maxstack.report.goodput import FILE, SPENT, Account, Goodput


class Ledger:
    """A stopwatch over causes, and sums of steps. Processes other than the first write nothing.

    A thread writes rows, so that no step and no save waits for a disk: once a second at first, and
    less often as the process ages (each 1 % of its age, but at least every 30 s). The rows are also
    signs of life, for example during a long compilation."""

    def __init__(
        self,
        folder: Path,
        first: bool,
        started: float | None = None,
        every: float = 1.0,
        doing: Callable[..., None] | None = None,
    ):
        """Start with the cause start-up. `started`: time.monotonic() at the process's start, by
        default now. `every`: seconds between rows at first. `doing`: called like
        heartbeat.Heartbeat.doing with each cause that begins and each finished step."""
        self._path = folder / FILE
        self._every = every
        self._doing = doing or (lambda *_: None)
        self._account = Account()
        self._rows = ""
        self._file = Appender(folder / FILE)
        # Held for sums only, never while a disk is written to.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        # A stack: an evaluation that waits for a compilation charges the compilation, and goes on
        # as evaluation.
        self._stack = ["start-up"]
        self._spent: dict[str, float] = {}
        self._steps: dict[str, Any] = {}
        self._share: float | None = None
        self._thread: threading.Thread | None = None
        now = time.monotonic()
        boot = _boot()
        if first and self._path.exists():
            try:
                self._account.read_file(self._path)
            except OSError as error:
                print(
                    f"{self._path}: {error.strerror}; earlier time is not counted",
                    file=sys.stderr,
                )
        self._began = now if started is None else started
        # A start before the last sign of life of the process before would count that time twice.
        if self._began < (seen := self._account.seen_on(boot)) <= now:
            self._began = seen
        self._mark = self._began
        # One look at the calendar: later changes of the clock do not stretch a process's time.
        self._clock = time.time() - now
        if first:
            self._thread = threading.Thread(target=self._keep_writing, daemon=True, name="ledger")
            self._note(
                {
                    "event": "begin",
                    "time": self._clock + self._began,
                    "boot": boot,
                    "monotonic": self._began,
                }
            )
            self._write_rows()
            self._thread.start()

    @contextlib.contextmanager
    def spent(self, cause: str) -> Iterator[None]:
        """Charge the time inside to `cause`; of nested causes, to the innermost."""
        assert cause in SPENT, cause
        with self._lock:
            self._charge()
            self._stack.append(cause)
        self._doing(cause)
        try:
            yield
        finally:
            with self._lock:
                self._charge()
                self._stack.pop()
            self._doing(self._stack[-1] if self._stack else "steps")

    def resume(self, step: int) -> None:
        """Resume from `step` after a restore or a rewind, or from 0; later steps become lost
        work."""
        with self._lock:
            self._cut("resume", step=step)

    def begin_steps(self) -> None:
        """End start-up."""
        with self._lock:
            assert self._stack == ["start-up"], self._stack
            self._charge()
            self._stack.pop()
        self._doing("first step")

    def step(self, step: int, seconds: float, waited: float, counts: bool = True) -> None:
        """Add a finished step with its seconds and those in which devices waited for its batch. A
        refused step does not count."""
        self._doing("steps", step, seconds)
        with self._lock:
            assert not self._stack, self._stack
            # A row holds steps without a gap, so that `undo` can cut it at any step.
            if self._steps and (not counts or self._steps["steps"][1] != step - 1):
                self._cut("spent")
            # Refused steps come as rows of their own, because `steps` of a row are those that
            # count.
            if not counts:
                self._steps = {"refused": 1, "refusing": seconds}
                self._cut("spent")
                return
            sums = self._steps or {"steps": [step, step], "stepping": 0.0, "waited": 0.0}
            self._steps = {
                "steps": [sums["steps"][0], step],
                "stepping": sums["stepping"] + seconds,
                # Waiting is measured on the host; it cannot exceed the step.
                "waited": sums["waited"] + min(max(waited, 0.0), seconds),
            }

    def passed_over(self, step: int) -> None:
        """Note a sign of life: a step whose batch was skipped."""
        self._doing("steps", step)

    def news(self) -> float | None:
        """Goodput over all processes of the run so far, once after each write; None in between."""
        with self._lock:
            share = self._share
            self._share = None
            return share

    def stop(self) -> None:
        """Stop writing rows, after an error has ended the run."""
        self._stop.set()

    def close(self) -> Goodput | None:
        """End the ledger, and return the goodput of the whole run; None in processes other than the
        first."""
        if self._thread is None:
            return None
        if not self._stop.is_set():
            # The thread ends first, so that `end` is the last row.
            self._stop.set()
            self._thread.join()
            with self._lock:
                self._charge()
                self._stack.clear()
                self._cut("end")
            self._write_rows()
        return self._account.goodput()

    def _keep_writing(self) -> None:
        """Write rows until the ledger ends."""
        # 1 % of the age: a kill loses little of what was counted, and the file grows slowly.
        while not self._stop.wait(
            max(self._every, min(30.0, (time.monotonic() - self._began) / 100))
        ):
            with self._lock:
                self._charge()
                self._cut("spent")
                # The account reads what is written, so what a run says of itself and what a reader
                # computes later are the same.
                self._share = self._account.goodput().share
            self._write_rows()

    def _charge(self) -> None:
        """Charge the time since the last call to the innermost cause."""
        now = time.monotonic()
        if self._stack:
            self._spent[self._stack[-1]] = self._spent.get(self._stack[-1], 0.0) + now - self._mark
        self._mark = now

    def _cut(self, event: str, **more: Any) -> None:
        self._note(
            {"event": event, "time": self._clock + time.monotonic(), "seconds": self._spent}
            | self._steps
            | more
        )
        self._spent = {}
        self._steps = {}

    def _note(self, row: dict[str, Any]) -> None:
        if self._thread:
            self._account.read(row)
            self._rows += json.dumps(row) + "\n"

    def _write_rows(self) -> None:
        with self._lock:
            data = self._rows
            self._rows = ""
        self._file.add(data)


def _boot() -> str:
    """Return the id of the machine's boot, whose processes share a monotonic clock; empty if
    unknown."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
