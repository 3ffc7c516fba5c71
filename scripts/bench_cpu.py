"""The reference work on this machine's CPU: maxstack and its peers in turn, several rounds interleaved, as tokens/s and ratios.

example: python scripts/bench_cpu.py --rounds 3 --json bench.json
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PEERS = {
    "plain_jax scan": ("plain_jax.py", ["scan"], ["jax", "optax"]),
    "plain_jax unroll": ("plain_jax.py", ["unroll"], ["jax", "optax"]),
    "torch_llama": ("torch_llama.py", [], ["torch", "transformers"]),
    "torch_llama compile": ("torch_llama.py", ["compile"], ["torch", "transformers"]),
}
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def main() -> None:
    """Run everything, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="each program runs this often; the median counts")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    parser.add_argument("--peer-python", default=sys.executable, help="the interpreter that has torch and transformers, if another")
    args = parser.parse_args()
    pythons = {name: args.peer_python if "torch" in needs else sys.executable for name, (_, _, needs) in PEERS.items()}
    peers = {name: peer for name, peer in PEERS.items() if _available(name, peer[2], pythons[name])}
    speeds: dict[str, list[float]] = {}
    for number in range(args.rounds):
        for dtype in DTYPES:
            print(f"round {number + 1}/{args.rounds} {dtype}", file=sys.stderr, flush=True)
            speeds.setdefault(f"maxstack {dtype}", []).append(_ours(dtype))
            for name, (script, words, _) in peers.items():
                speeds.setdefault(f"{name} {dtype}", []).append(_peer(pythons[name], script, [dtype, *words]))
    table = {name: statistics.median(values) for name, values in speeds.items()}
    start = {kind: _first_loss(kind) for kind in ("cold", "warm")}
    print(f"\n{'program':26} {'tokens/s':>9} {'all rounds':>26}   maxstack is x times as fast")
    for name, value in table.items():
        ratio = table[f"maxstack {name.split()[-1]}"] / value
        print(f"{name:26} {value:9,.0f} {' '.join(f'{v:,.0f}' for v in speeds[name]):>26}   {ratio:.2f}")
    for kind, (seconds, gigabytes) in start.items():
        print(f"process start to first loss, {kind} compilation cache: {seconds:.1f} s, peak memory {gigabytes:.2f} GB")
    if args.json:
        args.json.write_text(json.dumps({"tokens_per_second": speeds, "start": start}, indent=2) + "\n")


def _available(name: str, packages: list[str], python: str) -> bool:
    if python == sys.executable:
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
    else:
        code = f"import importlib.util; print([p for p in {packages} if importlib.util.find_spec(p) is None])"
        missing = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.replace("'", '"'))
    if missing:
        print(f"{name} is left out: {', '.join(missing)} not installed", file=sys.stderr)
    return not missing


def _peer(python: str, script: str, words: list[str]) -> float:
    done = subprocess.run([python, str(HERE / "bench" / script), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{script} {' '.join(words)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_second"]


def _ours(dtype: str) -> float:
    """The same figure that the peers print: batch tokens over the median step of 20 after the first."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(_command(folder, f"model.dtype={DTYPES[dtype]}"), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"maxstack failed:\n{done.stdout}{done.stderr}")
        rows = [json.loads(line) for line in (Path(folder) / "bench-reference" / "metrics.jsonl").read_text().splitlines()]
    seconds = sorted(row["step_seconds"] for row in rows[1:])
    return rows[0]["tokens"] / seconds[len(seconds) // 2]


def _command(folder: str, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "maxstack.train", "bench-reference", f"run.output_dir={folder}", *overrides]


CACHE = tempfile.TemporaryDirectory()


def _first_loss(kind: str) -> tuple[float, float]:
    """Seconds from the start of the process to the first line of metrics.jsonl, and the process's peak memory in GB."""
    with tempfile.TemporaryDirectory() as folder:
        begin, metrics = time.perf_counter(), Path(folder) / "bench-reference" / "metrics.jsonl"
        command = _command(folder, "train.steps=3", f"run.compilation_cache={CACHE.name}")
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
