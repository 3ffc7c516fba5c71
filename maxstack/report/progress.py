"""Progress bars."""

import sys

import tqdm


def progress(total: int, description: str, unit: str, done: int = 0, delay: float = 0) -> tqdm.tqdm:
    """Make a bar of `total` units: live on a terminal, elsewhere a line every ten seconds and at
    the end. Work that ends within `delay` seconds shows nothing."""
    return tqdm.tqdm(
        total=total,
        unit=unit if unit == "B" else f" {unit}",
        unit_scale=unit == "B",
        desc=description,
        initial=done,
        mininterval=0.1 if sys.stderr.isatty() else 10,
        delay=delay,
    )
