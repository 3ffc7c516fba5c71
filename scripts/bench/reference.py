"""What the peers of the reference work share: their options, and the figures that they print."""

import argparse
import resource
import statistics
from collections.abc import Sequence

from bench import arguments


def parser(text: str) -> argparse.ArgumentParser:
    """A parser with the sizes of the work; heads have 64 channels, the MLP is four times as wide as
    the model."""
    made = arguments.parser(text)
    made.add_argument("dtype", choices=("f32", "bf16"))
    made.add_argument("--embed", type=int, default=256, help="a multiple of 128 (default: 256)")
    made.add_argument("--length", type=int, default=512, help="of a row (default: 512)")
    made.add_argument("--rows", type=int, default=4, help="of a batch (default: 4)")
    made.add_argument(
        "--steps", type=int, default=21, help="the first is not counted (default: 21)"
    )
    made.add_argument("--tiny", action="store_true", help="one layer, to show that it runs")
    return made


def figures(seconds: Sequence[float], tokens: int) -> dict[str, float]:
    """Tokens/s by the median of the steps' seconds, and the process's peak memory in GB."""
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }
