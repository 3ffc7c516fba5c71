"""The speed of the feed alone, in tokens/s: four sources of token shards, mixed by tokens with
weights over steps, under each packing.
example: python scripts/bench/feed_tokens.py --documents 20000
"""

import argparse
import contextlib
import json
import os
import tempfile
import time

import numpy as np

from maxstack.data.engines import Processes
from maxstack.data.feed import Feed
from maxstack.data.prepare import prepare
from maxstack.schema.data import DataConfig

SOURCES = "web", "code", "books", "talk"
WARM = 3
ROWS, LENGTH = 16, 2048


def main() -> None:
    """Print a line of JSON for each packing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=20_000, help="of each source")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batches", type=int, default=192)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number, name in enumerate(SOURCES):
            random = np.random.default_rng(number)
            with open(f"{name}.jsonl", "w") as file:
                for _ in range(args.documents):
                    letters = random.integers(97, 123, int(random.lognormal(6, 1)) + 1, np.uint8)
                    file.write(json.dumps({"text": letters.tobytes().decode()}) + "\n")
            texts = {"kind": "jsonl", "name": name, "files": [f"{name}.jsonl"]}
            cfg = DataConfig.model_validate({"sources": [texts]})
            prepare(cfg, name, Processes(os.cpu_count() or 1))
        for packing in ("concat", "fit", "best", "none"):
            measure(packing, args)


def measure(packing: str, args: argparse.Namespace) -> None:
    """Print the tokens/s of one packing."""
    sources = [
        {
            "kind": "array_record",
            "content": "tokens",
            "name": name,
            "files": [f"{name}/*.array_record"],
            "weight": [[1, 1.0], [1000, float(number)]],
        }
        for number, name in enumerate(SOURCES, 1)
    ]
    cfg = DataConfig.model_validate(
        {
            "sources": sources,
            "seq_len": LENGTH,
            "packing": packing,
            "workers": args.workers,
            "mixture": {"by": "tokens"},
        }
    )
    feed = Feed(cfg, range(ROWS), ROWS)
    for _ in range(WARM):
        next(feed)
    start, tokens = time.perf_counter(), 0
    for _ in range(args.batches):
        tokens += int((next(feed)["segments"] > 0).sum())
    seconds = time.perf_counter() - start
    feed.close()
    rate = {"packing": packing, "tokens_per_second": tokens / seconds}
    print(json.dumps(rate | {"padding": 1 - tokens / (args.batches * ROWS * LENGTH)}))


if __name__ == "__main__":
    main()
