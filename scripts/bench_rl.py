"""Sorting digits by GRPO, ours beside TRL's on the same task, model and settings: seconds and
samples until the share of right answers, a mean over five steps, reaches a mark.

Needs a run of configs/recipes/sort-base.yml, and the environment of `make oracle`. Rounds go in
turns; their seeds differ. Seconds are of training alone, from the first step on, and of the whole
command.

example: python scripts/bench_rl.py --base runs/sort-base --out bench-rl
"""

import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench import arguments
from bench.metrics import rows

ROOT = Path(__file__).resolve().parent.parent
TRL = ROOT / ".venv-oracle/bin/python"
MARKS = 0.5, 0.7, 0.75
MEAN = 5
"""Steps in a mean."""
SAMPLES = 512
"""Of a step."""


class Curve(NamedTuple):
    """A run's steps."""

    rewards: list[float]
    seconds: list[float]
    """When each step was done, from the beginning of training."""
    before: float
    """Seconds of the command before that."""


def main() -> None:
    """Run both in turns, and print what each needed."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--base", type=Path, required=True, help="a run of sort-base.yml")
    parser.add_argument("--out", type=Path, required=True, help="a folder for what is made")
    parser.add_argument("--steps", type=int, default=150, help="(default: 150)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    arguments.takes_overrides(parser, "ours")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.out / "model"
    if not folder.exists():
        command = [sys.executable, "-m", "maxstack.cli", "export", args.base, "--out", folder]
        subprocess.run([*map(str, command), "--dtype", "float32"], check=True, cwd=ROOT)
    curves: dict[str, list[Curve]] = {"maxstack": [], "TRL": []}
    for seed in range(args.rounds):
        curves["maxstack"].append(ours(args, seed))
        curves["TRL"].append(theirs(args, folder, seed))
    for name, found in curves.items():
        print(f"\n{name}: a step takes {median([step_of(curve) for curve in found]):.3f} s, what")
        print(f"comes before the first {median([curve.before for curve in found]):.1f} s")
        for mark in MARKS:
            print(f"  to {mark:.2f}: {said(found, mark)}")
    for mark in MARKS:
        pairs = zip(curves["maxstack"], curves["TRL"], strict=True)
        ratios = [reached(b, mark)[1] / reached(a, mark)[1] for a, b in pairs]
        print(f"TRL's seconds over ours, to {mark:.2f}: {', '.join(f'{x:.2f}' for x in ratios)}")


def ours(args: Any, seed: int) -> Curve:
    """A run of ours."""
    name = f"seed-{seed}"
    words = [
        *("configs/recipes/grpo-sort.yml", f"model.from={args.base.absolute()}"),
        *(f"run.output_dir={args.out.absolute()}", f"run.name={name}", f"train.seed={seed}"),
        *(f"data.seed={seed}", f"train.steps={args.steps}", "run.tensorboard=false"),
        *("eval.every=0", "checkpoint.every=0", *args.overrides),
    ]
    command = [sys.executable, "-m", "maxstack.train", *words]
    whole = timed(command)
    found = rows(args.out / name / "metrics.jsonl", "reward")[-args.steps :]
    seconds = list(itertools.accumulate(row["step_seconds"] for row in found))
    return Curve([row["reward"] for row in found], seconds, whole - seconds[-1])


def theirs(args: Any, folder: Path, seed: int) -> Curve:
    """A run of TRL's."""
    file = args.out / f"trl-{seed}.jsonl"
    script = ROOT / "scripts/bench/trl_sort.py"
    words = "--model", folder, "--steps", args.steps, "--seed", seed, "--out", file
    whole = timed([*map(str, (TRL, script, *words))])
    found = [row for line in file.read_text().splitlines() if "reward" in (row := json.loads(line))]
    seconds = [row["seconds"] for row in found]
    return Curve([row["reward"] for row in found], seconds, whole - seconds[-1])


def timed(command: list[str]) -> float:
    """Seconds that a command takes."""
    began = time.monotonic()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def reached(curve: Curve, mark: float) -> tuple[int, float]:
    """(steps, seconds of training) until the mean of rewards reaches the mark; infinite seconds
    where it never does."""
    for step in range(MEAN, len(curve.rewards) + 1):
        if sum(curve.rewards[step - MEAN : step]) / MEAN >= mark:
            return step, curve.seconds[step - 1]
    return len(curve.rewards), float("inf")


def said(found: list[Curve], mark: float) -> str:
    """Medians of what it took to reach a mark."""
    steps, seconds = zip(*(reached(curve, mark) for curve in found), strict=True)
    whole = [s + curve.before for s, curve in zip(seconds, found, strict=True)]
    return (
        f"{SAMPLES * median(list(steps)):,.0f} samples, {median(list(seconds)):.1f} s of training, "
        f"{median(whole):.1f} s with the start"
    )


def step_of(curve: Curve) -> float:
    """Median seconds of a step."""
    return median([b - a for a, b in itertools.pairwise(curve.seconds)])


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


if __name__ == "__main__":
    main()
