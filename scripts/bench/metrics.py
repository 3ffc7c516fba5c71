"""Rows of a run's metrics.jsonl."""

import json
from pathlib import Path
from typing import Any


def rows(file: Path, key: str) -> list[dict[str, Any]]:
    """The rows that hold `key`, in order.

    Evaluations, goodput and skipped batches have rows of their own, without a step's figures.
    """
    return [row for line in file.read_text().splitlines() if key in (row := json.loads(line))]
