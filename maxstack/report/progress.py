"""Progress bars of long work."""

import sys

import tqdm


def progress(total: int, description: str, unit: str, done: int = 0) -> tqdm.tqdm:
    """A bar of `total` units on a terminal; elsewhere a line every ten seconds, and at the end."""
    interval = 0.1 if sys.stderr.isatty() else 10
    return tqdm.tqdm(
        total=total, unit=f" {unit}", desc=description, initial=done, mininterval=interval
    )
