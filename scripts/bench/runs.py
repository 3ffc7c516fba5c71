"""Runs of the recipes, each trained once."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = "seconds"
"""File beside a run's own: how long it took, from start to end of the process."""


def trained(out: Path, name: str, recipe: str, *overrides: str) -> Path:
    """The folder of a run that is done."""
    words = [f"configs/recipes/{recipe}.yml", f"run.output_dir={out.absolute()}", *overrides]
    command = [sys.executable, "-m", "maxstack.train", *words, f"run.name={name}"]
    begun = time.monotonic()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    file = out.absolute() / name / SECONDS
    if not file.exists():
        file.write_text(f"{time.monotonic() - begun:.0f}\n")
    return file.parent


def seconds(run: Path) -> int:
    """How long a run took."""
    return int((run / SECONDS).read_text())
