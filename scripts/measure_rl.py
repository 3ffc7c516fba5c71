"""Measures the demonstrations of reinforcement learning: configs/recipes/sort-base.yml, and from it
grpo-sort.yml, for several seeds, and a control whose rewards are permuted; and grpo-code.yml, from
a run of quickstart.yml. They go into rl.json and rl.svg of docs/pictures and the table of
docs/RL.md, beside what is there of others. A run that is done is not done again.

example: python scripts/measure_rl.py --out measured
         python scripts/measure_rl.py --out measured --seeds --quickstart runs/quickstart
         python scripts/measure_rl.py --check
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import arguments
from bench.metrics import rows
from bench.runs import ROOT, trained
from bench.svg import Panel, line_chart

PICTURES, PAGE = ROOT / "docs" / "pictures", ROOT / "docs" / "RL.md"
BEGIN, END = "<!-- written by scripts/measure_rl.py -->", "<!-- end -->"
SEEDS = 1, 2, 3, 4, 5
CONTROL = "rewards permuted"
CODE = "quickstart"
"""The demonstration from a run of that name."""
MEAN, MEAN_OF_CODE = 5, 2
"""Steps in one point of the curves."""


def main() -> None:
    """Train, and draw."""
    parser = arguments.parser(__doc__)
    arguments.takes_runs(parser, SEEDS, PICTURES)
    parser.add_argument("--quickstart", type=Path, help="a run of it, for grpo-code.yml")
    arguments.takes_overrides(parser, "grpo-sort.yml")
    args = parser.parse_args()
    data = args.pictures / "rl.json"
    if args.out:
        before = json.loads(data.read_text()) if data.exists() else {}
        made = measured(args.out, args.seeds, args.quickstart, args.overrides)
        data.write_text(json.dumps(before | made) + "\n")
    found = json.loads(data.read_text())
    files = drawn(found, args.pictures)
    if args.pictures == PICTURES:
        files[PAGE] = arguments.with_block(PAGE.read_text(), PAGE, BEGIN, END, table(found))
    print(table(found))
    arguments.write_or_check(files, args.check)


def measured(
    out: Path, seeds: Sequence[int], quickstart: Path | None, overrides: list[str]
) -> dict[str, Any]:
    """Rewards of training and of held-out prompts, by run."""
    found = {}
    for seed in seeds:
        base = trained(out, f"base-{seed}", "sort-base", f"train.seed={seed}", f"data.seed={seed}")
        same = f"model.from={base}", f"train.seed={seed}", f"data.seed={seed}", *overrides
        found[f"seed {seed}"] = curve(trained(out, f"grpo-{seed}", "grpo-sort", *same))
        if seed == seeds[0]:
            control = trained(out, "control", "grpo-sort", *same, "rollout.permute=true")
            found[CONTROL] = curve(control)
    if quickstart:
        run = trained(out, "grpo-code", "grpo-code", f"model.from={quickstart.absolute()}")
        found[CODE] = curve(run, MEAN_OF_CODE)
    return found


def curve(run: Path, mean: int = MEAN) -> dict[str, Any]:
    """(step, reward) of training, in means of so many steps, and of evaluations."""
    rewards = [(row["step"], row["reward"]) for row in rows(run / "metrics.jsonl", "reward")]
    groups = [rewards[i : i + mean] for i in range(0, len(rewards) - mean + 1, mean)]
    held_out = [
        (row["step"], round(row["eval_reward"], 4))
        for row in rows(run / "metrics.jsonl", "eval_reward")
    ]
    return {
        "training": [(group[-1][0], round(sum(x for _, x in group) / mean, 4)) for group in groups],
        "held_out": held_out,
    }


def table(found: dict[str, Any]) -> str:
    """Rewards of held-out prompts."""
    found = {name: run for name, run in found.items() if name != CODE}
    steps = [step for step, _ in next(iter(found.values()))["held_out"]]
    lines = [
        f"| Right of 1,024 held-out prompts | {' | '.join(f'step {step}' for step in steps)} |",
        "|" + " --- |" * (len(steps) + 1),
    ]
    for name, run in found.items():
        lines.append(f"| {name} | {' | '.join(f'{share:.3f}' for _, share in run['held_out'])} |")
    return "\n".join(lines)


def drawn(found: dict[str, Any], pictures: Path) -> dict[Path, str]:
    """The picture."""
    panels = [
        Panel(
            title,
            "step",
            "share of right answers",
            {name: run[key] for name, run in found.items() if name != CODE},
            linear=True,
        )
        for key, title in (("training", "samples"), ("held_out", "1,024 held-out prompts"))
    ]
    if CODE in found:
        own = {"samples": found[CODE]["training"], "held out": found[CODE]["held_out"]}
        title = "grpo-code.yml, from quickstart's model"
        panels.append(Panel(title, "step", "share that begins as wanted", own, linear=True))
    text = line_chart(
        "maxstack train configs/recipes/grpo-sort.yml",
        "GRPO from a reward of 1 for eight digits in order, 100,160 parameters, on a CPU",
        panels,
    )
    return {pictures / "rl.svg": text}


if __name__ == "__main__":
    main()
