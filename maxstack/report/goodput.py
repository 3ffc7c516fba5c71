"""Goodput of a run over all its restarts, read from goodput.jsonl, which ledger.py writes.

Goodput is the seconds of steps that count over those since the run first started. A row has an
`event` and its `time`: unix seconds by the clock at the process's start, counted by the monotonic
clock since. `begin` starts a process, with that moment by the machine's `monotonic` clock, and the
`boot` that this clock belongs to. `resume`: the run continues from `step`, and later steps are
undone. `spent` and `end` have no fields of their own. All but `begin` may hold what was spent since
the row before: `seconds` by cause; `steps` [first, last] that count, their seconds (`stepping`) and
those spent waiting for a batch (`waited`); the number of steps that did not count (`refused`) and
their seconds (`refusing`). The file imports only the standard library, for the supervisor."""

import contextlib
import dataclasses
import datetime
import math
import time
from pathlib import Path
from typing import Any

from maxstack import strict_json
from maxstack.errors import ConfigError
from maxstack.regular_file import open_regular
from maxstack.report.table import table

FILE = "goodput.jsonl"
EVENTS = ("begin", "resume", "spent", "end")
NUMBERS = ("monotonic", "step", "stepping", "waited", "refused", "refusing")
SPENT = {
    "start-up": "process start to first step, except what is listed below",
    "compile": "waiting for the compiled step",
    "restore": "reading a checkpoint",
    "save": "steps delayed by a save",
    "evaluation": "evaluating held-out documents",
    "check": "comparing replicas, and the speed of processes",
    "trace": "steps delayed by the end of a profiler trace",
}
CAUSES = {
    "useful": "steps that count",
    "data wait": "devices idle because no batch was ready",
    **SPENT,
    "lost work": "steps undone by a restart or rewind, and refused steps",
    "idle": "no process: from the last sign of life to the next start",
    "other": "unaccounted time: a hang, or a step cut short by a kill",
}
MOVED = 60.0
"""Seconds by which two clocks may differ without a remark."""
# Damaged digits may still be a number; one absurd row must not swallow the sums.
FAR = 1e11
"""Bound on seconds and steps; a line with more is damaged."""


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Seconds of a run by cause, for all of CAUSES; their sum is `wall`."""

    began: float
    seen: float
    """Unix seconds of the first start and of the last sign of life."""
    wall: float
    seconds: dict[str, float]
    restarts: int
    """Processes after the first that had steps to do."""
    steps: int
    lost_steps: int
    ended: bool
    """True if the last process closed its ledger, so it was not killed and is not running."""
    lived: float
    """Lifetime of the last process in seconds."""
    resumes: tuple[tuple[float, int, str], ...]
    """(unix seconds, step, `resume` or `rewind`) for each restart and rewind."""
    remarks: tuple[str, ...]

    @property
    def share(self) -> float:
        """Useful seconds over all seconds, 0 to 1."""
        return self.seconds["useful"] / self.wall if self.wall else 0.0

    def json(self) -> dict[str, Any]:
        """Return all fields and `goodput` as plain data."""
        return {"goodput": self.share, **dataclasses.asdict(self)}


class Account:
    """Sums over the rows read so far. A process lives from its first row to its last, or as long as
    the seconds that it reports if they are more."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._steps: list[tuple[int, int, float, float]] = []
        self.damaged = 0
        self._done = 0
        self._lost = 0
        self._processes = 0
        self._restarts = 0
        self._resumed = False
        self._ended = False
        self._resumes: list[tuple[float, int, str]] = []
        self._first = 0.0
        """Start of the first process."""
        self._begin = 0.0
        self._last = 0.0
        """Start and last row of the current process."""
        self._monotonic = 0.0
        self._boot = ""
        self._claimed = 0.0
        """Seconds that the current process has reported."""
        self._past = 0.0
        """Seconds until the current process."""
        self._moved: list[float] = []
        self._back: list[float] = []

    def read_file(self, path: Path) -> None:
        """Read all rows of a file. Damaged lines are skipped with a remark, except an unfinished
        last one."""
        with open_regular(path) as file:
            for line in strict_json.lines(file, str(path)):
                if (row := _row(line)) is not None:
                    self.read(row)
                elif line.endswith(b"\n") and line.strip():
                    self.damaged += 1

    def read(self, row: dict[str, Any]) -> None:
        """Add the next row."""
        # A file whose first line is lost still begins with a process.
        if row["event"] == "begin" or not self._processes:
            self._begin_process(row)
        self._last = max(self._last, row["time"])
        self._ended = row["event"] == "end"
        for cause, seconds in row.get("seconds", {}).items():
            self._spend(cause, seconds)
        self._spend("lost work", row.get("refusing", 0.0))
        self._lost += row.get("refused", 0)
        if "steps" in row:
            first, last = row["steps"]
            stepping = row.get("stepping", 0.0)
            waited = row.get("waited", 0.0)
            # Steps that are done again undo what stood for them, also where the row `resume` was
            # lost.
            self._undo(first - 1)
            self._steps.append((first, last, stepping, waited))
            self._done += last - first + 1
            # Waiting for a batch lies inside a step's time; it must not count twice.
            self._spend("useful", stepping - waited)
            self._spend("data wait", waited)
        if row["event"] == "resume":
            # The first process resumes nothing.
            if self._restarts:
                kind = "rewind" if self._resumed else "resume"
                self._resumes.append((row["time"], int(row.get("step", 0)), kind))
            # A process counts once it has steps to do: one that fails at its start is no restart. A
            # second `resume` in one process is a rewind.
            if not self._resumed:
                self._restarts += 1
            self._resumed = True
            self._undo(row.get("step", math.inf))

    def seen_on(self, boot: str) -> float:
        """Return the time of the last sign of life on the monotonic clock of `boot`; -inf if it
        came from another boot."""
        if not boot or boot != self._boot:
            return -math.inf
        # The last row's age by the process's own clock, put onto the machine's.
        return self._monotonic + self._last - self._begin

    def goodput(self) -> Goodput:
        """Return the sums; zero seconds if there are no rows."""
        lived = self._lived()
        # Whatever a process did not account for is `other`, so the sums always add up to `wall`.
        seconds = self._seconds | {"other": self._seconds["other"] + lived - self._claimed}
        return Goodput(
            self._first,
            self._last,
            self._past + lived,
            seconds,
            max(0, self._restarts - 1),
            self._done,
            self._lost,
            self._ended,
            lived,
            tuple(self._resumes),
            self._remarks(),
        )

    def _lived(self) -> float:
        """Return the lifetime of the current process in seconds."""
        # The last rows of a killed process may be lost, or the clock set back; what it claimed to
        # have spent it has lived.
        return max(self._last - self._begin, self._claimed)

    def _spend(self, cause: str, seconds: float) -> None:
        self._seconds[cause] += seconds
        self._claimed += seconds

    def _begin_process(self, row: dict[str, Any]) -> None:
        if self._processes:
            lived = self._lived()
            gap = self._gap(row)
            self._seconds["other"] += lived - self._claimed
            self._seconds["idle"] += gap
            self._past += lived + gap
        else:
            self._first = row["time"]
        self._processes += 1
        self._resumed = False
        self._begin = self._last = row["time"]
        self._boot = row.get("boot", "")
        self._monotonic = row.get("monotonic", 0.0)
        self._claimed = 0.0

    def _gap(self, row: dict[str, Any]) -> float:
        """Return the seconds without a process before that of `row`, 0 or more: by the monotonic
        clock if both ran on one machine, otherwise by the calendar."""
        by_calendar = row["time"] - self._last
        by_machine = row.get("monotonic", 0.0) - self.seen_on(row.get("boot", ""))
        # Two processes on one boot share a monotonic clock, which nobody can set. A tiny negative
        # gap is the rounding of floats.
        if -1e-3 < by_machine < math.inf:
            if abs(by_calendar - by_machine) > MOVED:
                self._moved.append(by_calendar - by_machine)
            return max(0.0, by_machine)
        if by_calendar < 0:
            self._back.append(-by_calendar)
        return max(0.0, by_calendar)

    def _undo(self, step: float) -> None:
        """Move the steps after `step`, with their waiting time, to lost work. The steps of a row
        count as equally long."""
        while self._steps and self._steps[-1][1] > step:
            first, last, stepping, waited = self._steps.pop()
            share = max(0, step - first + 1) / (last - first + 1)
            if share:
                self._steps.append((first, int(step), stepping * share, waited * share))
            lost = last - max(int(step), first - 1)
            self._done -= lost
            self._lost += lost
            # Lost steps keep no cause: the time of a batch that is read again is lost with its
            # step.
            for cause, seconds in (
                ("useful", (stepping - waited) * (1 - share)),
                ("data wait", waited * (1 - share)),
            ):
                # Rounding must not leave a cause below zero.
                seconds = min(seconds, self._seconds[cause])
                self._seconds[cause] -= seconds
                self._seconds["lost work"] += seconds

    def _remarks(self) -> tuple[str, ...]:
        remarks = []
        if moved := self._moved:
            remarks.append(
                f"the clock was changed between processes ({len(moved)} times, by up to "
                f"{max(moved, key=abs):+,.0f} s); idle time there is by the machine's monotonic "
                "clock"
            )
        if back := self._back:
            remarks.append(
                f"the clock went back between processes ({len(back)} times, by {max(back):,.0f} s "
                "or "
                "more); idle time there is unknown and counts as 0"
            )
        if self.damaged:
            remarks.append(
                f"damaged lines of {FILE}, skipped: {self.damaged}; their time counts as other or "
                "idle"
            )
        return tuple(remarks)


def so_far(folder: Path) -> Goodput:
    """Return the goodput of the run in `folder`; zero seconds if its file cannot be read."""
    account = Account()
    with contextlib.suppress(OSError):  # not there yet, or on another host's disk
        account.read_file(folder / FILE)
    return account.goodput()


def summary(folder: Path) -> Goodput:
    """Return the goodput of the run in `folder`, up to its last sign of life. ConfigError if its
    file cannot be read or holds no row."""
    account = Account()
    path = folder / FILE
    try:
        account.read_file(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; make it readable") from error
    goodput = account.goodput()
    if not goodput.began and not account.damaged:  # no file, or its first line is being written
        raise ConfigError(
            f"{folder}: no {FILE} yet; `maxstack train` writes it once it has locked the folder"
        )
    if not goodput.began:
        raise ConfigError(
            f"{path}: no line of it can be read; move it away, and the run's next start writes a "
            "new one"
        )
    return goodput


def sentence(goodput: Goodput) -> str:
    """Describe goodput, steps and restarts of a run."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(goodput.began))
    wall = datetime.timedelta(seconds=round(goodput.wall))
    return (
        f"goodput {goodput.share:.1%} of {wall} since {since}: {goodput.steps:,} steps that count, "
        f"{goodput.lost_steps:,} lost, {goodput.restarts:,} "
        f"{'restart' if goodput.restarts == 1 else 'restarts'}"
    )


def text(goodput: Goodput) -> str:
    """Format the sentence, a table of causes with seconds, shares and bars, and the remarks."""
    rows = []
    for cause, seconds in goodput.seconds.items():
        share = seconds / goodput.wall if goodput.wall else 0.0
        rows.append((cause, f"{seconds:,.1f} s", f"{share:.1%}", "#" * round(40 * share)))
    remarks = (f"  {remark}" for remark in goodput.remarks)
    return "\n".join((sentence(goodput), table("lrrl", rows), *remarks))


def _row(line: bytes) -> dict[str, Any] | None:
    """Parse a row; None for a damaged line."""
    row = strict_json.read(line)
    if row is None or row.get("event") not in EVENTS:
        return None
    seconds = row.get("seconds", {})
    steps = row.get("steps", [0, 0])
    # A cause that this version does not know would break the sum over CAUSES.
    if not isinstance(seconds, dict) or not seconds.keys() <= SPENT.keys():
        return None
    if not isinstance(steps, list) or len(steps) != 2:
        return None
    numbers = (
        row.get("time"),
        *(row[name] for name in NUMBERS if name in row),
        *seconds.values(),
        *steps,
    )
    if not all(isinstance(number, int | float) and 0 <= number < FAR for number in numbers):
        return None
    return row if steps[0] <= steps[1] and row.get("waited", 0) <= row.get("stepping", 0) else None
