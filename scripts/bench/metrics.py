"""Rows of a run's metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

from maxstack import strict_json


def rows(file: Path, key: str) -> list[dict[str, Any]]:
    """The rows that hold `key`, in order.

    Evaluations, goodput and skipped batches have rows of their own, without a step's figures.
    """
    read = map(json.loads, file.read_text().splitlines())
    return [row for row in map(strict_json.restore, read) if key in row]
