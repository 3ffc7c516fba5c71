"""Training, attention, linear cross-entropy and grouped matmul on this machine's GPU, beside
PyTorch: a table, and every figure as JSON.

Needs jax, flax and optax; torch and transformers are compared with if they are installed. Each
backend is first compared with float64 on the device; a wrong one is reported, and its speed is not
shown. Results are written as they come, so that nothing is lost when time runs out.

example: python scripts/bench_gpu.py --out results      all of it, in nine minutes
         python scripts/bench_gpu.py --only attention --quick
         python scripts/bench_gpu.py --tiny             the whole path at toy sizes, on any machine
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.arguments import parser as parser_of
from bench.arguments import takes_peer_python
from bench.gpu_processes import Outcome, events, lacks, work
from bench.gpu_tables import line, report
from bench.machine import processor

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
"""Shares of the time by section, in their order; unused time goes to the sections that follow."""
OPS = {
    "train": ["attention", "linear_cross_entropy"],
    "attention": ["attention"],
    "cross_entropy": ["linear_cross_entropy"],
    "grouped_matmul": ["grouped_matmul"],
}
"""Ops that are checked before a section."""
EVERY = "attention", "linear_cross_entropy", "grouped_matmul"
CHOICES = [*OPS, "ceilings", "check"]
BUDGETS = {"full": 540, "quick": 240, "small": 3600, "tiny": 900}
SHAPE = "vocab", "embed", "layers", "heads", "kv_heads", "head_dim", "hidden", "length"
"""Columns of `train` that describe the model for torch."""
CASE = "mask", "head_dim", "length", "batch", "heads", "window", "dtype"
"""Columns of `attention` that describe a call for torch."""
TORCH = {"torch train": ["torch", "transformers"], "torch attention": ["torch"]}


def main() -> None:
    """Run the sections and print the table."""
    args = arguments()
    results = Results(args)
    ops = [op for op in EVERY if any(op in OPS.get(section, ()) for section in args.only)] or EVERY
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
        "ops": ops,
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
    group = parser.add_mutually_exclusive_group()
    for size, meaning in (
        ("quick", "one length and shape of each kind"),
        ("small", "sizes that a CPU can measure"),
        ("tiny", "sizes that only show that everything runs"),
    ):
        group.add_argument(f"--{size}", dest="size", action="store_const", const=size, help=meaning)
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
    takes_peer_python(parser)
    args = parser.parse_args()
    args.size = args.size or "full"
    args.budget = args.budget or BUDGETS[args.size]
    args.only = args.only.split(",") if args.only else CHOICES
    if unknown := {*args.only} - {*CHOICES}:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(CHOICES)}")
    return args


def shares(only: list[str], tune: bool) -> dict[str, int]:
    """Shares of the sections that run: those of --only, their checks and torch; training after
    tuning."""
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
    if not rows:
        return results.leave_out(section, f"the section {name} has no rows")
    common: dict[str, Any] = {"section": name}
    if name == "train":
        fitting = {row["batch"] for row in rows if row["status"] in ("ok", "wrong")}
        if args.size in ("full", "quick"):
            fitting |= {8, 4, 2, 1}
        shape = {key: rows[0][key] for key in SHAPE}
        todo = {"shape": shape, "batches": sorted(fitting or {1}, reverse=True)}
        module = "bench.torch_llama_gpu"
        common["length"] = rows[0]["length"]
    else:
        cases = {json.dumps({key: row[key] for key in CASE}) for row in rows}
        calls = 2 if args.size == "tiny" else 20
        todo = {"cases": [json.loads(case) for case in sorted(cases)], "calls": calls}
        module = "bench.torch_attention_gpu"
    begin = time.time()
    peak = results.found["device"].get("peak_bf16_flops")
    flops = rows[0].get("flops_per_token_causal")
    for event in events(
        [args.peer_python, "-m", module],
        todo,
        args.silence,
        min(given["end"], begin + args.budget / 3),
        args.out / "bench_gpu.log",
    ):
        if not isinstance(event, Outcome):
            row = event["row"]
            if peak and flops and "tokens_per_second" in row:
                row["mfu_causal"] = row["tokens_per_second"] * flops / peak
            results.hear({"row": common | row})
        elif event.code != 0:
            how = "was ended" if event.code is None else f"ended with code {event.code}"
            results.leave_out(section, f"the process {how}: {event.tail[-400:]}")
    results.hear({"section": section, "seconds": round(time.time() - begin, 1)})


class Results:
    """Results so far, in the files and on the screen."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._out = args.out
        self._out.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, Any] = {
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

    def hear(self, event: dict[str, Any]) -> None:
        """Take in an event of a worker."""
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
        """Note a section that was not measured."""
        self.found["left_out"][section] = reason
        print(f"{section} is left out: {reason}", file=sys.stderr, flush=True)
        self.write()

    def rows(self, section: str) -> list[dict[str, Any]]:
        """Rows of a section."""
        return [row for row in self.found["rows"] if row["section"] == section]

    def checks(self) -> list[dict[str, Any]]:
        """Results of the checks for the next worker."""
        return [
            {key: row[key] for key in ("op", "backend", "case", "status")}
            for row in self.rows("check")
        ]

    def write(self) -> None:
        """Write both files; a reader never sees half of a file."""
        for name, text in (
            ("bench_gpu.json", json.dumps(self.found, indent=1) + "\n"),
            ("bench_gpu.md", report(self.found)),
        ):
            unfinished = self._out / f".{name}"
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(self._out / name)

    def finish(self) -> None:
        """Print the table."""
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
        folder = Path(__file__).parent
        try:
            output = subprocess.check_output(
                command, stderr=subprocess.DEVNULL, text=True, timeout=20, cwd=folder
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return output.strip() or None

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


if __name__ == "__main__":
    main()
