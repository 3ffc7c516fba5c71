"""Arguments and the clock of feed_images.py and torch_loader.py."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

WARM = 2
"""Batches before the clock starts."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """That of both."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="holds a folder of .jpg files for each class")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--size", type=int, default=224)
    return parser


def measure(make: Callable[[], object], args: argparse.Namespace) -> None:
    """Print the images a second of `make`, which makes a batch, as JSON."""
    for _ in range(WARM):
        make()
    start = time.perf_counter()
    for _ in range(args.batches):
        make()
    seconds = time.perf_counter() - start
    print(json.dumps({"images_per_second": args.batches * args.batch / seconds}))
