"""The engine of `maxstack generate` and `serve` on this machine's CPU beside transformers:
prefill and decode in tokens/s, and the most that the memory's bandwidth allows.

Every program loads the same folder of random weights and stays alive; all are asked in turn, in
several rounds, and compared pair by pair, so that a machine that slows down does so for all. A
program that none of the interpreters has is named and left out. The limit of decoding is the
reading of an array of the weights' size, each weight in the dtype's bytes, once for each step.

example: python scripts/bench_serve.py --peer-python ../torch/bin/python --json bench.json
         python scripts/bench_serve.py --size 0.1 --dtype f32 --batch 1 --rounds 1
         python scripts/bench_serve.py --size 0.5 --batch 32 serve.rows=32
         python scripts/bench_serve.py --whole ./smollm2 qwen3-0.6 --dtype f32 bf16 --rounds 3
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import arguments, serve_folder, whole_commands, workers
from bench.machine import lacks

OURS, ANY, LIMIT = "maxstack", "maxstack any", "bandwidth"
"""ANY: with serve.identical=any, which shows the cost of equal bits."""
PEERS = {"transformers": ["torch", "transformers"]}
"""Packages of each."""
PROMPTS = {1: 512, 8: 128, 32: 128}
"""Tokens of a prompt in prefill by batch."""
SHORT = 16
"""Tokens of a prompt before decoding."""
REST = 0.5
"""Seconds before each task: OpenMP's threads spin for 0.2 s after a program's work."""


class Program:
    """A process of bench/serve_worker.py."""

    def __init__(self, name: str, command: list[str], log: Path):
        # The limit has threads of its own.
        own = {"OPENBLAS_NUM_THREADS": "1"} if name == LIMIT else {}
        self.name, self._log = name, log
        with log.open("w", encoding="utf-8") as errors:
            self._process = workers.start(command, errors, **own)

    def ask(self, **task: int) -> dict[str, Any]:
        """The process's answer to a task."""
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next event of the process; `failed` where it ended."""
        for event in workers.events(self._process.stdout):
            return event
        return {"failed": f"the process ended: {self._log.read_text(encoding='utf-8')[-2000:]}"}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Measure every size and dtype, print the tables, write the JSON."""
    parser = arguments.parser(__doc__)
    arguments.takes_overrides(parser, "the engine's configuration")
    parser.add_argument(
        "--size", nargs="+", choices=[*serve_folder.TABLE["sizes"]], default=["0.1", "0.5"]
    )
    parser.add_argument("--dtype", nargs="+", default=["f32", "bf16", "int8"])
    parser.add_argument("--batch", nargs="+", type=int, choices=[*PROMPTS], default=[*PROMPTS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=17, help="of an answer in decoding")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every program"
    )
    parser.add_argument(
        "--peer-python",
        nargs="+",
        default=[sys.executable],
        help="interpreters; a peer runs in the first that has its packages",
    )
    parser.add_argument(
        "--whole", nargs="+", metavar="MODEL", help="folders or sizes: only the whole commands"
    )
    arguments.takes_json(parser)
    args = parser.parse_args()
    if args.whole:
        python = find_peers(args.peer_python).get("transformers")
        asked = args.whole, args.dtype, args.rounds, python, args.threads
        return print(whole_commands.compare(*asked))
    pythons = dict.fromkeys((OURS, ANY, LIMIT), sys.executable) | find_peers(args.peer_python)
    found: dict[str, Any] = {}
    for size in args.size:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            weights = serve_folder.write(folder, size)
            for dtype in args.dtype:
                programs = start(pythons, folder, dtype, args, Path(temporary))
                try:
                    figures = measure(programs, args)
                finally:
                    for program in programs:
                        program.close()
                found[f"{size} {dtype}"] = {"weights": weights, **figures}
                show(f"{size} B {dtype}, {weights:,} weights, {args.threads} threads", figures)
                arguments.write_json(args.json, found)


def find_peers(pythons: list[str]) -> dict[str, str]:
    """The interpreter of every peer that is installed."""
    here = {}
    for name, packages in PEERS.items():
        if having := [python for python in pythons if not lacks(python, packages)]:
            here[name] = having[0]
        else:
            print(f"{name} is left out: no interpreter has {', '.join(packages)}", file=sys.stderr)
    return here


def start(
    pythons: dict[str, str], folder: Path, dtype: str, args: Any, logs: Path
) -> list[Program]:
    """The programs that opened the model; a peer that cannot is named. SystemExit where ours
    cannot."""
    length = max(*PROMPTS.values(), SHORT + args.tokens) + SHORT
    programs = []
    for name, python in pythons.items():
        given = {"program": name.split()[0], "folder": str(folder), "dtype": dtype}
        given |= {"threads": args.threads, "length": length}
        given["overrides"] = [*args.overrides, *(["serve.identical=any"] if name == ANY else [])]
        command = [python, "-m", "bench.serve_worker", json.dumps(given)]
        program = Program(name, command, logs / name)
        answer = program.answer()
        if "ready" in answer:
            programs.append(program)
            continue
        program.close()
        if name in (OURS, ANY, LIMIT):
            sys.exit(f"{name} failed: {answer}")
        print(f"{name} {dtype} is left out: {answer['failed']}", file=sys.stderr)
    return programs


def measure(programs: list[Program], args: Any) -> dict[str, Any]:
    """Tokens/s of every task and program by round, after a round that is not counted; and the share
    of first tokens that are as ours."""
    speeds: dict[str, dict[str, list[float]]] = {}
    same: dict[str, list[bool]] = {}
    tasks = [("prefill", batch, PROMPTS[batch], 1) for batch in args.batch]
    tasks += [("decode", batch, SHORT, args.tokens) for batch in args.batch]
    for number in range(args.rounds + 1):
        print(f"round {number}/{args.rounds}", file=sys.stderr, flush=True)
        for kind, batch, prompt, length in tasks:
            tokens = length if number else min(length, 2)
            firsts = {}
            for program in programs if number % 2 else reversed(programs):
                if kind == "prefill" and program.name == LIMIT:
                    continue
                time.sleep(REST)
                answer = program.ask(batch=batch, prompt=prompt, tokens=tokens, seed=number)
                if not answer.get("whole"):
                    sys.exit(f"{program.name} failed at {kind} of {batch}: {answer}")
                firsts[program.name] = [one[0] for one in answer["tokens"]]
                speed = batch * prompt / answer["first"]
                if kind == "decode":
                    speed = batch * (tokens - 1) / answer["after"]
                if number:
                    of_task = speeds.setdefault(f"{kind} {batch} x {prompt}", {})
                    of_task.setdefault(program.name, []).append(speed)
            for name in firsts.keys() - {OURS, LIMIT}:
                pairs = zip(firsts[name], firsts[OURS], strict=True)
                same.setdefault(name, []).extend(one == other for one, other in pairs)
    shares = {name: statistics.mean(values) for name, values in same.items()}
    return {"tokens_per_second": speeds, "same_first_token": shares}


def show(title: str, figures: dict[str, Any]) -> None:
    """A table of medians, and of the median of ratios pair by pair."""
    print(f"\n{title}\n{'task':20} {'program':14} {'tokens/s':>10}   {OURS} is x times as fast")
    for task, speeds in figures["tokens_per_second"].items():
        for name, values in speeds.items():
            pairs = zip(speeds[OURS], values, strict=True)
            ratio = statistics.median(ours / other for ours, other in pairs)
            print(f"{task:20} {name:14} {statistics.median(values):10,.1f} {ratio:8.2f}")
    for name, share in figures["same_first_token"].items():
        print(f"first tokens of {name} that are as {OURS}'s: {share:.0%}", flush=True)


if __name__ == "__main__":
    main()
