"""Processes of a run that die, stop, hang or are slow, and the data workers that they wait for."""

import contextlib
import functools
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from processes import environment, rows, training

from drills.kills import RETRY
from drills.runs import (
    LIMIT,
    ROOT,
    Fault,
    Harm,
    Outcome,
    Started,
    across,
    baseline,
    chain,
    last_step,
    outcome,
    settings,
    sizes,
    told,
    unlike,
)
from maxstack.submit import local

PEERS_LEAVE = 10.0
"""Seconds."""
WATCHDOG = {"step": 5.0, "other": 120.0}
SOURCE = {"kind": "synthetic", "documents": 1000, "length": 60, "ragged": True, "vocab": 320}
ABORTED = -signal.SIGABRT
"""Exit of peers of process 0, where jax's coordination service runs: jax itself ends a process
that lost it, sometimes before the watchdog does."""
ENDING = 10.0
"""Seconds that the watchdog takes beyond its limit, to write the stacks and to end everything, on a
machine with too much to do."""


def worker(folder: Path, count: int, dice: random.Random) -> Outcome:
    """9: the source stands still at some document, in the process itself and in a worker
    process."""
    found = outcome(folder)
    for workers in (0, 1):
        config = settings(
            folder,
            data={"seq_len": 64, "sources": [SOURCE], "workers": workers},
            eval={"every": 0},
            faults={"watchdog": WATCHDOG},
            checkpoint={"every": 4},
        )

        def plan(begin: int) -> tuple[Fault, Harm]:
            return {"kind": "hang", "after": dice.randrange(100, 300)}, _hung

        chain(
            found,
            config,
            count // 2 if workers else count - count // 2,
            plan,
            prefix=f"of-{workers}",
        )
    return found


def _hung(started: Started) -> list[str] | None:
    before = len(told(started.folder))
    codes = started.wait()
    if codes == [0]:
        return None
    took, log = (
        time.time() - (started.folder / "metrics.jsonl").stat().st_mtime,
        told(started.folder)[before:],
    )
    missing = [frame for frame in ("faulty.py", "feed.py", "train.py") if frame not in log]
    return (
        _in_time(took, started)
        + [f"exit {codes}: {started.output()[-800:]}"] * (codes != [RETRY])
        + [f"no stack in the log has {missing}"] * bool(missing)
        + started.leftovers()
    )


def _in_time(took: float, started: Started) -> list[str]:
    """The limit is `faults.watchdog.step`, or ten times the slowest step."""
    limit = max(WATCHDOG["step"], *(10 * row["step_seconds"] for row in rows(started.folder)))
    return [f"ended after {took:.1f} s, and the limit is {limit:.1f} s"] * (took > limit + ENDING)


def killed(folder: Path, count: int, dice: random.Random) -> Outcome:
    """10: SIGKILL to one of 2, 4 or 8 processes; the first is among them in turn. At last one of
    each number under `maxstack submit`."""
    found = _one_of_several(folder, count, dice, signal.SIGKILL, {})
    for many in sorted({*itertools.islice(sizes(), count)}):
        found.add(
            _submitted(across(folder, checkpoint={"every": 4}), f"submitted-{many}", many, dice)
        )
    return found


def _submitted(config: Path, name: str, many: int, dice: random.Random) -> list[str]:
    """Errors after one process was killed, and nothing was done but wait."""
    folder, step, victim = config.parent / name, dice.randrange(2, 16), dice.randrange(many)
    options = f"--target local --processes {many} run.name={name} run.virtual_devices={many}"
    words = [sys.executable, "-m", "maxstack.cli", "submit", f"{config}", *options.split()]
    with subprocess.Popen(
        words,
        env=environment() | {"XDG_STATE_HOME": f"{config.parent}"},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    ) as submitted:
        try:
            while submitted.poll() is None and last_step(folder) < step:
                time.sleep(0.005)
            os.kill(training(submitted.pid, victim), signal.SIGKILL)
            code = submitted.wait(LIMIT)
        finally:
            submitted.terminate()
    log = (folder / local.LOG).read_text()
    return (
        unlike(folder, baseline(config, count=many), last=True)
        + [f"exit {code}: {log[-1500:]}"] * bool(code)
        + [f"process {victim} was not started again: {log[-1500:]}"]
        * (f"[{victim}] supervise: killed by SIGKILL" not in log)
    )


def stopped(folder: Path, count: int, dice: random.Random) -> Outcome:
    """11: SIGSTOP to one of 2, 4 or 8 processes."""
    return _one_of_several(folder, count, dice, signal.SIGSTOP, {"watchdog": WATCHDOG})


def _one_of_several(
    folder: Path, count: int, dice: random.Random, number: int, faults: dict
) -> Outcome:
    found, times = outcome(folder), list[float]()
    of = list(itertools.islice(sizes(), count))
    for many in sorted({*of}):
        victims = itertools.cycle(
            [0, *dice.sample(range(1, many), many - 1)]
            if dice.random() < 0.5
            else [*dice.sample(range(1, many), many - 1), 0]
        )

        def plan(
            begin: int, many: int = many, victims: itertools.cycle = victims
        ) -> tuple[None, Harm]:
            return None, functools.partial(
                _lost, next(victims), begin + dice.randrange(2, 9), number, times
            )

        chain(
            found,
            across(folder, checkpoint={"every": 4}, faults=faults),
            of.count(many),
            plan,
            processes=many,
            prefix=f"of-{many}",
        )
    found.notes.append(
        "seconds until the last process had ended: "
        f"{', '.join(f'{seconds:.1f}' for seconds in times)}"
    )
    found.write()
    return found


def _lost(
    victim: int, step: int, number: int, times: list[float], started: Started
) -> list[str] | None:
    if not started.reach(step):
        return None
    before = len(told(started.folder))
    started.send(number, victim)
    codes, many = started.wait(120), len(started.processes)
    if RETRY not in codes and None not in codes and codes.count(0):
        return None
    times.append(started.took)
    wrong, log = started.leftovers(), told(started.folder)[before:]
    right = {RETRY, ABORTED} if victim == 0 else {RETRY}
    others = codes[:victim] + codes[victim + 1 :]
    if codes[victim] != -signal.SIGKILL or not {*others} <= right:
        said = "".join(started.output(i)[-600:] for i in range(many))
        wrong.append(f"process {victim} of {many}: exit {codes} after {started.took:.1f} s: {said}")
    if f"process {victim}" not in log:
        wrong.append(f"the log does not name process {victim}: {log[-800:]}")
    if number == signal.SIGKILL:
        late = started.took > PEERS_LEAVE
        return wrong + [f"all had ended after {started.took:.1f} s"] * late
    if " is stopped" not in log:
        wrong.append("the log does not say who is stopped")
    if (stacks := log.count("stacks of process")) < many:
        wrong.append(f"{stacks} stacks in the log")
    return wrong + _in_time(started.took, started)


EVERY, WITHIN = 5, 15
"""Steps between comparisons, and the K of the promise: two comparisons in a row, and the one that
was under way."""


def straggler(folder: Path, count: int, dice: random.Random) -> Outcome:
    """15: one of 2 or 4 processes is stopped again and again for 20 of 21 ms, or its documents come
    slowly."""
    found = outcome(folder)
    for number in range(count):
        many, kind = (2, 4)[number // 2 % 2], ("stopped", "documents")[number % 2]
        who = dice.randrange(many)
        config = across(
            folder,
            train={"steps": 100000, "batch_size": 8},
            checkpoint={"every": 0},
            faults={"check_every": EVERY},
            data={"seq_len": 64, "sources": [SOURCE]},
        )
        slow = {"kind": "hang", "after": 200, "seconds": 0.1} if kind == "documents" else None
        with Started(config, f"run-{number}", count=many, fault=slow, at=who) as started:
            wrong, others = _named(started, who, slow is None)
            found.add([f"{kind}, process {who} of {many}: {text}" for text in wrong])
            found.notes += [f"{kind}, process {who} of {many}: also {text}" for text in others]
    found.write()
    return found


def _named(started: Started, who: int, by_signals: bool) -> tuple[list[str], list[str]]:
    """Errors in the naming of process `who`, which is slow after some steps, by signals
    or of itself; and what others were named, which a machine with too much to do may slow down as
    well."""
    if not started.reach(2 * EVERY):
        return [f"the run ended: {started.output()[-1500:]}"], []
    stop, begin = threading.Event(), last_step(started.folder)
    slowing = (
        threading.Thread(target=_slow, args=(started.processes[who].pid, stop))
        if by_signals
        else threading.Thread(target=stop.wait)
    )
    slowing.start()
    try:
        started.until(
            lambda: (
                re.search(rf"process {who} \(.*? is slow", told(started.folder)) is not None
                or last_step(started.folder) > begin + 5 * WITHIN
            )
        )
    finally:
        stop.set()
        slowing.join()
    lines = re.findall(r"step (\d+): process (\d+) \(.*? is slow: (.*)", told(started.folder))
    right = [int(step) for step, process, _ in lines if int(process) == who]
    others = [
        f"process {process} at step {step}: {text}"
        for step, process, text in lines
        if int(process) != who
    ]
    if not right:
        ended = started.ended()
        why = f": it ended: {started.output()[-1500:]}" if ended else ""
        return [f"never named in {last_step(started.folder) - begin} steps{why}"], others
    return [f"named at step {right[0]}, slow since {begin}"] * (
        by_signals and right[0] > begin + WITHIN
    ), others


def _slow(pid: int, stop: threading.Event) -> None:
    """Let a process run for a millisecond at a time. This thread goes before all others where it
    may, or it would come too late."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    while not stop.is_set():
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)
