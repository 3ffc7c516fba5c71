"""Runs that learn from their own samples: killed in every phase of that, or in the processes that
compute their rewards."""

import contextlib
import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from drills.faulty import LEARNING, SHARED
from drills.runs import (
    Fault,
    Harm,
    Outcome,
    Started,
    baseline,
    chain,
    last_step,
    outcome,
    settings,
    unlike,
)
from drills.sevens import HELD, WAIT

STEPS, SAVED = 12, 3
ROLLOUT = {"prompts": 4, "samples": 4, "max_tokens": 8, "drop_equal": True, "draws": 2}
SETTINGS = {
    "current": ROLLOUT,
    "ahead": ROLLOUT | {"ahead": 1},
    "several": ROLLOUT | {"prompts": 8, "minibatches": 2, "epochs": 2},
    "both": ROLLOUT | {"minibatches": 2, "ahead": 1},
}
"""By the current weights, a step a rollout; by weights of a rollout before, made beside the steps;
four steps a rollout, which saves interrupt; two, by older weights."""
PHASES = (*LEARNING, "rewards", "save", "anywhere")
VICTIMS = ("runner", "worker", "both", "all", "any")
"""Processes of rewards: the one that computes a reward, its worker, these two, all of all workers
at once, and one of them whatever it does."""
EACH, APART = 2, 5
"""Victims in a run, and steps from one to the next, so that none is asked again what the last one
was asked: a request may lose one process."""


def samples(folder: Path, count: int, dice: random.Random) -> Outcome:
    """18: in phase after phase of setting after setting; of three faults one is the death
    of processes of rewards."""
    found, names = outcome(folder), [*SETTINGS]
    configs = {name: learner(folder / name, name) for name in names}
    kills = count - count // 3
    pairs = [
        (names[(i + i // 12) % len(names)], PHASES[i % len(PHASES)]) for i in range(kills)
    ]  # 24 in turn are all there are
    for name in names:
        phases = [phase for setting, phase in pairs if setting == name]
        if phases:
            own = functools.partial(_plan, configs[name], itertools.cycle(phases), dice)
            chain(found, configs[name], len(phases), own)
    order = dice.sample(VICTIMS, len(VICTIMS))
    victims, number = [order[i % len(order)] for i in range(count - kills)], 0
    while victims:
        config = configs[names[number % len(names)]]
        done = _lose(found, config, f"lost-{number}", victims[:EACH], dice)
        victims, number = victims[done:], number + 1
        assert number < count + 10, "no run lives long enough to lose a process"
    return found


def learner(folder: Path, name: str, **sections: Any) -> Path:
    """A run of a few seconds that learns to say seven."""
    source = {
        "kind": "function",
        "call": "maxstack.data.sorting:prompts",
        "documents": 64,
        "holdout": 0.25,
        "record": {"kind": "prompts"},
    }
    digits = {"kind": "huggingface", "path": "{configs}/recipes/digits.json"}
    path = settings(
        folder,
        model={"vocab": 14, "layers": 1},
        serve={"rows": 16},
        data={
            "sources": [source],
            "tokenizer": digits | {"bos": "<s>", "eos": "</s>"},
            "seq_len": 72,
            "packing": "fit",
        },
        objective={"kind": "policy_gradient"},
        optimizer={"learning_rate": 0.002},
        rollout=SETTINGS[name],
        train={"steps": STEPS, "batch_size": 4},
        eval={"every": STEPS // 2, "steps": 1},
        **{"checkpoint": {"every": SAVED, "keep": 2}} | sections,
    )
    reward = {"kind": "function", "call": "drills.sevens:sevens", "timeout": 60.0}
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"rewards": [reward]}))
    return path


def _plan(
    config: Path, phases: Iterator[str], dice: random.Random, begin: int
) -> tuple[Fault | None, Harm]:
    """The next kill of a run that goes on from a step."""
    phase, left = next(phases), max(STEPS - begin, 1)
    if phase == "save":
        part = dice.choice(SHARED)
        first = max(begin + SAVED, 3 * SAVED if part == "removing" else 0)
        step = min(first + SAVED * dice.randrange(2), STEPS)
        return {"kind": "save", "phase": part, "step": step}, functools.partial(_killed, phase)
    if phase in LEARNING:
        updates, after = dice.randrange(left), dice.randrange(18 if phase == "answering" else 2) + 1
        fault = {"kind": "learning", "phase": phase, "updates": updates, "after": after}
        return fault, functools.partial(_killed, phase)
    step, wait = begin + dice.randrange(left), dice.random()
    if phase == "anywhere":
        return None, functools.partial(_kill_anywhere, step, wait)
    hold = _folder(config)
    return {"kind": "hold", "folder": str(hold)}, functools.partial(_kill_in_rewards, hold, step)


def _folder(config: Path) -> Path:
    """Another empty folder for sevens.py."""
    folder = config.parent / "hold" / f"{time.time_ns()}"
    folder.mkdir(parents=True)
    return folder


def _killed(phase: str, started: Started) -> list[str] | None:
    """Errors after a SIGKILL; None where the run ended before it."""
    codes = started.wait(120)
    if codes == [0]:
        return None
    wrong = [f"{phase}: exit {codes}: {started.output()[-1500:]}"] * (codes != [-signal.SIGKILL])
    return wrong + started.leftovers()


def _kill_anywhere(step: int, wait: float, started: Started) -> list[str] | None:
    if step:
        started.reach(step)
    started.until(lambda: False, wait / 5 if step else wait * 8)
    started.send(signal.SIGKILL)
    return _killed("anywhere", started)


def _kill_in_rewards(hold: Path, step: int, started: Started) -> list[str] | None:
    """While a reward of this step, or of a later one that is made ahead, is being computed."""
    if started.reach(step) and _held(hold, started):
        started.send(signal.SIGKILL)
    return _killed("rewards", started)


def _held(hold: Path, started: Started) -> list[int]:
    """The processes of a reward that stands still, and of its worker; none where the run ends."""
    (hold / WAIT).touch()
    if not started.until(lambda: any(hold.glob(f"{HELD} *"))):
        return []
    (path,) = hold.glob(f"{HELD} *")
    path.unlink()
    return [int(number) for number in path.name.split()[1:]]


def _lose(
    found: Outcome, config: Path, name: str, victims: Sequence[str], dice: random.Random
) -> int:
    """A run some of whose processes of rewards are killed, and that goes on -> how many times."""
    hold, injected = _folder(config), 0
    with Started(config, name, fault={"kind": "hold", "folder": str(hold)}) as started:
        for victim in victims:
            last = last_step(started.folder) + APART if injected else 0
            started.reach(last + dice.randrange(3))
            numbers = _chosen(victim, hold, started, dice)
            if not numbers:
                break
            for number in numbers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            injected += 1
        codes = started.wait()
        wrong = [f"{name}: exit {codes}: {started.output()[-1500:]}"] if codes != [0] else []
        wrong += started.leftovers()
    wrong += [] if wrong else unlike(config.parent / name, baseline(config))
    for _ in range(injected):
        found.add()
    found.wrong([f"{text}, after the death of {', '.join(victims[:injected])}" for text in wrong])
    return injected


def _chosen(victim: str, hold: Path, started: Started, dice: random.Random) -> list[int]:
    """The processes that such a victim is; none where the run ends before."""
    pid = started.processes[0].pid
    if victim == "any":
        started.until(lambda: bool(_of_rewards(pid)))
        running = _of_rewards(pid)
        return [dice.choice(running)] if running else []
    held = _held(hold, started)
    every = _of_rewards(pid) if held else []
    return {"runner": held[:1], "worker": held[1:], "both": held, "all": every}[victim]


def _of_rewards(pid: int) -> list[int]:
    """Processes that compute rewards for a run: its workers, and the runners below them."""
    workers = [child for child in _children(pid) if _is_worker(child)]
    return workers + [runner for worker in workers for runner in _children(worker)]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # ended since
            found += map(int, thread.read_text().split())
    return found


def _is_worker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"maxstack.rewards.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
