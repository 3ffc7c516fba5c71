"""Writer of a run's metrics: metrics.jsonl and TensorBoard."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxstack.report.append import Appender, newest

if TYPE_CHECKING:
    from PIL.Image import Image


def last_step(folder: Path) -> int:
    """The step of the last whole row in metrics.jsonl; 0 where there is none."""
    rows = newest(folder / "metrics.jsonl")
    return next((row["step"] for row in rows if isinstance(row.get("step"), int)), 0)


class Writer:
    """Appends to metrics.jsonl an object per line, floats in full precision, and writes
    TensorBoard's file beside it. Processes other than the first write nothing."""

    def __init__(self, folder: Path, tensorboard: bool, first: bool):
        self._folder = folder
        self._file = Appender(folder / "metrics.jsonl") if first else None
        self._board = None
        if first and tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)

    def write(self, row: dict[str, Any]) -> None:
        """Append one object; `row["step"]` is its position on TensorBoard's axis."""
        if self._file:
            self._file.add(json.dumps(row) + "\n")
        if self._board:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    section = "eval" if name.startswith("eval_") else "train"
                    self._board.add_scalar(f"{section}/{name}", value, row["step"])
                elif isinstance(value, list):
                    texts = "\n\n---\n\n".join(map(str, value))
                    self._board.add_text(name, texts, row["step"])

    def image(self, name: str, step: int, picture: "Image") -> str:
        """Write a picture to NAME/STEP.png in the run's folder, and to TensorBoard; its path."""
        path = self._folder / name / f"{step:08}.png"
        if self._file:
            path.parent.mkdir(exist_ok=True)
            picture.save(path)
        if self._board:
            pixels = np.asarray(picture.convert("RGB"))
            self._board.add_image(name, pixels, step, dataformats="HWC")
        return str(path)

    def close(self) -> None:
        """Flush and close TensorBoard's file."""
        if self._board:
            self._board.close()
