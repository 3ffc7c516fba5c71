"""Writes a run's metrics to metrics.jsonl and trackers, and its pictures to files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack import strict_json
from maxstack.report import history
from maxstack.report.append import Appender, newest
from maxstack.report.trackers import Trackers

if TYPE_CHECKING:
    from PIL.Image import Image


def last_step(folder: Path) -> int:
    """Return the step of the last whole row in metrics.jsonl; 0 if there is none."""
    rows = newest(folder / "metrics.jsonl")
    return next((row["step"] for row in rows if isinstance(row.get("step"), int)), 0)


class Writer:
    """Appends one object per line to metrics.jsonl, floats in full precision, and passes it on to
    trackers. Processes other than the first write nothing."""

    def __init__(self, folder: Path, first: bool, trackers: Trackers | None = None, begin: int = 0):
        """`begin`: the step that the run resumes from. If the previous process may have been killed
        before its trackers wrote everything, they get the last rows up to that step again."""
        self._folder = folder
        self._trackers = trackers
        self._file = Appender(folder / history.FILE) if first else None
        # A tracker's buffer dies with a killed process: wandb's file grows by 32 KiB, and a killed
        # run of 3 s had no row.
        if trackers and trackers.cut_short:
            for row in rows_that_count(history.last_rows(folder), begin):
                self._track(row)

    def write(self, row: dict[str, Any]) -> None:
        """Append one object; `row["step"]` is the step that trackers log it at."""
        if self._file:
            # Not json.dumps: bare NaN and Infinity are read by no parser but Python's.
            self._file.add(strict_json.write(row) + "\n")
        self._track(row)

    def image(self, name: str, step: int, picture: "Image") -> str:
        """Write a picture to NAME/STEP.png in the run's folder, and to trackers; return its
        path."""
        path = self._folder / name / f"{step:08}.png"
        if self._file:
            path.parent.mkdir(exist_ok=True)
            picture.save(path)
        if self._trackers:
            self._trackers.add("image", step, name, picture)
        return str(path)

    def close(self) -> None:
        """Wait until the trackers have written everything, and end them."""
        if self._trackers:
            self._trackers.close()

    def _track(self, row: dict[str, Any]) -> None:
        """Pass a row on to trackers."""
        if self._trackers is None:
            return
        step = row["step"]
        values = dict[str, float]()
        for name, value in row.items():
            if isinstance(value, list):
                self._trackers.add("texts", step, name, [*map(str, value)])
            elif name != "step" and isinstance(value, int | float):
                values[_tracker_name(name)] = value
        if values:
            self._trackers.add("scalars", step, values)


def rows_that_count(rows: list[dict[str, Any]], last: int) -> list[dict[str, Any]]:
    """Return the rows up to a step, without those that a later row undoes."""
    kept = []
    undone = last + 1
    # From the end: a row counts unless a later row trains its step, or an earlier one, again.
    for row in reversed(rows):
        if row["step"] < undone:
            kept.append(row)
            # Rows of evaluations bear the step after which they ran and undo nothing.
            if "loss" in row or "passed_over" in row:
                undone = row["step"]
    return kept[::-1]


def _tracker_name(name: str) -> str:
    """Prefix a metric's name with its section in trackers, which group names by what precedes the
    slash."""
    if name.startswith("tasks/"):
        return name
    return f"{'eval' if name.startswith('eval_') else 'train'}/{name}"
