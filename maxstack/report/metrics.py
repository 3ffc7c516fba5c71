"""Writer of a run's metrics: metrics.jsonl, pictures, and trackers."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack import strict_json
from maxstack.report import history
from maxstack.report.append import Appender, newest
from maxstack.report.trackers import Trackers

if TYPE_CHECKING:
    from PIL.Image import Image


def last_step(folder: Path) -> int:
    """The step of the last whole row in metrics.jsonl; 0 where there is none."""
    rows = newest(folder / "metrics.jsonl")
    return next((row["step"] for row in rows if isinstance(row.get("step"), int)), 0)


class Writer:
    """Appends to metrics.jsonl an object per line, floats in full precision, as strict_json writes
    it, and hands the same to trackers. Processes other than the first write nothing."""

    def __init__(self, folder: Path, first: bool, trackers: Trackers | None = None, begin: int = 0):
        """`begin`: the step that the run goes on from. What a kill may have kept from trackers of
        the last rows up to there is handed to them again."""
        self._folder, self._trackers, self._rows = folder, trackers, 0
        self._file = Appender(folder / history.FILE) if first else None
        self._index = history.Index(folder)
        if trackers and trackers.cut_short:
            for row in _counted(history.last_rows(folder), begin):
                self._track(row)

    def write(self, row: dict[str, Any]) -> None:
        """Append one object; `row["step"]` is its position on the axis of trackers."""
        if self._file:
            self._file.add(strict_json.write(row) + "\n")
            self._rows += 1
            if self._rows % history.ROWS == 0:
                self._index.extend(most=2)
        self._track(row)

    def image(self, name: str, step: int, picture: "Image") -> str:
        """Write a picture to NAME/STEP.png in the run's folder, and to trackers; its path."""
        path = self._folder / name / f"{step:08}.png"
        if self._file:
            path.parent.mkdir(exist_ok=True)
            picture.save(path)
        if self._trackers:
            self._trackers.add("image", step, name, picture)
        return str(path)

    def close(self) -> None:
        """Wait until trackers have all, and end them."""
        if self._trackers:
            self._trackers.close()

    def _track(self, row: dict[str, Any]) -> None:
        """Hand a row to trackers."""
        if self._trackers is None:
            return
        step, values = row["step"], dict[str, float]()
        for name, value in row.items():
            if isinstance(value, list):
                self._trackers.add("texts", step, name, [*map(str, value)])
            elif name != "step" and isinstance(value, int | float):
                values[_titled(name)] = value
        if values:
            self._trackers.add("scalars", step, values)


def _counted(rows: list[dict[str, Any]], last: int) -> list[dict[str, Any]]:
    """The rows up to a step, without those that a later row undoes."""
    counted, undone = [], last + 1
    for row in reversed(rows):
        if row["step"] < undone:
            counted.append(row)
            if "loss" in row or "passed_over" in row:
                undone = row["step"]
    return counted[::-1]


def _titled(name: str) -> str:
    """The name of a figure in trackers, which make a section of what stands before its slash."""
    if name.startswith("tasks/"):
        return name
    return f"{'eval' if name.startswith('eval_') else 'train'}/{name}"
