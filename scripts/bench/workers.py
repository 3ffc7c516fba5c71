"""Processes that tell what they measure, each event as a line of JSON behind MARK, since libraries
print too."""

import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MARK = "@bench "
ROOT = Path(__file__).resolve().parents[2]


def tell(**event: Any) -> None:
    """Print an event."""
    print(MARK + json.dumps(event), flush=True)


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The events among lines."""
    return (json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK))


def start(command: list[str], errors: Any, **variables: str) -> subprocess.Popen[str]:
    """Start a process that finds the modules of scripts/ and maxstack, and may be asked."""
    paths = [str(ROOT / "scripts"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables,
    )
