"""The steps of a configuration, opened."""

from collections.abc import Mapping, Sequence
from typing import Any

from maxstack.config import storage
from maxstack.data.steps import (
    c4,
    characters,
    contamination,
    duplicates,
    gopher,
    personal,
)
from maxstack.data.steps.step import KINDS, Removed, Step, unreadable
from maxstack.schema.steps import (
    CHANGING,
    GLOBAL,
    AnyStep,
    C4Step,
    DecontaminateStep,
    NearDuplicatesStep,
)

OWN = c4, characters, contamination, gopher, personal
"""Modules that declare kinds."""
Found = Mapping[int, Any]
"""Data of steps that the driver reads once, by the step's number."""


def found(steps: Sequence[AnyStep], task_texts: Mapping[str, Sequence[str]]) -> Found:
    """What steps need besides their section. ConfigError where a file cannot be read."""
    made: dict[int, Any] = {}
    for number, step in enumerate(steps):
        if isinstance(step, DecontaminateStep):
            made[number] = contamination.grams_of(step, task_texts)
        if isinstance(step, C4Step) and step.bad_words:
            try:
                lines = storage.read_whole(step.bad_words).decode().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise unreadable("c4.bad_words", step.bad_words, error) from error
            made[number] = [line.strip() for line in lines if line.strip()]
    return made


def opened(steps: Sequence[AnyStep], found: Found, *, changing: bool = False) -> dict[int, Step]:
    """The steps for single documents by number; `changing`: those that may change a text alone.
    ConfigError where a package is not installed."""
    if any(isinstance(step, NearDuplicatesStep) for step in steps):
        duplicates.check_installed()
    return {
        number: KINDS[type(step)](step, *([found[number]] if number in found else []))
        for number, step in enumerate(steps)
        if not isinstance(step, GLOBAL) and (isinstance(step, CHANGING) or not changing)
    }


def changed(text: str, steps: Mapping[int, Step]) -> str:
    """A text that no step removes, after those that may change it."""
    for step in steps.values():
        made = step(text)
        assert not isinstance(made, Removed), "a document that was kept is removed by the same step"
        text = made
    return text
