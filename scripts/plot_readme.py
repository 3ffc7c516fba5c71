"""The pictures of README.md, docs/EVALUATION.md and docs/PROFILE.md, from the data beside them in
docs/pictures.

loss.svg: the quickstart's loss, from loss.json. tasks.svg: its shipped tasks, from tasks.json.
plan.svg: a screen of `maxstack plan`, from plan.txt. profile.svg: one of `maxstack profile`, from
profile.txt; layers.svg: its layers, from profile.json. --metrics makes loss.json anew of a run's
metrics.jsonl, --tasks tasks.json; --plan runs the plan again into plan.txt, --profile reads the
newest trace of a run.
example: python scripts/plot_readme.py --metrics runs/quickstart/metrics.jsonl
         python scripts/plot_readme.py --check
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import arguments
from bench.metrics import rows
from bench.svg import Panel, bar_chart, line_chart, screen

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
PLAN = (
    "maxstack plan synthetic model=llama-3.1-8b mesh=v5e-256 data.seq_len=8192 "
    "train.batch_size=256 model.remat.policy=full --topology v5e:16x16 --tokens 15T --mfu 0.4"
)
LAYERS = 10
"""Layers in their picture, those that take longest."""
MEAN = 10
"""Steps in one point of the curve."""


def main() -> None:
    """Take new data where some is given, and draw what changed."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="of a run of the quickstart")
    parser.add_argument("--tasks", type=Path, metavar="FILE", help="of one with more evaluations")
    parser.add_argument("--plan", action="store_true", help="run the plan again (extra plan-tpu)")
    parser.add_argument("--profile", metavar="RUN", help="a run with a trace")
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
    if args.profile:
        profiled(args.profile, args.pictures)
    arguments.write_or_check(drawn(args.pictures), args.check)


def thinned(metrics: Path) -> dict[str, Any]:
    """The training loss as means of MEAN steps and every held-out loss: (step, nats a token)."""
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
    """The share of right answers by task, by its first metric, as (step, share)."""
    found = rows(metrics, "tasks_seconds")
    shares = {}
    for key in found[0]:
        if key.endswith(("/acc", "/acc_norm")):
            shares.setdefault(key.split("/")[1], key)
    return {
        name: [(row["step"], row[key]) for row in found]
        for name, key in shares.items()
        if name != "pairs"
    }


def planned() -> str:
    """The command and what it prints."""
    return printed(PLAN)


def printed(line: str, *more: str) -> str:
    """A command and what it prints; `more` words are given and not shown."""
    command = [sys.executable, "-m", "maxstack.cli", *shlex.split(line)[1:], *more]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return "".join(f"{line.rstrip()}\n" for line in [f"$ {line}", *said.splitlines()])


def profiled(run: str, pictures: Path) -> None:
    """Write the screen of a run's profile, and ms of its layers by direction."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        text = printed(f"maxstack profile {run}", "--json", str(path))
        figures = json.loads(path.read_text())
    rows = [(row["name"], row["seconds"]) for row in figures["layers"][:LAYERS]]
    layers = {name: {way: round(1e3 * s, 2) for way, s in of.items()} for name, of in rows}
    title = f"{figures['tokens']:,} tokens a step; {os.cpu_count()} cores, {platform.machine()}"
    (pictures / "profile.txt").write_text(text)
    (pictures / "profile.json").write_text(json.dumps({"note": title, "layers": layers}) + "\n")


def drawn(pictures: Path) -> dict[Path, str]:
    """The files and what they should hold."""
    found = json.loads((pictures / "loss.json").read_text())
    series = {
        f"training, mean of {MEAN} steps": found["training"],
        "held-out files": found["held_out"],
    }
    loss = line_chart(
        "maxstack train quickstart",
        f"loss, nats a token; {found['machine']}, CPU",
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
    profile = screen("maxstack profile", (pictures / "profile.txt").read_text().splitlines())
    measured = json.loads((pictures / "profile.json").read_text())
    of_layers = measured["layers"]
    ways = list(dict.fromkeys(way for seconds in of_layers.values() for way in seconds))
    layers = bar_chart(
        "maxstack profile: a step of the quickstart by layer and direction",
        measured["note"],
        "ms",
        ways,
        [(name, [of.get(way, 0.0) for way in ways]) for name, of in of_layers.items()],
    )
    return {
        pictures / "loss.svg": loss,
        pictures / "tasks.svg": tasks,
        pictures / "plan.svg": plan,
        pictures / "profile.svg": profile,
        pictures / "layers.svg": layers,
    }


if __name__ == "__main__":
    main()
