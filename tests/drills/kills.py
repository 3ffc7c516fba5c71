"""Processes that are killed or told to leave: at random moments, in a save, one of several."""

import functools
import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from processes import rows

from drills.faulty import LOCAL, SHARED
from drills.runs import (
    SEVERAL,
    Fault,
    Outcome,
    Started,
    across,
    chain,
    last_step,
    newest,
    outcome,
    settings,
    sizes,
)
from maxstack.checkpoint import manifest

RETRY = 42
"""The documented exit code: the same command goes on."""


def sigkill(folder: Path, count: int, dice: random.Random) -> Outcome:
    """1: at random moments, by turns among the steps and before the first."""
    config, found, start = settings(folder, checkpoint={"every": 4}), outcome(folder), [5.0]
    turns = itertools.cycle((False, True))

    def plan(begin: int) -> tuple[Fault | None, Callable[[Started], list[str] | None]]:
        wait, further = dice.random(), dice.randrange(1, 25)
        early = next(turns)

        def harm(started: Started) -> list[str] | None:
            if early:
                started.until(lambda: False, wait * start[0])
            else:
                started.reach(begin + 1)
                start[0] = max(1.0, (start[0] + time.monotonic() - started.began) / 2)
                started.reach(begin + further)
                time.sleep(wait / 50)
            started.send(signal.SIGKILL)
            codes = started.wait(60)
            if codes == [0]:
                return None
            return [f"exit {codes}: {started.output()[-1500:]}"] * (
                codes != [-signal.SIGKILL]
            ) + started.leftovers()

        return None, harm

    chain(found, config, count, plan)
    return found


def in_a_save(folder: Path, count: int, dice: random.Random) -> Outcome:
    """2: in one phase after the other, in saves to a folder that all see and to a host's own
    disk."""
    found, disk = outcome(folder), folder / "disk"
    own = {"every": 1000, "tiers": [{"path": str(disk), "every": 2, "keep": 2, "replicate": 0}]}
    kills = -(-count * len(SHARED) // len(SHARED + LOCAL))
    for phases, many, prefix, checkpoint in (
        (SHARED, kills, "seen", {"every": 2, "keep": 2}),
        (LOCAL, count - kills, "own", own),
    ):
        turns = itertools.chain.from_iterable(
            dice.sample(phases, len(phases)) for _ in itertools.count()
        )

        def plan(
            begin: int, turns: Iterator[str] = turns
        ) -> tuple[Fault, Callable[[Started], list[str]]]:
            phase, step = next(turns), begin - begin % 2 + dice.choice((2, 4, 6))
            return {"kind": "save", "phase": phase, "step": step}, functools.partial(
                _killed_in, phase, step, disk
            )

        if many:
            chain(
                found, settings(folder, checkpoint=checkpoint), many, plan, prefix=prefix, disk=disk
            )
    for path in (*folder.glob("seen-*/checkpoints/*"), *disk.glob("*/host_0/*/*")):
        if not (path / manifest.NAME).exists():
            found.wrong([f"{path} was left behind"])
    return found


def _killed_in(phase: str, step: int, disk: Path, started: Started) -> list[str] | None:
    """Errors after the kill in that phase of that step's save; None where the run has no
    such step any more."""
    codes, left = started.wait(60), newest(started.folder, disk)
    if codes == [0]:
        return None
    counts = step if phase in ("sealed", "removing", "local removing") else step - 2
    return [f"{phase}: exit {codes}: {started.output()[-1500:]}"] * (codes != [-signal.SIGKILL]) + [
        f"{phase} of step {step}: step {left} is the newest that counts"
    ] * (left != counts)


def preempt(folder: Path, count: int, dice: random.Random) -> Outcome:
    """5: one of 2, 4 or 8 processes, at a random step; nothing but the signal makes the run
    save."""
    found, turns = outcome(folder), sizes()
    chains: dict[int, int] = {}
    for _ in range(count):
        many = next(turns)
        chains[many] = chains.get(many, 0) + 1
    for many, times in chains.items():

        def plan(
            begin: int, many: int = many
        ) -> tuple[None, Callable[[Started], list[str] | None]]:
            return None, functools.partial(
                _preempted, dice.randrange(many), begin + dice.randrange(1, 8)
            )

        chain(
            found,
            across(folder, checkpoint={"every": 1000}),
            times,
            plan,
            processes=many,
            prefix=f"of-{many}",
        )
        for run in folder.glob(f"of-{many}-*"):
            steps = [row["step"] for row in rows(run)]
            found.wrong(
                [f"{run.name}: steps {steps} are not each done once"]
                * (steps != list(range(1, SEVERAL + 1)))
            )
    return found


def _preempted(process: int, step: int, started: Started) -> list[str] | None:
    if not started.reach(step):
        return None
    started.send(signal.SIGTERM, process)
    codes, last = started.wait(120), last_step(started.folder)
    if codes == [0] * len(codes):
        return None
    return (
        [f"exit {codes}: " + "".join(started.output(i)[-800:] for i in range(len(codes)))]
        * (codes != [RETRY] * len(codes))
        + [f"step {newest(started.folder)} was saved, and {last} was the last"]
        * (newest(started.folder) != last)
        + [
            f"process {i} does not say that it was asked to leave: {started.output(i)[-800:]}"
            for i in range(len(codes))
            if f"leaving after step {last}: a signal asked" not in started.output(i)
        ]
    )
