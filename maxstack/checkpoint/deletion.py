"""Steps that the retention of a run deletes while they are read.

manifest.delete takes the manifest first: what was read before that was whole. What was read after
may have failed in any library, or be zeros where an array's files were gone.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from maxstack.checkpoint import manifest
from maxstack.errors import ConfigError

Result = TypeVar("Result")


def is_whole(step: Path) -> bool:
    """False where a step was deleted, is being deleted, or was never finished."""
    return (step / manifest.NAME).exists()


def deleted(step: Path) -> ConfigError:
    """The error for a step that is not whole, with the steps that are left."""
    left = ", ".join(map(str, manifest.steps(step.parent))) or "no other step"
    return ConfigError(
        f"{step}: was deleted meanwhile, as a run's retention does (checkpoint.keep), or never "
        f"finished; {step.parent} holds {left}; give one that is there, or the run's folder for "
        "its newest"
    )


def on_found(
    find: Callable[[], Path], work: Callable[[Path], Result], alone: bool = True
) -> Result:
    """`work` with the step that `find` finds, and with the next that it finds where that one was
    deleted meanwhile. Not `alone`: ConfigError there, as other processes could find another."""
    while True:
        step = find()
        try:
            return work(step)
        except Exception as error:  # whatever a library makes of files that are gone
            if is_whole(step):
                raise
            if not alone:
                raise deleted(step) from error
            print(f"{step}: was deleted meanwhile; looking for the newest step", file=sys.stderr)
