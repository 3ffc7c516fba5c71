"""Types of the whole package and of a user's file, by mypy as pyproject.toml sets it."""

import subprocess
import sys
from pathlib import Path


def test_mypy_finds_nothing():
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "maxstack", "tests/typed_user.py"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
