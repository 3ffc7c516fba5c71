"""`maxstack generate` as a whole, from the start of its process, beside transformers' program, for
one prompt: to the first token, whose answer ends there, and for 40; with an empty cache of programs
and with a full one."""

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from bench import serve_folder, workers
from bench.gpu_tables import grid

PROMPT, COUNTS = 38, (1, 40)
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
HEAD = "model,dtype,program,tokens,seconds,peak GB,maxstack is x times as fast".split(",")


def compare(
    models: list[str], dtypes: list[str], rounds: int, python: str | None, threads: int
) -> str:
    """A table of medians, and of ratios pair by pair, for folders or sizes of serve.yml."""
    names = ["maxstack cold", "maxstack warm", *(["transformers"] if python else [])]
    found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for model in models:
            folder, prompts = Path(model), Path(temporary) / "prompts.jsonl"
            if model in serve_folder.TABLE["sizes"]:
                folder = Path(temporary) / model
                # In a process of its own: Linux counts a parent's peak as that of its children.
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    pool.apply(serve_folder.write, (folder, model))
            vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
            tokens = np.random.default_rng(0).integers(0, vocab, PROMPT).tolist()
            prompts.write_text(json.dumps({"id": "0", "tokens": tokens}))
            given = {"program": "transformers", "folder": str(folder), "threads": threads}
            for number in range(rounds * len(dtypes) * len(COUNTS)):
                count, dtype = COUNTS[number % 2], dtypes[number // 2 % len(dtypes)]
                cache = Path(temporary) / f"{model.replace('/', '-')}-{number}"
                ours = [sys.executable, "-m", "maxstack.cli", "generate", str(folder)]
                ours += ["--prompts", str(prompts), "--max-tokens", str(count), "--ignore-eos"]
                ours += [
                    "--temperature",
                    "0",
                    f"model.dtype={DTYPES[dtype]}",
                    f"run.compilation_cache={cache}",
                ]
                task = {"batch": 1, "prompt": PROMPT, "tokens": count, "seed": 0}
                words = json.dumps(given | {"dtype": dtype, "length": 0})
                for name in names:
                    command = [*ours, "--out", f"{cache}-{name[9:]}.jsonl"]
                    if name == "transformers":
                        command = [python, "-m", "bench.serve_worker", words]
                    key = Path(model).name, dtype, name, str(count)
                    found.setdefault(key, []).append(measure(command, json.dumps(task)))
    table = []
    for key, runs in found.items():
        warm = found[*key[:2], "maxstack warm", key[3]]
        ratio = statistics.median(b / a for (a, _), (b, _) in zip(warm, runs, strict=True))
        seconds, peak = map(statistics.median, zip(*runs, strict=True))
        table.append([*key, f"{seconds:.2f}", f"{peak:.2f}", f"{ratio:.2f}"])
    return grid(HEAD, table)


def measure(command: list[str], task: str) -> tuple[float, float]:
    """(seconds, peak GB) of a process to its end. SystemExit where it fails."""
    with tempfile.TemporaryFile("w+") as errors:
        begin = time.perf_counter()
        process = workers.start(command, errors)
        process.stdin.write(f"{task}\n")
        process.stdin.close()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        if status:
            errors.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{errors.read()[-2000:]}")
    return seconds, usage.ru_maxrss * 1024 / 1e9
