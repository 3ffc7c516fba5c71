"""Results of the checks of bench_gpu.py."""

from typing import Any


class Verdicts:
    """Status of every check, by op and backend."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._statuses: dict[tuple[str, str], dict[str, str]] = {}
        for row in rows:
            self.add(row, row)

    def add(self, row: dict[str, Any], figures: dict[str, Any]) -> None:
        """Add the result of a check; other rows are ignored."""
        if "case" in row:
            statuses = self._statuses.setdefault((row["op"], row["backend"]), {})
            statuses[row["case"]] = figures["status"]

    def refusal(self, op: str, backend: str, case: str) -> str | None:
        """Why a speed may not be shown: a check of the backend was wrong, or the check `case` did
        not pass. None if it may."""
        if wrong := self.wrong(op, backend):
            return f"wrong: {wrong}"
        status = self._statuses.get((op, backend), {}).get(case, "not reached")
        return None if status == "ok" else f"unchecked: its check {case} is {status}"

    def right(self, op: str, backend: str) -> bool:
        """True if a backend passed any check."""
        return "ok" in self._statuses.get((op, backend), {}).values()

    def wrong(self, op: str, backend: str) -> str | None:
        """The checks in which a backend gave wrong numbers, as a sentence; None if there are
        none."""
        statuses = self._statuses.get((op, backend), {})
        names = [name for name, status in statuses.items() if status == "wrong"]
        return f"{op} {backend} is wrong on this device: {', '.join(names)}" if names else None
