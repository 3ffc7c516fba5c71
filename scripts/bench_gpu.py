"""Training, attention, linear cross-entropy and grouped matmul on the GPU at hand, beside PyTorch:
a table, and every figure as JSON.

Needs jax, flax and optax; torch and transformers serve the comparison where they are. Each backend
is first held against float64 on the device; one that is wrong is reported so, and its speed is not
shown. Results are written as they come, so that nothing is lost when time runs out.

example: python scripts/bench_gpu.py --out results      all of it, in nine minutes
         python scripts/bench_gpu.py --only attention --quick
         python scripts/bench_gpu.py --tiny             the whole path at toy sizes, on any machine
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.arguments import parser as parser_of
from bench.gpu_processes import Outcome, events, lacks, work
from bench.gpu_tables import line, report

SHARES = {
    "check": 20,
    "train": 20,
    "torch train": 16,
    "attention": 26,
    "cross_entropy": 10,
    "grouped_matmul": 7,
    "ceilings": 2,
    "torch attention": 4,
}
"""Of the time, in the order in which they run; what one leaves over goes to those after it."""
OPS = {
    "train": ["attention", "linear_cross_entropy"],
    "attention": ["attention"],
    "cross_entropy": ["linear_cross_entropy"],
    "grouped_matmul": ["grouped_matmul"],
}
"""What is checked before a section."""
EVERY = "attention", "linear_cross_entropy", "grouped_matmul"
CHOICES = [*OPS, "ceilings", "check"]
BUDGETS = {"full": 540, "quick": 240, "small": 3600, "tiny": 900}
TORCH = {"torch train": ["torch", "transformers"], "torch attention": ["torch"]}


def main() -> None:
    """Run what is asked for and print the table."""
    args = arguments()
    results = Results(args)
    given = {
        "size": args.size,
        "repeats": 3 if args.size == "tiny" else 5,
        "rows": [],
        "shares": shares(args.only, args.tune),
        "batches": args.batch,
        "attention": args.attention,
        "xla": args.xla.split(","),
        "tune": args.tune,
        "quantization": args.quantization.split(","),
        "tuned": str(args.tuned or args.out / "tuned.json"),
        "threads": max(1, min(8, (os.cpu_count() or 1) // 2)),
        "end": time.time() + args.budget,
        "ops": [
            op
            for op in EVERY
            if not {*args.only} & {*OPS} or any(op in OPS.get(section, ()) for section in args.only)
        ],
    }
    waiting: list[str] = []
    for section in [*given["shares"]]:
        if section not in TORCH:
            waiting.append(section)
        elif missing := lacks(args.peer_python, TORCH[section]):
            results.leave_out(
                section,
                f"{' and '.join(missing)} not installed; --peer-python names an "
                "interpreter that has it",
            )
        else:
            jax_sections(waiting, given, args, results)
            waiting = []
            torch_section(section, given, args, results)
    jax_sections(waiting, given, args, results)
    results.finish()
    sys.exit(any(row["status"] == "wrong" for row in results.rows("check")))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only", help=f"sections, separated by commas: {', '.join(CHOICES)}; each is checked first"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick",
        dest="size",
        action="store_const",
        const="quick",
        help="one length and shape of each kind",
    )
    size.add_argument(
        "--small",
        dest="size",
        action="store_const",
        const="small",
        help="sizes that a CPU can measure",
    )
    size.add_argument(
        "--tiny",
        dest="size",
        action="store_const",
        const="tiny",
        help="sizes that only show that everything runs",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/bench_gpu"),
        help="folder for bench_gpu.json and bench_gpu.md",
    )
    parser.add_argument(
        "--budget",
        type=float,
        help="seconds in all, compilation included; no job begins after its section's share "
        "is over",
    )
    parser.add_argument(
        "--batch",
        type=lambda text: [int(part) for part in text.split(",")],
        help="batch sizes to train with, in this order",
    )
    parser.add_argument(
        "--attention", default="auto", help="attention backend of the training step"
    )
    parser.add_argument(
        "--xla",
        default="none",
        help="presets of configs/xla for the training step, separated by commas; none: no flags",
    )
    parser.add_argument(
        "--quantization",
        default="none",
        help="presets of configs/quantization for the training step, separated by commas, as "
        "none,int8,fp8; none: bfloat16",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="before training, measure every block size that a kernel offers; the best go to "
        "--tuned",
    )
    parser.add_argument(
        "--tuned",
        type=Path,
        help="table of block sizes, as `maxstack tune` writes it (default: tuned.json in --out)",
    )
    parser.add_argument(
        "--silence",
        type=float,
        default=200.0,
        help="seconds after which a job that says nothing is given up",
    )
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        help="the interpreter that has torch and transformers, if another",
    )
    args = parser.parse_args()
    args.size = args.size or "full"
    args.budget = args.budget or BUDGETS[args.size]
    args.only = args.only.split(",") if args.only else CHOICES
    if unknown := {*args.only} - {*CHOICES}:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(CHOICES)}")
    return args


def shares(only: list[str], tune: bool) -> dict[str, int]:
    """Of everything that runs: what is asked for, its checks before it, and torch beside it;
    training after tuning."""
    order = sorted(SHARES, key=lambda name: tune and name.endswith("train"))
    return {
        name: SHARES[name]
        for name in order
        if name == "check" and {*only} & {*OPS, "check"} or name.removeprefix("torch ") in only
    }


def jax_sections(
    sections: list[str], given: dict[str, Any], args: argparse.Namespace, results: "Results"
) -> None:
    """Several sections in one process, which has the GPU to itself."""
    if sections:
        work(
            sys.executable,
            sections,
            given | {"rows": results.checks()},
            args.silence,
            args.out / "bench_gpu.log",
            results.hear,
        )


def torch_section(
    section: str, given: dict[str, Any], args: argparse.Namespace, results: "Results"
) -> None:
    """PyTorch's side of a section that ran before, on the same shapes."""
    name = section.removeprefix("torch ")
    rows = results.rows(name)
    if name == "train":
        fitting = [row["batch"] for row in rows if row["status"] in ("ok", "wrong")]
        shape = (
            {
                key: rows[0][key]
                for key in (
                    "vocab",
                    "embed",
                    "layers",
                    "heads",
                    "kv_heads",
                    "head_dim",
                    "hidden",
                    "length",
                )
            }
            if rows
            else {}
        )
        batches = {*fitting, *((8, 4, 2, 1) if args.size in ("full", "quick") else ())} or {1}
        todo: dict[str, Any] = {"shape": shape, "batches": sorted(batches, reverse=True)}
        module = "bench.torch_llama_gpu"
    else:
        cases = {
            json.dumps(
                {
                    key: row[key]
                    for key in ("mask", "head_dim", "length", "batch", "heads", "window", "dtype")
                }
            )
            for row in rows
        }
        todo, module = (
            {
                "cases": [json.loads(case) for case in sorted(cases)],
                "calls": 2 if args.size == "tiny" else 20,
            },
            "bench.torch_attention_gpu",
        )
    if not rows:
        return results.leave_out(section, f"the section {name} has no rows")
    begin = time.time()
    for event in events(
        [args.peer_python, "-m", module],
        todo,
        args.silence,
        min(given["end"], begin + args.budget / 3),
        args.out / "bench_gpu.log",
    ):
        if not isinstance(event, Outcome):
            row = event["row"]
            peak, flops = (
                results.found["device"].get("peak_bf16_flops"),
                rows[0].get("flops_per_token_causal"),
            )
            if peak and flops and "tokens_per_second" in row:
                row["mfu_causal"] = row["tokens_per_second"] * flops / peak
            results.hear(
                {
                    "row": {"section": name}
                    | ({"length": rows[0]["length"]} if name == "train" else {})
                    | row
                }
            )
        elif event.code != 0:
            results.leave_out(
                section,
                "the process "
                f"{'was ended' if event.code is None else f'ended with code {event.code}'}: "
                f"{event.tail[-400:]}",
            )
    results.hear({"section": section, "seconds": round(time.time() - begin, 1)})


class Results:
    """What was found so far, in the files and on the screen."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._out = args.out
        self._out.mkdir(parents=True, exist_ok=True)
        found = {
            "date": datetime.datetime.now().isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv),
            "size": args.size,
            "finished": False,
            "device": {},
            "machine": machine(),
            "left_out": {},
            "seconds": {},
            "rows": [],
        }
        self.found: dict[str, Any] = found

    def hear(self, event: dict[str, Any]) -> None:
        """An event of a worker."""
        if "device" in event:
            self.found["device"] = event["device"]
            print(f"device: {event['device']['kind']}", file=sys.stderr, flush=True)
        elif "row" in event:
            self.found["rows"].append(event["row"])
            print(line(event["row"], self.found["device"]), file=sys.stderr, flush=True)
        elif "left_out" in event:
            self.leave_out(event["left_out"], event["reason"])
        else:
            self.found["seconds"][event["section"]] = event["seconds"]
        self.write()

    def leave_out(self, section: str, reason: str) -> None:
        """Something that was not measured."""
        self.found["left_out"][section] = reason
        print(f"{section} is left out: {reason}", file=sys.stderr, flush=True)
        self.write()

    def rows(self, section: str) -> list[dict[str, Any]]:
        """Those of a section."""
        return [row for row in self.found["rows"] if row["section"] == section]

    def checks(self) -> list[dict[str, Any]]:
        """What a worker must know of the checks before it."""
        return [
            {key: row[key] for key in ("op", "backend", "case", "status")}
            for row in self.rows("check")
        ]

    def write(self) -> None:
        """Both files; a reader never sees half of one."""
        for name, text in (
            ("bench_gpu.json", json.dumps(self.found, indent=1) + "\n"),
            ("bench_gpu.md", report(self.found)),
        ):
            unfinished = self._out / f".{name}"
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(self._out / name)

    def finish(self) -> None:
        """The table on the screen."""
        self.found["finished"] = True
        self.write()
        print(report(self.found))
        print(
            f"written: {self._out / 'bench_gpu.json'}, {self._out / 'bench_gpu.md'}",
            file=sys.stderr,
        )


def machine() -> dict[str, Any]:
    """Processor, GPU driver and commit."""

    def said(*command: str) -> str | None:
        try:
            return (
                subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    check=True,
                    timeout=20,
                    cwd=Path(__file__).parent,
                ).stdout.strip()
                or None
            )
        except (OSError, subprocess.SubprocessError):
            return None

    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "commit": said("git", "rev-parse", "--short", "HEAD"),
        "gpu": said(
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,power.limit",
            "--format=csv,noheader",
        ),
    }


def processor() -> str:
    """The name of the first processor."""
    try:
        rows = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        rows = []
    return next(
        (row.partition(":")[2].strip() for row in rows if row.startswith("model name")),
        platform.processor(),
    )


if __name__ == "__main__":
    main()
