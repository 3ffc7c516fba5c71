"""The reference model on this machine's CPU: maxstack and its peers in turn, in several rounds, as
tokens/s and ratios, with each one's peak memory; then the same in float32 for wider models and
longer rows, once each.

example: python scripts/bench_cpu.py --rounds 3 --json bench.json --peer-python ../torch/bin/python
         python scripts/bench_cpu.py --only step --maxtext-python ../maxtext/bin/python
         python scripts/bench_cpu.py --only scaling
         python scripts/bench_cpu.py --tiny
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bench import arguments
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
SCALED = "plain_jax scan", "torch_llama"
"""Peers at these sizes."""
STEPS = 6
WARM_UP = 3
"""Steps of maxstack before those: none of them counts, nor the next, as in torch_llama.py."""
TINY = ("model.layers=1",)
TINY_SIZE = Size(128, 32, 2)


def main() -> None:
    """Run everything, print the table, write the JSON."""
    parser = arguments.parser(__doc__)
    arguments.takes_rounds(parser, 3, "each program runs this often; the median counts")
    parser.add_argument("--only", choices=["step", "scaling"], help="one part")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="one round, at sizes that only show that everything runs",
    )
    arguments.takes_json(parser)
    arguments.takes_peer_python(parser)
    parser.add_argument(
        "--maxtext-python",
        default=sys.executable,
        help="the interpreter that has MaxText (scripts/bench/maxtext.sh), if another",
    )
    args = parser.parse_args()
    rounds, dtypes = (1, ("f32",)) if args.tiny else (args.rounds, tuple(DTYPES))
    pythons = {"torch": args.peer_python, "maxtext": args.maxtext_python}
    words = [f"--rounds {rounds}", "--tiny" * args.tiny, f"--only {args.only}" * bool(args.only)]
    found = {
        "command": " ".join(["python scripts/bench_cpu.py", *filter(None, words)]),
        "date": f"{date.today()}",
        "processor": processor(),
        "versions": {"jax": version("jax")}
        | versions(args.peer_python, ["torch", "transformers"])
        | versions(args.maxtext_python, ["maxtext"]),
    }
    arguments.write_json(args.json, found)
    if args.only != "scaling":
        found |= _reference_work(rounds, dtypes, pythons, args.tiny)
        arguments.write_json(args.json, found)
    if args.only != "step":
        found["scaling"] = _scaling((TINY_SIZE,) if args.tiny else SIZES, pythons)
        arguments.write_json(args.json, found)


def _reference_work(
    rounds: int, dtypes: tuple[str, ...], pythons: Mapping[str, str], tiny: bool
) -> dict[str, Any]:
    """Tokens/s of every program in every round, and seconds and GB to the first loss."""
    told: dict[str, list[dict[str, float]]] = {}
    names = ["maxstack", *filter(lambda name: _available(name, pythons), PEERS)]
    for number in range(rounds):
        for dtype in dtypes:
            print(f"round {number + 1}/{rounds} {dtype}", file=sys.stderr, flush=True)
            for name in names:
                told.setdefault(f"{name} {dtype}", []).append(_measured(name, dtype, pythons, tiny))
    speeds = {name: [each["tokens_per_second"] for each in found] for name, found in told.items()}
    memory = {
        name: max(each["gigabytes"] for each in found)
        for name, found in told.items()
        if "gigabytes" in found[0]
    }
    theirs = {
        name: [each["first_loss_seconds"] for each in found]
        for name, found in told.items()
        if "first_loss_seconds" in found[0]
    }
    table = {name: statistics.median(values) for name, values in speeds.items()}
    with tempfile.TemporaryDirectory() as cache:
        start = {
            kind: _first_loss(kind, f"run.compilation_cache={cache}", *TINY * tiny)
            for kind in ("cold", "warm")
        }
    print(f"\n{'program':26} {'tokens/s':>9} {'all rounds':>42} {'GB':>6}   maxstack is x as fast")
    for name, value in table.items():
        ratio = table[f"maxstack {name.split()[-1]}"] / value
        print(
            f"{name:26} {value:9,.0f} {' '.join(f'{v:,.0f}' for v in speeds[name]):>42} "
            f"{memory.get(name, math.nan):6.2f}   {ratio:.2f}"
        )
    for kind, (seconds, gigabytes) in start.items():
        print(
            f"process start to first loss, {kind} compilation cache: {seconds:.1f} s, "
            f"peak memory {gigabytes:.2f} GB"
        )
    for name, seconds in theirs.items():
        print(f"the same of {name}, cold: {statistics.median(seconds):.1f} s")
    return {
        "tokens_per_second": speeds,
        "gigabytes": memory,
        "start": start,
        "peers_first_loss": theirs,
    }


def _scaling(sizes: Sequence[Size], pythons: Mapping[str, str]) -> list[dict[str, Any]]:
    """Sizes with the tokens/s and peak memory of maxstack and the peers of SCALED, in float32."""
    found = []
    names = ["maxstack", *filter(lambda name: _available(name, pythons), SCALED)]
    print(f"\n{'width, rows x length':22} {'program':16} {'tokens/s':>9} {'GB':>6}")
    for size in sizes:
        where, programs = f"{size.width}, {size.rows} x {size.length}", {}
        for name in names:
            told = programs[name] = _measured(name, "f32", pythons, False, size, STEPS)
            print(
                f"{where:22} {name:16} {told['tokens_per_second']:9,.0f} {told['gigabytes']:6.2f}",
                flush=True,
            )
        found.append(size._asdict() | {"programs": programs})
    return found


def _measured(
    name: str,
    dtype: str,
    pythons: Mapping[str, str],
    tiny: bool,
    size: Size | None = None,
    steps: int = 21,
) -> dict[str, float]:
    """Figures of a program at the reference work's size, or another."""
    size, steps = (TINY_SIZE, 3) if tiny else (size or SIZES[0], steps)
    if name == "maxstack":
        return _ours(dtype, size, steps, *TINY * tiny)
    script, words, needs = PEERS[name]
    words = [dtype, *words, *["--tiny"] * tiny]
    if name != "maxtext":
        words += ["--embed", f"{size.width}", "--length", f"{size.length}"]
        words += ["--rows", f"{size.rows}", "--steps", f"{steps}"]
    return _peer(pythons.get(needs[0], sys.executable), script, words)


def _available(name: str, pythons: Mapping[str, str]) -> bool:
    needs = PEERS[name][2]
    if missing := lacks(pythons.get(needs[0], sys.executable), needs):
        print(f"{name} is left out: {', '.join(missing)} not installed", file=sys.stderr)
    return not missing


def _peer(python: str, script: str, words: list[str]) -> dict[str, Any]:
    """The JSON of the script's last line."""
    command = [python, str(HERE / "bench" / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{script} {' '.join(words)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _ours(dtype: str, size: Size, steps: int, *overrides: str) -> dict[str, float]:
    """Tokens/s by the median of the steps that torch_llama.py counts, and peak GB."""
    overrides = (
        f"model.dtype={DTYPES[dtype]}",
        f"model.embed={size.width}",
        f"model.blocks.block.mlp.hidden={4 * size.width}",
        f"model.blocks.block.mixer.heads={size.width // 64}",
        f"model.blocks.block.mixer.kv_heads={size.width // 128}",
        f"data.seq_len={size.length}",
        f"data.sources.0.length={size.length + 1}",
        f"train.batch_size={size.rows}",
        f"train.steps={WARM_UP + steps}",
        *overrides,
    )
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                _command(folder, *overrides), stdout=out, stderr=subprocess.STDOUT
            )
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"maxstack failed:\n{log.read_text()}")
        done = rows(Path(folder) / "bench-reference" / "metrics.jsonl", "step_seconds")
    seconds = statistics.median(step["step_seconds"] for step in done[WARM_UP + 1 :])
    return {
        "tokens_per_second": done[0]["tokens"] / seconds,
        "gigabytes": usage.ru_maxrss * 1024 / 1e9,
    }


def _command(folder: str, *overrides: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "maxstack.train",
        "bench-reference",
        f"run.output_dir={folder}",
        *overrides,
    ]


def _first_loss(kind: str, *overrides: str) -> tuple[float, float]:
    """Seconds from the start of the process to the first line of metrics.jsonl, and the process's
    peak memory in GB."""
    with tempfile.TemporaryDirectory() as folder:
        begin, metrics = time.perf_counter(), Path(folder) / "bench-reference" / "metrics.jsonl"
        command = _command(folder, "train.steps=3", *overrides)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        seconds = time.perf_counter() - begin
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"maxstack failed at {kind} start")
    return seconds, usage.ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main()
