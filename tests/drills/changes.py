"""A run that goes on under other circumstances: devices, configuration, clock, a machine with too
much to do."""

import contextlib
import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from processes import numbers, rows

from drills.runs import (
    Fault,
    Outcome,
    Started,
    across,
    baseline,
    chain,
    complete,
    newest,
    outcome,
    settings,
    state,
)

STEADY = {"learning_rate": {"kind": "constant", "value": 0.01}}
NEAR = 1e-5
"""Relative: what losses may differ by on another number of devices."""


def elastic(folder: Path, count: int, dice: random.Random) -> Outcome:
    """12: 4, 2 and 8 devices one after the other, of one process or as many processes, against one
    device throughout."""
    found = outcome(folder)
    config = across(folder, checkpoint={"every": 4}, optimizer=STEADY)
    base = baseline(config)
    for number in range(count):
        name = f"run-{number}"
        stops = [*sorted(dice.sample(range(3, 22), 2)), 24]
        apart = [dice.random() < 0.5 for _ in stops]
        for devices, stop, several in zip((4, 2, 8), stops, apart, strict=True):
            several = several and devices < 8 and count > 1
            shape = [f"mesh={{data: {dice.choice((1, 2))}, fsdp: -1}}", f"train.steps={stop}"]
            complete(
                config,
                name,
                *shape,
                *([] if several else [f"run.virtual_devices={devices}"]),
                count=devices if several else 1,
            )
        found.add(
            [
                f"{name}, stops at {stops}: {text}"
                for text in _other_devices(config.parent / name, base)
            ]
        )
    return found


def _other_devices(folder: Path, base: Path) -> list[str]:
    ours, theirs = rows(folder), numbers(base)
    if [row["step"] for row in ours] != [*theirs]:
        return [f"the steps are {[row['step'] for row in ours]}"]
    wrong = [
        f"step {row['step']}: loss {row['loss']}, and the baseline has "
        f"{theirs[row['step']]['loss']}"
        for row in ours
        if abs(row["loss"] / theirs[row["step"]]["loss"] - 1) > NEAR
        or row["tokens"] != theirs[row["step"]]["tokens"]
    ]
    step = newest(base)
    if not np.array_equal(state(folder, step)["position"], state(base, step)["position"]):
        wrong.append("the lanes do not stand at the same documents in the end")
    return wrong


FREE = (
    "data.workers=1",
    "data.prefetch=5",
    "model.remat.policy=full",
    "model.unroll=2",
    "run.virtual_devices=2 mesh.fsdp=2",
    "train.accumulate=2",
    "checkpoint.every=3",
    "optimizer.learning_rate=0.02",
    "faults.max_skips=3",
    "run.trackers=[tensorboard]",
    "model.dtype=bfloat16",
)
"""Keys that may change."""
BOUND = {
    "model.embed=64": "model.embed: 32 -> 64",
    "model.layers=3": "model.layers: 2 -> 3",
    "data.seq_len=32": "data.seq_len: 64 -> 32",
    "data.seed=7": "data.seed: 0 -> 7",
    "train.batch_size=16": "train.batch_size: 8 -> 16",
    "data.shuffle=false": "data.shuffle: true -> false",
    "objective.z_loss=0.01": "objective.z_loss: 0.0 -> 0.01",
    "model.blocks.block.mixer.window=8": "mixer.window: null -> 8",
    "data.sources.0.weight=5": "weight: 3.0 -> 5.0",
    "data.sources.1.documents=50": "documents: 100 -> 50",
    "data.packing=none": "data.packing",
    "optimizer=lion": "optimizer.chain",
}
"""Keys that may not, and what the error says."""
FORCED = {"objective.z_loss=0.01": "objective", "data.sources.0.weight=5": "data.sources.0.weight"}
"""Keys that may with --force-config, and its value."""
KINDS = (
    [("bound", *each) for each in BOUND.items()],
    [("free", each, "") for each in FREE],
    [("forced", *each) for each in FORCED.items()],
)


def changed(folder: Path, count: int, dice: random.Random) -> Outcome:
    """13: a run stopped after its first steps goes on under every kind of change."""
    found, config = (
        outcome(folder),
        settings(folder, train={"steps": 12, "batch_size": 8}, eval={"every": 0}, optimizer=STEADY),
    )
    with Started(config, "run", "train.steps=4") as started:
        assert started.wait() == [0], started.output()
    for number, (kind, given, said) in enumerate(_some(count, dice)):
        name = f"run-{number}"
        shutil.copytree(folder / "run", folder / name)
        before = _files(folder / name)
        with Started(
            config,
            name,
            *given.split(),
            "train.steps=5",
            *(["--force-config", said] if kind == "forced" else []),
        ) as started:
            codes, output = started.wait(), started.output()
        if kind == "bound":
            good = (
                codes == [1]
                and said in output
                and "Traceback" not in output
                and _files(folder / name) == before
            )
        else:
            good = codes == [0] and "resumed from step 4" in output
        found.add([] if good else [f"{kind} {given}: exit {codes}: {output[-600:]}"])
    return found


def _some(count: int, dice: random.Random) -> list[tuple[str, str, str]]:
    """`count` changes, of each kind in turn."""
    shuffled = [dice.sample(kind, len(kind)) for kind in KINDS]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*shuffled))
    return [change for change in turns if change][:count]


def _files(folder: Path) -> dict[str, int]:
    """Files of a run's folder, but for its books, which note every start."""
    return {
        f"{path.relative_to(folder)}": path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("goodput.jsonl", "log.txt", ".lock", ".owner")
    }


def clock(folder: Path, count: int, dice: random.Random) -> Outcome:
    """0: the wall clock is a day ahead or behind in processes that are killed and go on."""
    found, config = outcome(folder), settings(folder, checkpoint={"every": 4})
    days = itertools.cycle(dice.sample((-86400, 86400), 2))

    def plan(begin: int) -> tuple[Fault, functools.partial]:
        return {"kind": "clock", "seconds": next(days)}, functools.partial(
            _killed_at, begin + dice.randrange(2, 12)
        )

    chain(found, config, count, plan)
    return found


def _killed_at(step: int, started: Started) -> list[str] | None:
    started.reach(step)
    started.send(signal.SIGKILL)
    codes = started.wait()
    return (
        None
        if codes == [0]
        else [f"exit {codes}: {started.output()[-1500:]}"] * (codes != [-signal.SIGKILL])
    )


MANY_COLLECTIVES = {
    "learning_rate": 0.01,
    "ema": {"decay": 0.99},
    "chain": [
        {
            "kind": "MultiSteps",
            "every_k_schedule": 2,
            "inner": [{"kind": "adafactor", "momentum": 0.9}],
        }
    ],
}
"""An optimizer whose update has many independent collectives where weights are split."""
CROWDED = 120
"""Steps on a crowded machine; a collective that waits for ever ends the process, by XLA itself."""


def crowded(folder: Path, count: int, dice: random.Random) -> Outcome:
    """17: eight virtual devices, while other processes take the processors."""
    found, mesh, train = (
        outcome(folder),
        {"data": 1, "fsdp": 8},
        {"steps": CROWDED, "batch_size": 16, "accumulate": 2},
    )
    config = settings(
        folder,
        model={"layers": 1},
        data={"seq_len": 32},
        optimizer=MANY_COLLECTIVES,
        eval={"every": 0},
        train=train,
        mesh=mesh,
    )
    for number in range(count):
        with (
            _busy(dice.randint(1, 2) * (os.cpu_count() or 1)),
            Started(config, f"run-{number}", "run.virtual_devices=8") as started,
        ):
            codes, output = started.wait(), started.output()
        taken = [row["step"] for row in rows(folder / f"run-{number}")]
        found.add(
            []
            if codes == [0] and taken == [*range(1, CROWDED + 1)]
            else [f"exit {codes} after {len(taken)} steps: {output[-600:]}"]
        )
    return found


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """Inside, so many other processes never rest."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
