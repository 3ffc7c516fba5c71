"""Goodput of a run over all its restarts, read from goodput.jsonl, which ledger.py writes.

Goodput is the seconds of steps that count over those since the run first began. A row has an
`event` and its `time`: unix seconds by the clock at the process's beginning, counted steadily
since. `begin`: a process, with `monotonic`, that moment by the machine's steady clock, and the
`boot` that this clock belongs to. `resume`: the run goes on from `step`, later ones are undone.
`spent`, `end`. Each but `begin` may hold what was spent since the row before: `seconds` by cause;
`steps` [first, last] that count, their seconds (`stepping`) and those idle for want of a batch
(`waited`); how many did not count (`refused`) and their seconds (`refusing`). The file imports only
the standard library, for the supervisor.
"""

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
"""Seconds that two clocks may disagree by without a remark."""
FAR = 1e11
"""Bound on seconds and steps; a line beyond it is damaged."""


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Seconds of a run by cause, for all of CAUSES; they add up to `wall`."""

    began: float
    seen: float
    """Unix seconds of the first beginning and of the last sign of life."""
    wall: float
    seconds: dict[str, float]
    restarts: int
    """Processes with steps to do, without the first; a process that ended before its first step
    does not count."""
    steps: int
    lost_steps: int
    ended: bool
    """The last process ended its ledger: it was not killed, and is not running."""
    lived: float
    """Seconds that the last process lived."""
    resumes: tuple[tuple[float, int, str], ...]
    """Unix seconds, step and `resume` or `rewind`, for each time that the run went on from a
    checkpoint or began anew."""
    remarks: tuple[str, ...]

    @property
    def share(self) -> float:
        """Useful seconds over all seconds, 0 to 1."""
        return self.seconds["useful"] / self.wall if self.wall else 0.0

    def json(self) -> dict[str, Any]:
        """All fields and `goodput`, as plain data."""
        return {"goodput": self.share, **dataclasses.asdict(self)}


class Account:
    """Sums over the rows read so far. A process lives from its first row to its last, or as long as
    the seconds that it reports, if those are more."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._steps: list[tuple[int, int, float, float]] = []
        self._done = self._lost = self._processes = self._restarts = self.damaged = 0
        self._resumed = self._ended = False
        self._resumes: list[tuple[float, int, str]] = []
        self._first = self._begin = self._last = self._monotonic = self._claimed = self._past = 0.0
        self._boot = ""
        self._moved: list[float] = []
        self._back: list[float] = []

    def read_file(self, path: Path) -> None:
        """Read all rows of a file. A line that is no row is skipped and gives a remark, except a
        last one that a kill cut short."""
        with open_regular(path) as file:
            for line in strict_json.lines(file, str(path)):
                if (row := _row(line)) is not None:
                    self.read(row)
                elif line.endswith(b"\n") and line.strip():
                    self.damaged += 1

    def read(self, row: dict[str, Any]) -> None:
        """Add the next row."""
        if row["event"] == "begin" or not self._processes:
            self._begin_process(row)
        self._last, self._ended = max(self._last, row["time"]), row["event"] == "end"
        for cause, seconds in row.get("seconds", {}).items():
            self._spend(cause, seconds)
        self._spend("lost work", row.get("refusing", 0.0))
        self._lost += row.get("refused", 0)
        if "steps" in row:
            first, last = row["steps"]
            stepping, waited = row.get("stepping", 0.0), row.get("waited", 0.0)
            self._undo(first - 1)
            self._steps.append((first, last, stepping, waited))
            self._done += last - first + 1
            self._spend("useful", stepping - waited)
            self._spend("data wait", waited)
        if row["event"] == "resume":
            if self._restarts:
                kind = "rewind" if self._resumed else "resume"
                self._resumes.append((row["time"], int(row.get("step", 0)), kind))
            self._restarts += not self._resumed
            self._resumed = True
            self._undo(row.get("step", math.inf))

    def seen_on(self, boot: str) -> float:
        """Time of the last sign of life on the steady clock of `boot`; -inf where that was another
        boot, or is not known."""
        if not boot or boot != self._boot:
            return -math.inf
        return self._monotonic + self._last - self._begin

    def goodput(self) -> Goodput:
        """The sums; zero seconds where there are no rows."""
        lived = self._lived()
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
        """Seconds that the current process has lived."""
        return max(self._last - self._begin, self._claimed)

    def _spend(self, cause: str, seconds: float) -> None:
        self._seconds[cause] += seconds
        self._claimed += seconds

    def _begin_process(self, row: dict[str, Any]) -> None:
        if self._processes:
            lived, gap = self._lived(), self._gap(row)
            self._seconds["other"] += lived - self._claimed
            self._seconds["idle"] += gap
            self._past += lived + gap
        else:
            self._first = row["time"]
        self._processes += 1
        self._resumed = False
        self._begin = self._last = row["time"]
        self._boot, self._monotonic = row.get("boot", ""), row.get("monotonic", 0.0)
        self._claimed = 0.0

    def _gap(self, row: dict[str, Any]) -> float:
        """Seconds without a process before that of `row`: by the steady clock of a machine that
        both processes ran on, else by the calendar; never less than 0."""
        by_calendar = row["time"] - self._last
        by_machine = row.get("monotonic", 0.0) - self.seen_on(row.get("boot", ""))
        if -1e-3 < by_machine < math.inf:
            if abs(by_calendar - by_machine) > MOVED:
                self._moved.append(by_calendar - by_machine)
            return max(0.0, by_machine)
        if by_calendar < 0:
            self._back.append(-by_calendar)
        return max(0.0, by_calendar)

    def _undo(self, step: float) -> None:
        """Count the steps after `step` as lost work, with the seconds that they waited; the steps
        of a row are taken to be equally long."""
        while self._steps and self._steps[-1][1] > step:
            first, last, stepping, waited = self._steps.pop()
            share = max(0, step - first + 1) / (last - first + 1)
            if share:
                self._steps.append((first, int(step), stepping * share, waited * share))
            lost = last - max(int(step), first - 1)
            self._done -= lost
            self._lost += lost
            for cause, seconds in (
                ("useful", (stepping - waited) * (1 - share)),
                ("data wait", waited * (1 - share)),
            ):
                seconds = min(seconds, self._seconds[cause])
                self._seconds[cause] -= seconds
                self._seconds["lost work"] += seconds

    def _remarks(self) -> tuple[str, ...]:
        remarks = []
        if moved := self._moved:
            remarks.append(
                f"the clock was moved between processes ({len(moved)} x, by "
                f"{max(moved, key=abs):+,.0f} s at most); idle seconds there are "
                "by the machine's own clock"
            )
        if back := self._back:
            remarks.append(
                f"the clock went back between processes ({len(back)} x, by {max(back):,.0f} s or "
                "more); for how long no process ran there is not known, and counts as 0"
            )
        if self.damaged:
            remarks.append(
                f"{self.damaged} damaged line{'s' * (self.damaged > 1)} of {FILE} "
                "passed over; what stood there counts as other or idle"
            )
        return tuple(remarks)


def so_far(folder: Path) -> Goodput:
    """Goodput of the run in `folder`; zero seconds where its file cannot be read."""
    account = Account()
    with contextlib.suppress(OSError):  # not there yet, or on another host's disk
        account.read_file(folder / FILE)
    return account.goodput()


def summary(folder: Path) -> Goodput:
    """Goodput of the run in `folder`, up to its last sign of life; ConfigError where its file
    cannot be read or holds no row."""
    account, path = Account(), folder / FILE
    try:
        account.read_file(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; make it readable for you"
        ) from error
    goodput = account.goodput()
    if not goodput.began and not account.damaged:  # no file, or its first line is being written
        raise ConfigError(
            f"{folder}: no {FILE} yet; it is written from the moment that `maxstack "
            "train` holds the folder"
        )
    if not goodput.began:
        raise ConfigError(
            f"{path}: no line of it can be read; move it away, and the next start of the "
            "run begins a new one"
        )
    return goodput


def sentence(goodput: Goodput) -> str:
    """Goodput, steps and restarts of a run."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(goodput.began))
    wall = datetime.timedelta(seconds=round(goodput.wall))
    return (
        f"goodput {goodput.share:.1%} of {wall} since {since}: {goodput.steps:,} steps that count, "
        f"{goodput.lost_steps:,} lost, {goodput.restarts:,} restart{'s' * (goodput.restarts != 1)}"
    )


def text(goodput: Goodput) -> str:
    """The sentence, a table of each cause with its seconds, its share and a bar, and the
    remarks."""
    rows = []
    for cause, seconds in goodput.seconds.items():
        share = seconds / goodput.wall if goodput.wall else 0.0
        rows.append((cause, f"{seconds:,.1f} s", f"{share:.1%}", "#" * round(40 * share)))
    remarks = (f"  {remark}" for remark in goodput.remarks)
    return "\n".join((sentence(goodput), table("lrrl", rows), *remarks))


def _row(line: bytes) -> dict[str, Any] | None:
    """The row of a line, None for a damaged line."""
    row = strict_json.read(line)
    if row is None or row.get("event") not in EVENTS:
        return None
    seconds, steps = row.get("seconds", {}), row.get("steps", [0, 0])
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
