"""What a run reports: the chip's peak, and the writers (console, metrics.jsonl, TensorBoard,
log.txt)."""

import json
from pathlib import Path
from typing import Any

from maxstack.report.append import Appender


class Writer:
    """metrics.jsonl, one object a line with floats in full precision, appended and flushed;
    TensorBoard beside it."""

    def __init__(self, folder: Path, tensorboard: bool, first: bool):
        self._file = None
        self._board = None
        if not first:
            return
        self._file = Appender(folder / "metrics.jsonl")
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)

    def write(self, row: dict[str, Any]) -> None:
        """Append one object; `row["step"]` is its place on TensorBoard's axis."""
        if self._file:
            self._file.add(json.dumps(row) + "\n")
        if self._board:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(
                        f"{'eval' if name.startswith('eval_') else 'train'}/{name}",
                        value,
                        row["step"],
                    )

    def close(self) -> None:
        """Flush and close TensorBoard's file."""
        if self._board:
            self._board.close()
