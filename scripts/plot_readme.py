"""The pictures of README.md and docs/EVALUATION.md, from the data beside them in docs/pictures.

loss.svg: the quickstart's loss, from loss.json. tasks.svg: its shipped tasks, from tasks.json.
plan.svg: a screen of `maxstack plan`, from plan.txt. --metrics makes loss.json anew of a run's
metrics.jsonl, --tasks tasks.json; --plan runs the plan again into plan.txt.
example: python scripts/plot_readme.py --metrics runs/quickstart/metrics.jsonl
         python scripts/plot_readme.py --check
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import arguments
from bench.metrics import rows
from bench.svg import Panel, line_chart, screen

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
PLAN = (
    "maxstack plan synthetic model=llama-3.1-8b mesh=v5e-256 data.seq_len=8192 "
    "train.batch_size=256 model.remat.policy=full --topology v5e:16x16 --tokens 15T --mfu 0.4"
)
MEAN = 10
"""Steps in one point of the curve."""


def main() -> None:
    """Take new data where some is given, and draw what changed."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="of a run of the quickstart")
    parser.add_argument("--tasks", type=Path, metavar="FILE", help="of one with more evaluations")
    parser.add_argument("--plan", action="store_true", help="run the plan again (extra plan-tpu)")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="the folder")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 if one is not up to date"
    )
    args = parser.parse_args()
    if args.metrics:
        (args.pictures / "loss.json").write_text(json.dumps(thinned(args.metrics)) + "\n")
    if args.tasks:
        (args.pictures / "tasks.json").write_text(json.dumps(by_task(args.tasks)) + "\n")
    if args.plan:
        (args.pictures / "plan.txt").write_text(planned())
    arguments.write_or_check(drawn(args.pictures), args.check)


def thinned(metrics: Path) -> dict[str, Any]:
    """The training loss as means of MEAN steps, and every held-out loss, as (step, nats a byte)."""
    losses = [(row["step"], row["loss"]) for row in rows(metrics, "loss")]
    groups = [losses[i : i + MEAN] for i in range(0, len(losses) - MEAN + 1, MEAN)]
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "training": [(group[-1][0], round(sum(x for _, x in group) / MEAN, 4)) for group in groups],
        "held_out": [
            (row["step"], round(row["eval_loss"], 4)) for row in rows(metrics, "eval_loss")
        ],
    }


def by_task(metrics: Path) -> dict[str, Any]:
    """The share of right answers by task, acc_norm where it has that, as (step, share)."""
    found = rows(metrics, "tasks_seconds")
    shares = {
        key.split("/")[1]: key for key in found[0] if key.endswith(("/acc", "/acc_norm"))
    }  # of a task's two the later
    return {
        name: [(row["step"], row[key]) for row in found]
        for name, key in shares.items()
        if name != "pairs"
    }


def planned() -> str:
    """The command and what it prints."""
    words = shlex.split(PLAN)[1:]
    command = [sys.executable, "-m", "maxstack.cli", *words]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return "".join(f"{line.rstrip()}\n" for line in [f"$ {PLAN}", *said.splitlines()])


def drawn(pictures: Path) -> dict[Path, str]:
    """The files and what they should hold."""
    found = json.loads((pictures / "loss.json").read_text())
    series = {
        f"training, mean of {MEAN} steps": found["training"],
        "held-out files": found["held_out"],
    }
    loss = line_chart(
        "maxstack train quickstart",
        f"loss, nats a byte; {found['machine']}, CPU",
        [Panel("Python's standard library", "step", "nats", series, linear=True)],
    )
    tasks = line_chart(
        "The quickstart's tasks",
        "chance: 0.5, of cloze 0.25",
        [
            Panel(
                "50 questions each",
                "step",
                "share",
                json.loads((pictures / "tasks.json").read_text()),
                linear=True,
            )
        ],
    )
    plan = screen("maxstack plan", (pictures / "plan.txt").read_text().splitlines())
    return {
        pictures / "loss.svg": loss,
        pictures / "tasks.svg": tasks,
        pictures / "plan.svg": plan,
    }


if __name__ == "__main__":
    main()
