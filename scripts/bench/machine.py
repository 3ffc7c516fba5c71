"""What a figure was measured on."""

import platform
from pathlib import Path


def processor() -> str:
    """The name of the first processor."""
    try:
        rows = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        rows = []
    return next(
        (row.partition(":")[2].strip() for row in rows if row.startswith("model name")),
        platform.processor(),
    )
