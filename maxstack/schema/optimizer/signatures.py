"""Signatures of Optax's transforms and schedules, and of our own schedules, from signatures.json,
which scripts/make_optax_signatures.py writes: checking a configuration imports no optax."""

import dataclasses
import functools
import json
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

Role = Literal["transform", "schedule"]


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a public function."""

    sort: str
    """Sort of value that a configuration writes: number, rate, mask, transform and so on."""
    required: bool = False
    nullable: bool = False
    default: Any = None
    """The default where it is text, a number or a flag."""
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Signature:
    """A public function: its name, the package that holds it, and its arguments by name."""

    name: str
    package: str
    arguments: dict[str, Argument]

    def of_sort(self, sort: str) -> list[str]:
        """Names of the arguments of a sort."""
        return [name for name, argument in self.arguments.items() if argument.sort == sort]


@functools.cache
def lookup(role: Role, name: str) -> Signature | None:
    """The public function `name` of optax or optax.contrib, or of ours; None where there is
    none."""
    entry = _table()[role].get(name)
    return entry and Signature(
        name,
        entry["package"],
        {key: Argument(**argument) for key, argument in entry["arguments"].items()},
    )


def names(role: Role) -> list[str]:
    """All names of a role."""
    return list(_table()[role])


def is_other(name: str) -> bool:
    """True for a public name of Optax that is no transform."""
    return name in _table()["other"]


def version_note() -> str:
    """The end of a message about a name that is not in the table, where another Optax is installed
    than the table is of; else ""."""
    installed, listed = metadata.version("optax"), _table()["version"]
    if installed == listed:
        return ""
    return f"; maxstack knows what Optax {listed} has, and {installed} is installed"


@functools.cache
def _table() -> dict[str, Any]:
    path = Path(__file__).with_name("signatures.json")
    return json.loads(path.read_text(encoding="utf-8"))
