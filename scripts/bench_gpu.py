"""Training, attention, linear cross-entropy and grouped matmul on this machine's GPU, beside
PyTorch: a table, and every figure as JSON.

check           values and gradients of every kernel against float64 on the device
train           the step of `maxstack train` at a Llama 3.2 1B shape; the largest batch that fits
attention       by sequence length, beside flash and cuDNN attention of PyTorch
cross_entropy   time and memory beside whole logits
grouped_matmul  experts beside one dense matmul of as many rows
ceilings        one large matmul and one copy

A kernel that fails its checks is not timed. Figures are written as they come: nothing is lost when
time runs out. PyTorch is left out where it is not installed.

example: python scripts/bench_gpu.py --out results      all of it, in nine minutes
         python scripts/bench_gpu.py --only attention --quick
         python scripts/bench_gpu.py --tiny             the whole path at toy sizes, on any machine
"""

import contextlib
import datetime
import json
import os
import queue
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import arguments
from bench.gpu_tables import TABLES, report
from bench.machine import lacks, processor
from bench.metrics import rows

ROOT = Path(__file__).resolve().parent.parent
MARK = "@bench "
SHARES = {
    "check": 20,
    "train": 36,
    "attention": 30,
    "cross_entropy": 10,
    "grouped_matmul": 7,
    "ceilings": 2,
}
"""Shares of the time; what a section leaves goes to those that follow."""
OPS = {
    "attention": ["attention"],
    "cross_entropy": ["linear_cross_entropy"],
    "grouped_matmul": ["grouped_matmul"],
    "ceilings": [],
}
"""Ops that are checked before a section; before `train` all."""
TORCH = {"train": ["torch", "transformers"], "attention": ["torch"]}
BUDGETS = {"full": 540, "quick": 240, "small": 3600, "tiny": 900}
STARTS = 12
"""Most processes of a section: each kernel that ends one costs one."""
BATCHES = {"full": (8, 16, 4, 2), "quick": (8, 4, 2), "small": (4,), "tiny": (2,)}
SHAPES = {
    "full": (128256, 2048, 16, 16, 4, 128, 8192, 4096),
    "small": (4096, 256, 4, 4, 2, 64, 1024, 512),
    "tiny": (256, 32, 2, 2, 1, 16, 64, 64),
}
COLUMNS = "vocab", "embed", "layers", "heads", "kv_heads", "head_dim", "hidden", "length"
"""Full: Llama 3.2 1B, 1,235,814,400 parameters, but with heads of 128 channels, half as many of
them, as large models have."""
TRAIN = """
import jax, json, sys
from maxstack import train
code = train.main(sys.argv[1:])
print("@bench", json.dumps((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")))
sys.exit(code)
"""
Row = dict[str, Any]


def main() -> None:
    """Run the sections and print the table; exit with 1 if a kernel is wrong."""
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "finished": False,
        "device": {},
        "machine": {"processor": processor()},
        "left_out": {},
        "rows": [],
    }
    end = time.time() + args.budget
    sections = [name for name in SHARES if name in args.only or name == "check"]
    for section in sections:
        left = sum(SHARES[name] for name in sections[sections.index(section) :])
        until = time.time() + (end - time.time()) * SHARES[section] / left
        measure = train(args, until) if section == "train" else worker(section, args, until, found)
        for event in measure:
            keep(event, found, args.out)
        if section in TORCH:
            beside_torch(section, args, end, found)
    found["finished"] = True
    keep({}, found, args.out)
    print(report(found))
    sys.exit(any(row["status"] == "wrong" for row in found["rows"]))


def parse() -> Any:
    """The command line."""
    parser = arguments.parser(__doc__)
    choices = ", ".join(name for name in SHARES)
    parser.add_argument("--only", default=",".join(SHARES), help=f"A,B of {choices}")
    sizes = parser.add_mutually_exclusive_group()
    for size, meaning in (
        ("quick", "one length and shape of each kind"),
        ("small", "sizes that a CPU can measure"),
        ("tiny", "sizes that only show that everything runs"),
    ):
        sizes.add_argument(f"--{size}", dest="size", action="store_const", const=size, help=meaning)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_gpu"), help="a folder")
    parser.add_argument("--budget", type=float, help="seconds in all, compilation included")
    parser.add_argument("--batch", help="A,B: batch sizes to train with, in this order")
    parser.add_argument("--tuned", help="block sizes, as `maxstack tune --out FILE` writes them")
    parser.add_argument("--silence", type=float, default=200, help="seconds until a job is ended")
    arguments.takes_peer_python(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the training run")
    args = parser.parse_intermixed_args()
    args.size, args.only = args.size or "full", args.only.split(",")
    if unknown := {*args.only} - {*SHARES}:
        parser.error(f"--only {','.join(unknown)}: there are {choices}")
    args.budget = args.budget or BUDGETS[args.size]
    return args


def keep(event: dict[str, Any], found: dict[str, Any], out: Path) -> None:
    """Add an event to the results, and write them; a reader never sees half of a file."""
    if "figures" in event:
        found["rows"].append(event["row"] | event["figures"])
        print(json.dumps(found["rows"][-1]), file=sys.stderr, flush=True)
    elif "left_out" in event:
        found["left_out"][event["left_out"]] = event["reason"]
    found["device"] = event.get("device") or found["device"]
    for name, text in (("json", json.dumps(found, indent=1) + "\n"), ("md", report(found))):
        unfinished = out / f".bench_gpu.{name}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(out / f"bench_gpu.{name}")


def events(command: list[str], given: Any, silence: float) -> Iterator[Any]:
    """What a process prints behind MARK, then {"ended": how} unless it ended with 0. It is killed
    where it says nothing for `silence` seconds."""
    paths = [str(ROOT / "scripts"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    with contextlib.suppress(BrokenPipeError):  # then it ended, which is told below
        process.stdin.write(json.dumps(given))
        process.stdin.close()
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=lambda: [*map(lines.put, process.stdout), lines.put(None)])
    reader.start()
    said: list[str] = []
    try:
        while line := lines.get(timeout=silence):
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
            else:
                said.append(line)
    except queue.Empty:
        process.kill()
        said.append(f"nothing was said for {silence:.0f} s")
    if code := process.wait():
        yield {"ended": f"the process ended with code {code}: {''.join(said[-20:])[-400:]}"}


def worker(section: str, args: Any, until: float, found: dict[str, Any]) -> Iterator[Row]:
    """The events of a section; a kernel that ends the process becomes a failed row, and another
    process goes on."""
    ops = {op: None for name in args.only for op in OPS.get(name, sum(OPS.values(), []))}
    given = {"section": section, "size": args.size, "ops": [*ops], "end": until}
    given |= {"verdicts": verdicts(found["rows"]), "tuned": args.tuned, "done": []}
    for _ in range(STARTS):
        at = ended = None
        for event in events([sys.executable, "-m", "bench.gpu_worker"], given, args.silence):
            if "begin" in event:
                at = event["begin"]
                continue
            if "ended" in event:
                ended = event["ended"]
                break
            if "figures" in event:
                given["done"].append(event["row"])
                at = None
            yield event
        if not ended:
            return
        if at is None:
            yield {"left_out": section, "reason": ended}
            return
        given["done"].append(at)
        yield {"row": at, "figures": {"status": "failed", "reason": ended}}


def verdicts(found: list[Row]) -> dict[str, str]:
    """`op backend` -> wrong, failed, ok, or absent where no check could be tried."""
    statuses: dict[str, set[str]] = {}
    for row in found:
        if row["section"] == "check":
            statuses.setdefault(f"{row['op']} {row['backend']}", set()).add(row["status"])
    order = "wrong", "failed", "ok"
    return {name: next((s for s in order if s in of), "absent") for name, of in statuses.items()}


def train(args: Any, until: float) -> Iterator[Row]:
    """`maxstack train` on random tokens with each batch size until one fits: the medians of its
    steps after the first five."""
    shape = dict(zip(COLUMNS, SHAPES["full" if args.size == "quick" else args.size], strict=True))
    heads = {name: shape[name] for name in ("heads", "kv_heads", "head_dim")}
    block = {"block": {"mixer": heads, "mlp": {"hidden": shape["hidden"]}}}
    model = {"preset": "llama-3.2-1b", "blocks": block}
    model |= {name: shape[name] for name in ("vocab", "embed", "layers")}
    fits = 0
    for batch in map(int, args.batch.split(",")) if args.batch else BATCHES[args.size]:
        if batch < fits or time.time() > until:
            continue
        row = {"section": "train", "program": "maxstack", "batch": batch, **shape}
        name = f"train-{batch}"
        words = [
            "synthetic",
            f"run={{output_dir: {args.out.absolute()}, name: {name}, trackers: []}}",
            f"model={json.dumps(model)}",
            f"data.sources=[{{kind: synthetic, vocab: {shape['vocab']}}}]",
            f"data.seq_len={shape['length']}",
            "data.packing=none",
            f"train={{steps: {8 if args.size == 'tiny' else 25}, batch_size: {batch}}}",
            "eval.every=0",
            "checkpoint.every=0",
            *([f"run.tuned={args.tuned}"] if args.tuned else []),
            *args.overrides,
        ]
        peak, *ended = [*events([sys.executable, "-c", TRAIN, *words], None, args.silence)]
        if ended or isinstance(peak, dict):
            reason = (ended or [peak])[0]["ended"]
            status = "too large" if "RESOURCE_EXHAUSTED" in reason else "failed"
            yield {"row": row, "figures": {"status": status, "reason": reason}}
            continue
        fits = max(fits, batch)
        steps = rows(args.out / name / "metrics.jsonl", "step_seconds")[5:]
        middle = {key: statistics.median(step.get(key, 0) for step in steps) for key in MEDIANS}
        figures = {"status": "ok", "peak_bytes": peak, "mfu_causal": middle["mfu"] or None}
        figures |= {"step_ms": 1e3 * middle["step_seconds"]}
        figures |= {"tokens_per_second": middle["tokens_per_second"]}
        yield {"row": row, "figures": figures}


MEDIANS = "step_seconds", "tokens_per_second", "mfu"


def beside_torch(section: str, args: Any, end: float, found: dict[str, Any]) -> None:
    """PyTorch on the shapes of a section that ran before."""
    if missing := lacks(args.peer_python, TORCH[section]):
        reason = f"{' and '.join(missing)} not installed; --peer-python names another interpreter"
        return keep({"left_out": f"torch {section}", "reason": reason}, found, args.out)
    named = ("section", "mask", "head_dim", "length", "batch", "heads", "window", "dtype", *COLUMNS)
    own = [row for row in found["rows"] if row["section"] == section]
    shapes = [{name: row[name] for name in named if name in row} for row in own]
    given = {"section": section, "rows": [s for i, s in enumerate(shapes) if s not in shapes[:i]]}
    for event in events([args.peer_python, "-m", "bench.gpu_torch"], given, args.silence):
        if "ended" in event:
            event = {"left_out": f"torch {section}", "reason": event["ended"]}
        keep(event, found, args.out)
        if time.time() > end:
            return


assert {*TABLES} == {*SHARES}

if __name__ == "__main__":
    main()
