"""Weak scaling: 1, 2, 4 and 8 processes on this machine, each with the same number of rows, and
their share of communication; beside it plan's prediction for slices.

The share of communication is measured against as many processes that train the same rows at the
same time, but each by itself: they contend for this machine's cores alike, and send nothing. Writes
docs/cluster/scaling.json, the plot and the tables of docs/CLUSTER.md; --plot makes these again from
the figures that are there.
example: python scripts/weak_scaling.py --rounds 3
"""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import arguments
from bench.metrics import rows
from bench.svg import Panel, line_chart
from tqdm import tqdm

from maxstack.submit.local import members

DOCS = Path(__file__).resolve().parent.parent / "docs"
STEPS, WARM = 24, 8
ROWS = 4
MODEL = [
    "model.blocks.block.mlp.hidden=1024",
    "model.embed=256",
    "model.vocab=264",
    "data.tokenizer={kind: bytes}",
    "data.seq_len=256",
    "train.accumulate=1",
]
SLICES = 1, 2, 4, 8, 16, 32, 64
PLAN = (
    "synthetic model=llama-3.1-8b mesh.slices={slices} mesh.data=1 mesh.fsdp=256 "
    "data.seq_len=4096 train.batch_size={rows} "
    "model.remat.policy=full --topology v5e:16x16*{slices}"
)


def main() -> None:
    """Measure, plan, plot."""
    parser = arguments.parser(__doc__)
    arguments.takes_overrides(parser, "the processes' configuration")
    parser.add_argument(
        "--counts",
        type=_counts,
        default=[1, 2, 4, 8],
        metavar="N,N",
        help="of processes (default: 1,2,4,8)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="each count so often, in turn; the fastest counts"
    )
    parser.add_argument(
        "--only", choices=["processes", "plan"], help="the other keeps the figures that are there"
    )
    parser.add_argument("--plot", action="store_true", help="run nothing")
    parser.add_argument(
        "--docs", type=Path, default=DOCS, help="the folder that holds CLUSTER.md and cluster/"
    )
    args = parser.parse_intermixed_args()
    path = args.docs / "cluster" / "scaling.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if not args.plot and args.only != "plan":
        found["processes"] = processes(args.counts, args.rounds, args.overrides)
        found["machine"] = f"{os.cpu_count()} cores, {platform.machine()}"
    if not args.plot and args.only != "processes":
        found["plan"] = {
            slices: planned(slices) for slices in tqdm(SLICES, unit=" plans", disable=None)
        }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(path.read_text())
    path.with_suffix(".svg").write_text(plot(found))
    page = args.docs / "CLUSTER.md"
    arguments.write_block(page, "<!-- scaling -->", "<!-- end -->", f"\n{table(found)}\n")


def _counts(text: str) -> list[int]:
    return [*map(int, text.split(","))]


def processes(counts: list[int], rounds: int, overrides: list[str]) -> dict[int, dict[str, float]]:
    """Count -> seconds of a step with all processes in one run, and with each in its own."""
    found: dict[int, dict[str, float]] = {count: {} for count in counts}
    for _ in tqdm(range(rounds), unit=" rounds", disable=None):
        for count in counts:
            for kind, together in (("together", True), ("apart", False)):
                seconds = measured(count, together, overrides)
                found[count][kind] = min(seconds, found[count].get(kind, seconds))
    return found


def measured(count: int, together: bool, overrides: list[str]) -> float:
    """Median seconds of a step, of the slowest process."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        batch = ROWS * (count if together else 1)
        common = [
            sys.executable,
            "-m",
            "maxstack.train",
            "quickstart",
            f"run.output_dir={folder}",
            "run.tensorboard=false",
            *MODEL,
            "eval.every=0",
            "eval.baselines=false",
            "checkpoint.every=0",
            f"train.steps={STEPS}",
            f"train.batch_size={batch}",
            "faults.watchdog=null",
            *overrides,
        ]
        started = []
        for i, own in enumerate(members(count) if together else [{}] * count):
            name = "run.name=one" if together else f"run.name=run-{i}"
            process = subprocess.Popen(
                [*common, name],
                env=os.environ | own | {"JAX_PLATFORMS": "cpu"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            started.append(ending.enter_context(process))
        for process in started:
            if process.wait():
                raise SystemExit(f"{count} processes: one left with {process.returncode}")
        files = sorted(Path(folder).glob("*/metrics.jsonl"))
        return max(
            statistics.median(
                row["step_seconds"] for row in rows(file, "step_seconds") if row["step"] > WARM
            )
            for file in files
        )


def planned(slices: int) -> dict[str, float]:
    """Prediction of `maxstack plan` for slices of 256 chips, with the same rows on each chip."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "plan.json"
        words = PLAN.format(slices=slices, rows=256 * slices).split()
        subprocess.run(
            [sys.executable, "-m", "maxstack.cli", "plan", *words, "--json", str(target)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        plan = json.loads(target.read_text())
        return {
            "chips": plan["devices"],
            "seconds": plan["roofline"]["seconds"],
            "tokens_per_second": plan["tokens_per_second"],
            "limit": plan["roofline"]["limit"],
        }


def plot(found: dict[str, Any]) -> str:
    """Efficiency: tokens a second of one process, or chip, over those of the smallest run."""
    panels = []
    if "processes" in found:
        given = {int(count): row for count, row in found["processes"].items()}
        share = {count: 1 - row["apart"] / row["together"] for count, row in given.items()}
        panels.append(
            Panel(
                f"measured: processes on {found['machine']}",
                "processes",
                "share of a step",
                {"communication": [(count, max(0.0, part)) for count, part in share.items()]},
            )
        )
    if "plan" in found:
        plans = [*found["plan"].values()]
        first = plans[0]["tokens_per_second"] / plans[0]["chips"]
        panels.append(
            Panel(
                "plan: Llama 3.1 8B on slices of 256 TPU v5e",
                "chips",
                "tokens/s of a chip, over one slice",
                {
                    "plan's bound": [
                        (row["chips"], row["tokens_per_second"] / row["chips"] / first)
                        for row in plans
                    ]
                },
            )
        )
    return line_chart(
        "Weak scaling", "the same rows for each process, or chip, however many there are", panels
    )


def table(found: dict[str, Any]) -> str:
    """Both figures as tables."""
    lines = ["![weak scaling](cluster/scaling.svg)", ""]
    if "processes" in found:
        lines += [
            "| Processes | A step together | A step each by itself, at once | Communication |",
            "|---|---|---|---|",
        ]
    for count, row in found.get("processes", {}).items():
        lines.append(
            f"| {count} | {row['together'] * 1e3:.0f} ms | {row['apart'] * 1e3:.0f} ms | "
            f"{1 - row['apart'] / row['together']:.0%} |"
        )
    lines += [
        "",
        "| Slices of TPU v5e:16x16 | Chips | A step at best | Tokens/s of a chip, over "
        "one slice | Limited by |",
        "|---|---|---|---|---|",
    ]
    plans = found.get("plan", {})
    for slices, row in plans.items():
        each = row["tokens_per_second"] / row["chips"]
        first = plans["1"]["tokens_per_second"] / plans["1"]["chips"]
        lines.append(
            f"| {slices} | {row['chips']:,} | {row['seconds']:.3f} s | "
            f"{each / first:.1%} | {row['limit']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
