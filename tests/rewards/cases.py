"""Rewards of hostile.py, cases for them, and the processes that they leave."""

import contextlib
import time
from pathlib import Path

from maxstack.rewards.pool import Case
from maxstack.schema.rewards import FunctionReward


def function(name, /, **keys):
    """A section of a reward of hostile.py."""
    return FunctionReward(kind="function", call=f"rewards.hostile:{name}", **keys)


def case(completion="four", **row):
    return Case(
        "prompt", completion, f"<s>{completion}", row, len(completion), False, "rows.jsonl:7"
    )


def marked(mark):
    """Numbers of the living processes whose environment has the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def parent(number):
    """The number of a process's parent."""
    return int(_stat(number)[1])


def ended(number):
    """True where a process can be waited for: its environment is gone a little earlier."""
    try:
        return _stat(number)[0] == "Z"
    except OSError:
        return True


def _stat(number):
    """State, parent and further fields of a process."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()


def awaited(condition, seconds=5.0):
    """True as soon as the condition is, False if it does not become so."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
