"""What a figure was measured on, and what the interpreters of peers have installed."""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any


def processor() -> str:
    """The name of the first processor."""
    try:
        rows = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        rows = []
    names = (row.partition(":")[2].strip() for row in rows if row.startswith("model name"))
    return next(names, platform.processor())


def lacks(python: str, packages: list[str]) -> list[str]:
    """The packages that an interpreter lacks; all of them if there is no such interpreter."""
    missing = _ask(python, f"[p for p in {packages} if find_spec(p) is None]")
    return packages if missing is None else missing


def versions(python: str, packages: list[str]) -> dict[str, str]:
    """Versions of those packages that an interpreter has; none if there is no such interpreter."""
    return _ask(python, f"{{p: version(p) for p in {packages} if find_spec(p)}}") or {}


def _ask(python: str, expression: str) -> Any:
    """The value of an expression in another interpreter; None if there is no such interpreter."""
    code = (
        "import json; from importlib.metadata import version; "
        f"from importlib.util import find_spec; print(json.dumps({expression}))"
    )
    try:
        printed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return json.loads(printed.stdout)
