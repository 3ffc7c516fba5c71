"""Bad values: not finite, spikes."""

import itertools
import json
import random
import signal
from pathlib import Path

import numpy as np
from processes import numbers, rows

from drills.runs import Outcome, Started, complete, last_step, newest, outcome, settings, state

BATCH, WARM_UP, LAST = 8, 8, 18
PLACES = "loss", "gradient", "element"
STEPS, EVERY = 36, 4
"""Steps and checkpoint interval of the run with spikes."""


def poisoned(folder: Path, count: int, dice: random.Random) -> Outcome:
    """6: batches in the warm-up and later make the loss, all gradients or one element of one not a
    number or infinite, inside the compiled step."""
    found, number = outcome(folder), 0
    values = float("nan"), float("inf"), float("-inf")
    kinds = itertools.cycle(zip(dice.sample(PLACES, 3), dice.sample(values, 3), strict=True))
    config = settings(
        folder,
        checkpoint={"every": 1, "keep": 1000},
        eval={"every": 0},
        train={"steps": LAST, "batch_size": BATCH},
        faults={"max_skips": 3, "spike": {"window": 8, "warm_up": WARM_UP, "deviations": 50.0}},
    )
    first = LAST - 5
    output = complete(
        config,
        "many",
        code=1,
        fault={"kind": "poison", "steps": list(range(first, LAST + 1)), "where": "gradient"},
    )
    many = config.parent / "many"
    wrong = (
        []
        if "4 updates in a row are refused, and faults.max_skips=3" in output
        and "Traceback" not in output
        else [output[-800:]]
    )
    found.add(wrong + _not_finite(many, newest(many)))
    while found.injected < count:
        name, (where, value) = f"run-{number}", next(kinds)
        bad = sorted({dice.randrange(2, WARM_UP), dice.randrange(WARM_UP + 2, LAST)})
        output = complete(
            config, name, fault={"kind": "poison", "steps": bad, "where": where, "value": value}
        )
        wrong = _refused(config.parent / name, bad, output)
        for step in bad:
            found.add(
                [
                    f"{name}: {value} in {where} of batches {bad}: {text}"
                    for text in wrong.get(step, [])
                ]
            )
        number += 1
    return found


def _refused(folder: Path, bad: list[int], output: str) -> dict[int, list[str]]:
    """Bad step -> what was wrong: of the rows, of the state after it, of what came next."""
    wrong: dict[int, list[str]] = {step: [] for step in bad}
    told = numbers(folder)
    skipped = [step for step, row in told.items() if row["skipped"]]
    if skipped != bad or [*told] != [*range(1, LAST + 1)]:
        wrong[bad[0]].append(f"refused were {skipped}")
    for step in bad:
        before, after = state(folder, step - 1), state(folder, step)
        may_move = "step", "guard/refused", "position"
        moved = [
            name
            for name in after
            if not name.startswith(may_move) and not np.array_equal(before[name], after[name])
        ]
        wrong[step] += (
            [f"{name} is another after the refused update" for name in moved]
            + _not_finite(folder, step)
            + _not_finite(folder, step + 1)
        )
        if np.array_equal(state(folder, step + 1)["guard/updates"], after["guard/updates"]):
            wrong[step].append("the update after it was refused too")
        if f"step {step}: loss" not in output:
            wrong[step].append("the refusal is not in the log")
    return wrong


def _not_finite(folder: Path, step: int) -> list[str]:
    return [
        f"step {step}: {name} is not finite"
        for name, value in state(folder, step).items()
        if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all()
    ]


def spikes(folder: Path, count: int, dice: random.Random) -> Outcome:
    """7: noise among a text that is learned: one batch, and later two in a row; undisturbed, and
    killed at random moments."""
    found = outcome(folder)
    for number in range(count):
        top = folder / f"{number}"
        once, twice = dice.randrange(20, 23), dice.randrange(26, 32)
        noise = (once, twice, twice + 1)
        config = _noisy(top, noise, dice)
        output = complete(config, "whole")
        wrong = _gone_back(config.parent / "whole", output, once, twice)
        base = numbers(top / "whole")
        for _ in range(min(count, 3)):
            with Started(config, "killed") as started:
                started.reach(last_step(started.folder) + dice.randrange(1, 14))
                started.send(signal.SIGKILL)
                started.wait()
        complete(config, "killed")
        ours = numbers(top / "killed")
        wrong += [
            f"killed: step {step} has another row" for step in base if ours.get(step) != base[step]
        ]
        wrong += [
            f"killed: {name} of the last state is another"
            for name, value in state(top / "killed", STEPS).items()
            if not np.array_equal(value, state(top / "whole", STEPS)[name])
        ]
        found.add([f"noise in {noise}: {text}" for text in wrong])
    return found


def _noisy(folder: Path, noise: tuple[int, ...], dice: random.Random) -> Path:
    folder.mkdir(parents=True)

    def line(step: int) -> str:
        return (
            json.dumps(
                {
                    "text": "".join(dice.choices([chr(code) for code in range(33, 126)], k=80))
                    if step in noise
                    else "ab" * 40
                }
            )
            + "\n"
        )

    (folder / "documents.jsonl").write_text(
        "".join(line(step) for step in range(1, STEPS + 1) for _ in range(BATCH))
    )
    data = {
        "packing": "none",
        "shuffle": False,
        "seq_len": 64,
        "sources": [{"kind": "jsonl", "files": [str(folder / "documents.jsonl")]}],
    }
    return settings(
        folder,
        train={"steps": STEPS, "batch_size": BATCH},
        checkpoint={"every": EVERY},
        eval={"every": 0},
        data=data,
        optimizer={"learning_rate": {"kind": "constant", "value": 0.01}},
        faults={"spike": {"window": 8, "warm_up": 8, "rewind_after": 2, "before": 2}},
    )


def _gone_back(folder: Path, output: str, once: int, twice: int) -> list[str]:
    """Errors of a run that should have refused a batch of noise, and gone back before two
    in a row and passed over them."""
    first, last = twice - 2, twice + 1
    back = (first - 1) // EVERY * EVERY
    passed = [row["step"] for row in rows(folder, "passed_over")]
    skipped = [row["step"] for row in rows(folder) if row["skipped"]]
    wrong = [f"refused were {skipped}"] * (
        skipped != [once, twice, twice + 1, *([once] if once > back else [])]
    )
    wrong += [f"passed over were {passed}"] * (passed != list(range(first, last + 1)))
    line = f"rewound to step {back}; skipping the batches of steps {first} to {last}"
    return (
        wrong
        + [f"the log does not say: {line}"] * (line not in output)
        + [f"the log does not tell of step {once}"] * (f"step {once}: loss" not in output)
    )
