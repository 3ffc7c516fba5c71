"""The run that a tier's folder belongs to, as a note in it says. Tiers lie below one path by the
names of their runs: two runs of one name would each resume from the other's steps there."""

import json
from pathlib import Path

from maxstack import strict_json
from maxstack.errors import ConfigError

NAME = "run.json"


def read(path: Path) -> Path | None:
    """Read the run's folder that a tier's folder names; None where it names none."""
    try:
        return Path(strict_json.read_object(path / NAME)["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # before the first save, or cut off by a kill


def claim(path: Path, run: Path) -> None:
    """Record that a tier's folder is this run's. OSError where it cannot be written; ConfigError
    where it belongs to another run that still exists."""
    note = path / NAME
    own = run.resolve()
    text = json.dumps({"run": str(own)})
    try:
        # Of several processes that begin at once, one creates it and the others read what it holds.
        with note.open("x", encoding="utf-8") as file:
            file.write(text)
        return
    except FileExistsError:
        other = read(path)
    # A run that was moved or deleted leaves its tier to whoever has the name next.
    if other and other != own and other.exists():
        raise ConfigError(
            f"checkpoint.tiers: {path} holds the steps of {other}; choose another run.name, or "
            f"another path for the tier. If it is a copy for this run, delete {note}"
        )
    if other != own:
        note.write_text(text, encoding="utf-8")
