"""Runs that are asked to leave while they wait, or whose data stay away."""

import functools
import random
import signal
from pathlib import Path
from typing import Any, NamedTuple

from processes import rows

from drills import learning
from drills.kills import RETRY
from drills.runs import (
    Fault,
    Harm,
    Outcome,
    Started,
    across,
    chain,
    last_step,
    newest,
    outcome,
    settings,
)

GRACE = 8.0
"""faults.grace of these runs; a stalled wait is given up after some 2 s."""
EVERY = 4
KEYS = "where", "after", "away", "seconds"
NUMBERS = signal.SIGTERM, signal.SIGHUP, signal.SIGINT


class Wait(NamedTuple):
    """Where processes stand still, and what is saved then."""

    where: str
    after: int
    processes: int = 1
    at: int | None = None
    """The process that does alone; None: all."""
    seconds: float = 0.0
    """In the middle of an evaluation, each batch takes them, and no longer."""
    away: bool = False
    """A store is away for too long, and nobody sends a signal."""
    saved: bool = True
    """The last whole step, or else only what was saved before."""


WAITS = (
    Wait("data", 10),
    Wait("evaluation", 1),
    Wait("data", 10, processes=2),
    Wait("compiler", 1),
    Wait("save", 1, saved=False),
    Wait("step", 10, saved=False),
    Wait("data", 8, processes=2, at=1, seconds=0.4),
    Wait("evaluation", 1, processes=2, saved=False),
    Wait("rollout", 2),
    Wait("data", 10, away=True),
    Wait("data", 10, processes=2, away=True),
    Wait("data", 10, processes=2, at=1, saved=False),
)


def asked(folder: Path, count: int, dice: random.Random) -> Outcome:
    """19: a signal to one process of a run that waits in one place after the other."""
    found, times = outcome(folder), list[str]()
    for i in range(count):
        wait = WAITS[i % len(WAITS)]
        number = dice.choice(NUMBERS)

        def plan(begin: int, wait: Wait = wait, number: int = number) -> tuple[Fault, Harm]:
            fault: Fault = {"kind": "stand", **{k: getattr(wait, k) for k in KEYS}}
            if wait.at is not None:
                fault["at"] = wait.at
            return fault, functools.partial(
                _left, wait, number, dice.randrange(wait.processes), times
            )

        chain(
            found,
            _config(folder, wait),
            1,
            plan,
            processes=wait.processes,
            prefix=f"{i}-{wait.where}-of-{wait.processes}",
        )
    found.notes.append(f"from the signal to the last exit: {'; '.join(times)}")
    found.write()
    return found


def _config(folder: Path, wait: Wait) -> Path:
    more: dict[str, Any] = {"faults": {"grace": GRACE}, "checkpoint": {"every": EVERY}}
    if wait.where == "compiler":
        more["train"] = {
            "steps": 16,
            "batch_size": 8,
            "stages": [{"step": 1}, {"step": 9, "batch_size": 4}],
        }
    if wait.where == "evaluation" or wait.seconds:
        more["eval"] = {"every": 6, "steps": 60 if wait.seconds else 1}
    if wait.where == "rollout":
        return learning.learner(folder / wait.where, "current", **more)
    return (across if wait.processes > 1 else settings)(
        folder / f"{wait.where}-{wait.seconds:g}", **more
    )


def _left(
    wait: Wait, number: int, process: int, times: list[str], started: Started
) -> list[str] | None:
    said, output = f"stands still: {wait.where}", started.outputs[wait.at or 0]
    if not started.until(lambda: output.exists() and said in output.read_text()):
        return None
    last = last_step(started.folder)
    if not wait.away:
        started.send(number, process)
    codes, left = started.wait(60), newest(started.folder)
    times.append(f"{wait.where} of {wait.processes}: {started.took:.1f} s")
    done = max([row["step"] for row in rows(started.folder)], default=0)
    wanted = done if wait.saved else last - 2 * EVERY
    return (
        [f"{wait}: exit {codes}: {started.output()[-2500:]}"] * (codes != [RETRY] * len(codes))
        + [f"{wait}: it took {started.took:.1f} s"] * (started.took > GRACE + 3 and not wait.away)
        + [f"{wait}: step {left} was saved, and {done} was the last"] * (left < wanted)
        + started.leftovers()
    )
