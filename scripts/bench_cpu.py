"""The reference model on this machine's CPU: maxstack and its peers in turn, in several rounds, as
tokens/s and ratios, with each one's peak memory; then the same in float32 for wider models and
longer rows, once each.

example: python scripts/bench_cpu.py --rounds 3 --json bench.json --peer-python ../torch/bin/python
         python scripts/bench_cpu.py --only step --maxtext-python ../maxtext/bin/python
         python scripts/bench_cpu.py --tiny
         python scripts/bench_cpu.py --model ./smollm2 --peer-python ../torch/bin/python
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bench import arguments, workers
from bench.cpu_tables import peer_tables
from bench.gpu_tables import grid
from bench.machine import lacks, processor, versions
from bench.metrics import rows

HERE = Path(__file__).parent
PEERS = {
    "plain_jax scan": ("plain_jax.py", ["scan"], ["jax", "optax"]),
    "plain_jax unroll": ("plain_jax.py", ["unroll"], ["jax", "optax"]),
    "torch_llama": ("torch_llama.py", [], ["torch", "transformers"]),
    "torch_llama compile": ("torch_llama.py", ["compile"], ["torch", "transformers"]),
    "maxtext": ("maxtext_llama.py", [], ["maxtext"]),
}
"""A script, its words, and the packages that it needs."""
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


class Size(NamedTuple):
    """Of the model and of a batch."""

    width: int
    length: int
    rows: int


SIZES = (
    Size(256, 512, 4),
    Size(512, 512, 4),
    Size(1024, 512, 4),
    Size(256, 2048, 1),
    Size(256, 8192, 1),
)
"""That of the reference work, and others to see how speed and memory grow."""
SCALED = "maxstack", "plain_jax scan", "torch_llama"
"""Programs at these sizes."""
WARM_UP = 3
"""Steps of maxstack that do not count, nor the next, as in torch_llama.py."""
TINY = Size(128, 32, 2)


def main() -> None:
    """Run everything, print the tables, write the JSON."""
    parser = arguments.parser(__doc__)
    arguments.takes_rounds(parser, 3, "each program runs this often; the median counts")
    parser.add_argument("--only", choices=["step"], help="not at other sizes")
    parser.add_argument("--tiny", action="store_true", help="one round, to show that all runs")
    arguments.takes_json(parser)
    arguments.takes_peer_python(parser)
    parser.add_argument(
        "--maxtext-python",
        default=sys.executable,
        help="the interpreter that has MaxText (scripts/bench/maxtext.sh), if another",
    )
    parser.add_argument(
        "--model", help="a Hugging Face folder: only train it, beside transformers' Trainer"
    )
    args = parser.parse_args()
    if args.model:
        if missing := lacks(args.peer_python, ["torch", "transformers", "accelerate"]):
            sys.exit(f"--peer-python {args.peer_python} lacks {', '.join(missing)}")
        return beside_trainer(args)
    found: dict[str, Any] = {
        "command": " ".join(["python scripts/bench_cpu.py", *sys.argv[1:]]),
        "date": f"{date.today()}",
        "processor": processor(),
        "versions": {"jax": version("jax")}
        | versions(args.peer_python, ["torch", "transformers"])
        | versions(args.maxtext_python, ["maxtext"]),
    }
    pythons = {"torch": args.peer_python, "maxtext": args.maxtext_python}
    programs = {"maxstack": "", **find_peers(pythons)}
    sizes = (TINY,) if args.tiny else SIZES
    found |= measure_step(programs, 1 if args.tiny else args.rounds, sizes[0], args.tiny)
    arguments.write_json(args.json, found)
    if not args.only:
        found["scaling"] = []
        for size in sizes:
            named = {name: programs[name] for name in SCALED if name in programs}
            told = {name: run(name, named[name], "f32", size, 6, args.tiny) for name in named}
            found["scaling"].append(size._asdict() | {"programs": told})
            arguments.write_json(args.json, found)
    print("\n\n".join(peer_tables(found)))


def find_peers(pythons: dict[str, str]) -> dict[str, str]:
    """The interpreter of every peer that is installed."""
    found = {}
    for name, (_, _, needs) in PEERS.items():
        python = pythons.get(needs[0], sys.executable)
        if missing := lacks(python, needs):
            print(f"{name} is left out: {', '.join(missing)} not installed", file=sys.stderr)
        else:
            found[name] = python
    return found


def measure_step(programs: dict[str, str], rounds: int, size: Size, tiny: bool) -> dict[str, Any]:
    """Tokens/s of every program in every round, and seconds and GB to the first loss."""
    found: dict[str, Any] = {"tokens_per_second": {}, "gigabytes": {}, "peers_first_loss": {}}
    for number in range(rounds):
        for dtype in DTYPES:
            print(f"round {number + 1}/{rounds} {dtype}", file=sys.stderr, flush=True)
            for program, python in programs.items():
                name, told = f"{program} {dtype}", run(program, python, dtype, size, 21, tiny)
                found["tokens_per_second"].setdefault(name, []).append(told["tokens_per_second"])
                if "gigabytes" in told:
                    most = max(told["gigabytes"], found["gigabytes"].get(name, 0.0))
                    found["gigabytes"][name] = most
                if "first_loss_seconds" in told:
                    firsts = found["peers_first_loss"].setdefault(name, [])
                    firsts.append(told["first_loss_seconds"])
    with tempfile.TemporaryDirectory() as cache:
        words = (f"run.compilation_cache={cache}", *ours(size, 3, "f32", tiny))
        found["start"] = {kind: train(*words)[1:] for kind in ("cold", "warm")}
    return found


def beside_trainer(args: Any) -> None:
    """Print the first loss, seconds to it, tokens/s and peak GB of both, in turns; the first round
    of maxstack compiles its programs."""
    length, each, steps = (32, 1, 3) if args.tiny else (512, 2, 8)
    table = ["round,dtype,program,first loss,seconds to it,tokens/s,peak GB".split(",")]
    with tempfile.TemporaryDirectory() as cache:
        for number in range(1 if args.tiny else args.rounds):
            for dtype, full in DTYPES.items():
                done, first, peak = train(
                    *(f"model.from={args.model}", f"model.dtype={full}", f"data.seq_len={length}"),
                    *(f"data.sources.0.length={length + 1}", f"train.batch_size={each}"),
                    *("data.shuffle=false", f"train.steps={steps}"),
                    f"run.compilation_cache={cache}",
                )
                seconds = statistics.median(step["step_seconds"] for step in done[2:])
                told = {"maxstack": (done[0]["loss"], first, seconds, peak)}
                words = [args.model, dtype, *map(str, (length, each, steps))]
                begin = time.time()
                peer = [args.peer_python, "-m", "bench.torch_trainer", *words]
                process = workers.start(peer, None)
                (answer,) = workers.events(process.stdout)
                usage, ends = os.wait4(process.pid, 0)[2], answer["ends"]
                seconds = statistics.median(b - a for a, b in itertools.pairwise(ends[1:]))
                told["Trainer"] = answer["loss"], ends[0] - begin, seconds, usage.ru_maxrss / 976562
                for name, (loss, first, seconds, peak) in told.items():
                    cells = f"{loss:.5f}", f"{first:.1f}", f"{each * length / seconds:.0f}"
                    table.append([str(number), dtype, name, *cells, f"{peak:.2f}"])
    print(grid(table[0], table[1:]))


def run(
    program: str, python: str, dtype: str, size: Size, steps: int, tiny: bool
) -> dict[str, float]:
    """Figures of a program: of maxstack by the median of the steps that torch_llama.py counts."""
    if program == "maxstack":
        done, _, gigabytes = train(*ours(size, WARM_UP + steps, dtype, tiny))
        seconds = statistics.median(step["step_seconds"] for step in done[WARM_UP + 1 :])
        return {"tokens_per_second": done[0]["tokens"] / seconds, "gigabytes": gigabytes}
    script, words, _ = PEERS[program]
    words = [dtype, *words, *(["--tiny"] if tiny else [])]
    if program != "maxtext":
        words += ["--embed", f"{size.width}", "--length", f"{size.length}"]
        words += ["--rows", f"{size.rows}", "--steps", f"{steps}"]
    command = [python, str(HERE / "bench" / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{script} {' '.join(words)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def ours(size: Size, steps: int, dtype: str, tiny: bool) -> list[str]:
    """The overrides of bench-reference for a size."""
    return [
        f"model.dtype={DTYPES[dtype]}",
        f"model.embed={size.width}",
        f"model.blocks.block.mlp.hidden={4 * size.width}",
        f"model.blocks.block.mixer.heads={size.width // 64}",
        f"model.blocks.block.mixer.kv_heads={size.width // 128}",
        f"data.seq_len={size.length}",
        f"data.sources.0.length={size.length + 1}",
        f"train.batch_size={size.rows}",
        f"train.steps={steps}",
        *(["model.layers=1"] if tiny else []),
    ]


def train(*overrides: str) -> tuple[list[dict[str, Any]], float, float]:
    """(rows of steps, seconds from the start of the process to the first of them, peak GB) of a
    run of bench-reference."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["bench-reference", f"run.output_dir={folder}", *overrides]
        log, metrics = Path(folder) / "log", Path(folder) / "bench-reference" / "metrics.jsonl"
        begin = time.perf_counter()
        with log.open("w") as out:
            command = [sys.executable, "-m", "maxstack.train", *words]
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        seconds = time.perf_counter() - begin
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"maxstack failed:\n{log.read_text()}")
        return rows(metrics, "step_seconds"), seconds, usage.ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main()
