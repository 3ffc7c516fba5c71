"""What the checks of bench_gpu.py found of every backend."""

from typing import Any


class Verdicts:
    """What the checks found of every backend."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._found: dict[tuple[str, str, str], str] = {}
        for row in rows:
            self.add(row, row)

    def add(self, row: dict[str, Any], figures: dict[str, Any]) -> None:
        """The result of a check; other rows are passed over."""
        if "case" in row:
            self._found[row["op"], row["backend"], row["case"]] = figures["status"]

    def refusal(self, op: str, backend: str, case: str) -> str | None:
        """Why a speed may not be shown: a check of the backend was wrong, or the one that is meant
        by `case` did not pass."""
        if wrong := self.wrong(op, backend):
            return f"wrong: {wrong}"
        found = self._found.get((op, backend, case), "not reached")
        return None if found == "ok" else f"unchecked: its check {case} is {found}"

    def right(self, op: str, backend: str) -> bool:
        """Whether a backend passed any check."""
        return any(
            (o, b) == (op, backend) and status == "ok" for (o, b, _), status in self._found.items()
        )

    def wrong(self, op: str, backend: str) -> str | None:
        """Which checks of a backend gave wrong numbers; None: none did."""
        names = [
            name
            for (o, b, name), status in self._found.items()
            if (o, b) == (op, backend) and status == "wrong"
        ]
        return f"{op} {backend} is wrong on this device: {', '.join(names)}" if names else None
