"""A reward that random weights can learn from, and that stands still where a drill says so."""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WAIT, HELD = "wait", "held"
SECONDS, USUAL = 30.0, 0.02
"""For which it stands still at most; which it takes anyway, so that a step takes about as long as a
save."""


def sevens(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Sevens in the completion, and a tenth for each other digit that it has. The first call that
    finds the file WAIT in the folder of the fault `hold` renames it to HELD, with the numbers of
    its process and of its worker, and stands still."""
    fault = json.loads(os.environ.get("DRILL_FAULT", "{}"))
    if fault.get("kind") == "hold":
        folder = Path(fault["folder"])
        mine = folder / f"{os.getpid()} {os.getppid()}"
        with contextlib.suppress(FileNotFoundError):
            (folder / WAIT).rename(mine)
            mine.rename(folder / f"{HELD} {mine.name}")
            time.sleep(SECONDS)
    time.sleep(USUAL)
    return completion.count("7") + len({*completion}) / 10
