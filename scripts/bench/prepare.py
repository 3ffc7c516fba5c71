"""Speed and memory of `maxstack data prepare` beside plain tokenizers, Hugging Face's datasets and
itself on Ray, over made-up JSON lines: MB and tokens a second, and the largest memory of all
processes of each.

Words of made-up syllables follow Zipf's law, documents are log-normal with a mean of 3 KB, and the
tokenizer is a byte-level BPE of 32,000 ids trained on 20 MB of such text. Each program has two
processes, is started once a round, and its time counts from its start to its end; the first round
makes the files of the cache of the operating system warm and is not shown.
example: python scripts/bench/prepare.py /tmp/made --megabytes 300 --peer-python peer/bin/python
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from bench.arguments import parser, takes_json, takes_peer_python, write_json

PIECE = 2_000
"""Documents that are made at a time."""
PLAIN = """
import json, sys
from multiprocessing import get_context

def count(path, tokenizer, start, stop):
    from tokenizers import Tokenizer
    model, tokens = Tokenizer.from_file(tokenizer), 0
    with open(path, "rb") as file:
        file.seek(start)
        while file.tell() < stop:
            tokens += len(model.encode(json.loads(file.readline())["text"]).ids)
    return tokens

if __name__ == "__main__":
    path, tokenizer, processes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open(path, "rb") as file:
        cuts, size = [0], file.seek(0, 2)
        for i in range(1, processes):
            file.seek(size * i // processes)
            file.readline()
            cuts.append(file.tell())
    with get_context("spawn").Pool(processes) as pool:
        print(sum(pool.starmap(count, [(path, tokenizer, *cut) for cut in zip(cuts, [*cuts[1:], size])])))
"""  # noqa: E501
DATASETS = """
import sys
from datasets import load_dataset
from tokenizers import Tokenizer

model = None

def encode(batch):
    global model
    model = model or Tokenizer.from_file(tokenizer)
    return {"ids": [encoding.ids for encoding in model.encode_batch(batch["text"])]}

if __name__ == "__main__":
    path, tokenizer, processes, cache = sys.argv[1:]
    lines = load_dataset("json", data_files=path, split="train", cache_dir=cache)
    lines.map(encode, batched=True, num_proc=int(processes), remove_columns=lines.column_names)
"""


def main() -> None:
    """Print a Markdown table."""
    args = _arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    lines = args.folder / f"{args.megabytes}.jsonl"
    tokenizer = args.folder / "tokenizer.json"
    if not lines.exists():
        _make(lines, args.megabytes)
    if not tokenizer.exists():
        _train(lines, tokenizer)
    size, tokens, rows = lines.stat().st_size, 0, []
    for number in range(int(args.cold), args.rounds + 1):
        for name in args.only:
            shutil.rmtree(args.folder / "made", ignore_errors=True)
            found = _measured(_command(name, args, lines, tokenizer), args.folder)
            print(f"round {number}: {name}: {found}", flush=True, file=sys.stderr)
            if name in ("local", "ray"):
                manifest = json.loads((args.folder / "made" / "manifest.json").read_text())
                tokens = manifest["totals"]["tokens"]
            if number:
                rows.append({"program": name, "round": number} | found)
    shutil.rmtree(args.folder / "made", ignore_errors=True)
    for row in rows:
        row |= {"MB/s": size / 1e6 / row["seconds"], "tokens/s": tokens / row["seconds"]}
    _print(rows, args.only)
    write_json(args.json, rows)


def _arguments() -> argparse.Namespace:
    programs = ["plain", "local", "ray", "datasets"]
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path, help="where files are made, and left")
    arguments.add_argument("--megabytes", type=int, default=300)
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument(
        "--cold", action="store_true", help="leave out the round that is not shown"
    )
    arguments.add_argument("--only", nargs="*", default=programs, choices=programs)
    takes_peer_python(arguments)
    takes_json(arguments)
    return arguments.parse_args()


def _make(path: Path, megabytes: int) -> None:
    """JSON lines of so many MB, the same each time."""
    random = np.random.default_rng(0)
    syllables = [
        "".join(pair)
        for pair in np.stack(np.meshgrid([*"bdfghklmnprstvw"], [*"aeiou"]), -1).reshape(-1, 2)
    ]
    words = np.array(
        ["".join(random.choice(syllables, random.integers(1, 5))) for _ in range(50_000)], object
    )
    shares = 1.0 / np.arange(1, len(words) + 1)
    steps = np.cumsum(shares / shares.sum())
    marks = np.array([" "] * 12 + [", ", ". ", ".\n", " - "], object)
    written, unfinished = 0, path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        while written < megabytes * 1_000_000:
            lengths = np.maximum(1, random.lognormal(5.7, 0.9, PIECE).astype(int))
            drawn = words[
                np.minimum(np.searchsorted(steps, random.random(lengths.sum())), len(words) - 1)
            ]
            text = drawn + marks[random.integers(0, len(marks), len(drawn))]
            for part in np.split(text, np.cumsum(lengths)[:-1]):
                written += file.write(json.dumps({"id": written, "text": "".join(part)}) + "\n")
    unfinished.rename(path)


def _train(lines: Path, path: Path) -> None:
    """A tokenizer of the first 20 MB."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def texts() -> Any:
        read = 0
        with lines.open() as file:
            for line in file:
                yield json.loads(line)["text"]
                if (read := read + len(line)) > 20_000_000:
                    return

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        texts(),
        trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet, show_progress=False),
    )
    model.save(str(path))


def _command(name: str, args: argparse.Namespace, lines: Path, tokenizer: Path) -> list[str]:
    made, processes = args.folder / "made", str(args.processes)
    if name == "plain":
        program = args.folder / "plain.py"
        program.write_text(PLAIN)
        return [sys.executable, str(program), str(lines), str(tokenizer), processes]
    if name == "datasets":
        program = args.folder / "peer.py"
        program.write_text(DATASETS)
        return [args.peer_python, str(program), str(lines), str(tokenizer), processes, str(made)]
    config = args.folder / "config.yml"
    data = {
        "sources": [{"kind": "jsonl", "files": [str(lines)]}],
        "tokenizer": {"kind": "huggingface", "path": str(tokenizer)},
    }
    mixer = {"kind": "attention", "heads": 1, "head_dim": 16}
    block = {"mixer": mixer, "mlp": {"kind": "gated", "hidden": 16}}
    model = {"embed": 16, "vocab": 32_000, "layers": 1, "blocks": {"block": block}}
    config.write_text(json.dumps({"model": model, "data": data}))
    command = [sys.executable, "-m", "maxstack.cli", "data", "prepare", str(config)]
    return [*command, "--out", str(made), "--workers", processes, "--engine", name]


def _measured(command: list[str], folder: Path) -> dict[str, Any]:
    """Seconds, CPU seconds and the largest memory of a command with all its processes."""
    largest, ended = [0], threading.Event()
    log = (folder / "log").open("w+")
    before, start = os.times(), time.perf_counter()
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def watch() -> None:
        while not ended.wait(0.2):
            largest[0] = max(largest[0], _memory(os.getpid()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    ended.set()
    watcher.join()
    after = os.times()
    if code:
        raise SystemExit(f"exit {code} of {' '.join(command)}\n{(folder / 'log').read_text()}")
    cpu = sum(after[2:4]) - sum(before[2:4])
    return {"seconds": time.perf_counter() - start, "cpu": cpu, "memory": largest[0]}


def _memory(own: int) -> int:
    """Bytes of all descendants of a process: proportional sizes without what files hold, which the
    system may take back."""
    total, waiting = 0, [own]
    while waiting:
        pid = waiting.pop()
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
            if pid != own:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
                sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
                total += 1024 * (sizes["Pss_Anon"] + sizes["Pss_Shmem"])
        except OSError:  # it ended meanwhile
            continue
    return total


def _print(rows: list[dict[str, Any]], names: list[str]) -> None:
    print("| Program | MB/s | tokens/s | beside plain | CPU seconds | memory, MB |")
    print("|---|---|---|---|---|---|")

    def median(name: str, key: str) -> float:
        return float(np.median([row[key] for row in rows if row["program"] == name]))

    for name in names:
        ratio = median("plain", "seconds") / median(name, "seconds") if "plain" in names else 0
        speed, tokens = median(name, "MB/s"), median(name, "tokens/s")
        cpu, memory = median(name, "cpu"), median(name, "memory") / 1e6
        print(f"| {name} | {speed:.1f} | {tokens:,.0f} | {ratio:.2f} | {cpu:.1f} | {memory:,.0f} |")


if __name__ == "__main__":
    main()
