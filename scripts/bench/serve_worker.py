"""A program of bench_serve.py that stays alive: opens the model that its argument describes in
JSON, then measures what it is asked, an event for each line of input. A program is a module with
`load(folder, dtype, threads, length)`, which gives a function from (prompts, tokens) to (tokens of
each answer, seconds from the start to the moment when every request has its first, second, ...
token). Greedy, and no token ends an answer.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from bench.workers import tell

MODULES = {
    "maxstack": "bench.serve_maxstack",
    "transformers": "bench.serve_transformers",
    "bandwidth": "bench.serve_bandwidth",
}
Measured = tuple[list[list[int]], list[float]]
Answer = Callable[[list[list[int]], int], Measured]


def answer(ask: Answer, vocab: int, asked: dict[str, int]) -> dict[str, object]:
    """Seconds to the first token of all `batch` prompts, and of the steps after it together."""
    rng = np.random.default_rng(asked["seed"])
    prompts = rng.integers(0, vocab, (asked["batch"], asked["prompt"])).tolist()
    tokens, seconds = ask(prompts, asked["tokens"])
    return {
        "first": seconds[0],
        "after": seconds[-1] - seconds[0],
        "tokens": tokens,
        "whole": len(tokens) == len(prompts) and all(len(t) == asked["tokens"] for t in tokens),
    }


def main() -> None:
    """Open the model, say so, and answer until the input ends."""
    args = SimpleNamespace(**json.loads(sys.argv[1]))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    module = importlib.import_module(MODULES[args.program])
    with open(f"{args.folder}/config.json", encoding="utf-8") as file:
        vocab = json.load(file)["vocab_size"]
    given = args.folder, args.dtype, args.threads, args.length
    own = [args.overrides] if args.program == "maxstack" else []
    ask = module.load(*given, *own)
    tell(ready=args.program)
    for line in sys.stdin:
        tell(**answer(ask, vocab, json.loads(line)))


if __name__ == "__main__":
    try:
        main()
    except Exception:
        tell(failed=traceback.format_exc())
        raise
