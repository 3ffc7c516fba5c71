"""Training, attention, linear cross-entropy and grouped matmul on this machine's GPU, beside
PyTorch: a table, and every figure as JSON.

attention       by sequence length, beside flash and cuDNN attention of PyTorch
cross_entropy   time and memory beside whole logits
grouped_matmul  experts beside one dense matmul of as many rows
ceilings        one large matmul and one copy
train           the step of `maxstack train` at a Llama 3.2 1B shape; the largest batch that fits

Values and gradients of every kernel are first compared with float64 on the device; one that is
wrong is not timed. Each kernel has a process of its own, so that one that crashes or hangs costs
its own rows. Figures are written as they come. PyTorch is left out where it is not installed.

example: python scripts/bench_gpu.py --out results      all of it, in nine minutes
         python scripts/bench_gpu.py --only attention --budget 200
         python scripts/bench_gpu.py --tiny             the whole path at toy sizes, on any machine
"""

import datetime
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from bench import arguments, workers
from bench.gpu_tables import tables
from bench.machine import lacks, processor
from bench.metrics import rows

from maxstack.hardware import devices

SECTIONS = "attention", "cross_entropy", "grouped_matmul", "ceilings", "train"
OPS = dict(zip(SECTIONS, ("attention", "linear_cross_entropy", "grouped_matmul"), strict=False))
TORCH = {"train": ["torch", "transformers"], "attention": ["torch"]}
SIZES = yaml.safe_load((Path(__file__).parent / "bench/gpu.yml").read_text())["sizes"]
TRAIN = """
import jax, sys
from bench import workers
from maxstack import train
code = train.main(sys.argv[1:])
workers.tell(peak=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"))
sys.exit(code)
"""
Row = dict[str, Any]


def main() -> None:
    """Run the sections and print the table; exit with 1 if a kernel is wrong."""
    args = parse()
    devices.environment(None)  # of all processes
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
    unchecked = [name for name in OPS if name not in args.only and "train" in args.only]
    events = [kernels(section, args, True) for section in unchecked]
    for section in args.only:
        events.append(train(args) if section == "train" else kernels(section, args))
        if section in TORCH:
            events.append(beside_torch(section, args, found["rows"]))
    for event in itertools.chain(*events):
        keep(event, found, args.out)
    found["finished"] = True
    keep({}, found, args.out)
    print("\n\n".join(tables(found)))
    sys.exit(any(row["status"] == "wrong" for row in found["rows"]))


def parse() -> Any:
    """The command line."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="A,B of the sections above")
    parser.add_argument(
        "--small", dest="size", action="store_const", const="small", help="sizes for a CPU"
    )
    parser.add_argument(
        "--tiny", dest="size", action="store_const", const="tiny", help="only to see that it runs"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench_gpu"), help="a folder")
    parser.add_argument("--budget", type=float, help="seconds after which nothing begins")
    parser.add_argument("--tuned", help="block sizes, as `maxstack tune --out FILE` writes them")
    arguments.takes_peer_python(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the training run")
    args = parser.parse_intermixed_args()
    args.size, args.only = args.size or "full", args.only.split(",")
    if unknown := {*args.only} - {*SECTIONS}:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(SECTIONS)}")
    args.end = time.time() + (args.budget or SIZES[args.size]["budget"])
    return args


def keep(event: dict[str, Any], found: dict[str, Any], out: Path) -> None:
    """Add an event to the results, and write them; a reader never sees half of a file."""
    print(json.dumps(event), file=sys.stderr, flush=True)
    found["rows"] += [event["row"]] if "row" in event else []
    found["left_out"] |= event.get("left_out", {})
    found["device"] = event.get("device", found["device"])
    unfinished = out / ".bench_gpu.json"
    unfinished.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(out / "bench_gpu.json")


def run(command: list[str], end: float, given: Any = None) -> tuple[list[Any], str]:
    """(the events of a process, how it failed or ""). It is killed a minute after `end`."""
    process = workers.start(command, subprocess.STDOUT)
    try:
        output, _ = process.communicate(json.dumps(given), timeout=end + 60 - time.time())
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    lines = output.splitlines()
    said = " ".join(line for line in lines[-20:] if not line.startswith(workers.MARK))[-400:]
    code = process.returncode
    return [*workers.events(lines)], f"the process ended with code {code}: {said}" if code else ""


def kernels(section: str, args: Any, checks: bool = False) -> Iterator[dict[str, Any]]:
    """The events of a section, a process for each backend."""
    names = [""]
    if section in OPS:
        from maxstack.kernels.examples import OPS as ops

        names = ["peer", *reversed(ops[OPS[section]][0].names)][2 if checks else 0 :]
    for name in names:
        until = time.time() + (args.end - time.time()) / 2  # what hangs leaves time for others
        given = {"section": section, "backend": name, "size": args.size, "end": until}
        given |= {"tuned": args.tuned, "checks": checks}
        events, failure = run([sys.executable, "-m", "bench.gpu_worker"], until, given)
        yield from events
        if failure:
            row = {"section": section, "backend": name, "status": "failed", "reason": failure}
            yield {"row": row}


def train(args: Any) -> Iterator[dict[str, Any]]:
    """`maxstack train` on random tokens with each batch size until one fits: the medians of its
    steps after the first five."""
    shape = SIZES[args.size]["train"]
    heads = {name: shape[name] for name in ("heads", "kv_heads", "head_dim")}
    block = {"block": {"mixer": heads, "mlp": {"hidden": shape["hidden"]}}}
    model = {"preset": "llama-3.2-1b", "blocks": block}
    model |= {name: shape[name] for name in ("vocab", "embed", "layers")}
    fits = 0
    for batch in SIZES[args.size]["batches"]:
        if batch < fits or time.time() > args.end:
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
        events, failure = run([sys.executable, "-c", TRAIN, *words], args.end)
        if failure:
            status = "too large" if "RESOURCE_EXHAUSTED" in failure else "failed"
            yield {"row": row | {"status": status, "reason": failure}}
            continue
        fits = max(fits, batch)
        steps = rows(args.out / name / "metrics.jsonl", "step_seconds")[5:]
        seconds = statistics.median(step["step_seconds"] for step in steps)
        figures = {
            "step_ms": 1e3 * seconds,
            "tokens_per_second": batch * shape["length"] / seconds,
            "mfu_causal": statistics.median(step.get("mfu", 0) for step in steps) or None,
            "peak_bytes": events[-1]["peak"],
        }
        yield {"row": row | {"status": "ok"} | figures}


def beside_torch(section: str, args: Any, found: list[Row]) -> Iterator[dict[str, Any]]:
    """PyTorch on the shapes of a section that ran before."""
    if missing := lacks(args.peer_python, TORCH[section]):
        reason = f"{' and '.join(missing)} not installed; --peer-python names another interpreter"
        yield {"left_out": {f"torch {section}": reason}}
        return
    named = "section", "mask", "length", "batch", "window", "dtype", *SIZES["full"]["train"]
    shapes = []
    for row in found:
        shape = {name: row[name] for name in named if name in row}
        if row["section"] == section and "length" in row and shape not in shapes:
            shapes.append(shape)
    given = {"section": section, "rows": shapes}
    events, failure = run([args.peer_python, "-m", "bench.gpu_torch"], args.end, given)
    yield from events
    if failure:
        yield {"left_out": {f"torch {section}": failure}}


if __name__ == "__main__":
    main()
