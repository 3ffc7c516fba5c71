"""Sorting digits by GRPO, ours beside TRL's on the same task, model and settings: seconds and
samples until the share of right answers, a mean over five steps, reaches a mark.

Needs a run of configs/recipes/sort-base.yml, and the environment of `make oracle`. Rounds go in
turns; their seeds differ. Seconds are of training alone, from the first step on, and of the whole
command.

example: python scripts/bench_rl.py --base runs/sort-base --out bench-rl
"""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
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

    @property
    def step(self) -> float:
        """Median seconds of a step."""
        return median(b - a for a, b in itertools.pairwise(self.seconds))

    def reach(self, mark: float) -> tuple[int, float]:
        """(steps, seconds of training) until the mean of rewards reaches the mark; infinite seconds
        where it never does."""
        for step in range(MEAN, len(self.rewards) + 1):
            if sum(self.rewards[step - MEAN : step]) / MEAN >= mark:
                return step, self.seconds[step - 1]
        return len(self.rewards), float("inf")


def main() -> None:
    """Run both in turns, and print what each needed."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--base", type=Path, required=True, help="a run of sort-base.yml")
    parser.add_argument("--out", type=Path, required=True, help="a folder for what is made")
    parser.add_argument("--steps", type=int, default=150, help="(default: 150)")
    arguments.takes_rounds(parser, 3, "runs of each")
    parser.add_argument("--trl-python", type=Path, default=TRL, help="(default: %(default)s)")
    arguments.takes_overrides(parser, "ours")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.out / "model"
    if not folder.exists():
        timed("-m", "maxstack.cli", "export", args.base, "--out", folder, "--dtype", "float32")
    curves: dict[str, list[Curve]] = {"maxstack": [], "TRL": []}
    for seed in range(args.rounds):
        curves["maxstack"].append(ours(args, seed))
        curves["TRL"].append(theirs(args, folder, seed))
    for name, found in curves.items():
        step = median(curve.step for curve in found)
        before = median(curve.before for curve in found)
        print(f"\n{name}: a step takes {step:.3f} s, the start {before:.1f} s")
        for mark in MARKS:
            reached = [curve.reach(mark) for curve in found]
            samples = SAMPLES * median(step for step, _ in reached)
            seconds = median(second for _, second in reached)
            print(f"  to {mark:.2f}: {samples:,.0f} samples, {seconds:.1f} s of training")
    for mark in MARKS:
        pairs = zip(curves["maxstack"], curves["TRL"], strict=True)
        ratios = [b.reach(mark)[1] / a.reach(mark)[1] for a, b in pairs]
        print(f"TRL's seconds over ours, to {mark:.2f}: {', '.join(f'{x:.2f}' for x in ratios)}")


def ours(args: Any, seed: int) -> Curve:
    """A run of ours."""
    name = f"seed-{seed}"
    whole = timed(
        *("-m", "maxstack.train", "configs/recipes/grpo-sort.yml"),
        *(f"model.from={args.base.absolute()}", f"run.output_dir={args.out.absolute()}"),
        *(f"run.name={name}", f"train.seed={seed}", f"data.seed={seed}"),
        *(f"train.steps={args.steps}", "run.trackers=[]", "eval.every=0", "checkpoint.every=0"),
        *args.overrides,
    )
    found = rows(args.out / name / "metrics.jsonl", "reward")[-args.steps :]
    seconds = [*itertools.accumulate(row["step_seconds"] for row in found)]
    return Curve([row["reward"] for row in found], seconds, whole - seconds[-1])


def theirs(args: Any, folder: Path, seed: int) -> Curve:
    """A run of TRL's."""
    file, script = args.out / f"trl-{seed}.jsonl", ROOT / "scripts/bench/trl_sort.py"
    words = "--model", folder, "--steps", args.steps, "--seed", seed, "--out", file
    whole = timed(script, *words, python=args.trl_python)
    found = [*map(json.loads, file.read_text().splitlines())]
    seconds = [row["seconds"] for row in found]
    return Curve([row["reward"] for row in found], seconds, whole - seconds[-1])


def timed(*words: object, python: object = sys.executable) -> float:
    """Seconds that a command takes."""
    began = time.monotonic()
    command = [str(python), *map(str, words)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
