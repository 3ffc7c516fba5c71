"""What a run left in its folder, as plain data for the report's page."""

import base64
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxstack import strict_json
from maxstack.config import difference
from maxstack.config.compose import plain
from maxstack.config.reader import MAX_BYTES, read_yaml
from maxstack.config.writer import inline
from maxstack.regular_file import read_regular
from maxstack.report import goodput
from maxstack.report.history import History, Points, last_rows

LINE = re.compile(r"^([0-9-]{10} [0-9:]{8}) (.*)$", re.M)
ROUTINE = re.compile(
    r"step [0-9]+/|(eval|samples?) at step |(kernel|data|tokenizer|weights|xla): |\S+: [0-9,]+ "
    "parameters"
)
"""Beginnings of lines of log.txt that every run has many of."""
BEGINS, ENDED, SLOW = "devices: ", "ended by ", " is slow: "
LOG, LINES = 4 << 20, 200
"""Bytes of log.txt that are read, and lines that are shown."""
TEXTS, PICTURES = 5, 6
"""Rows of texts, and pictures, that are shown at most: the last."""
RECENT = 20
"""Steps in the means that say how the run is now."""
LARGEST = 2 << 20
"""Bytes of a picture."""
PNG = b"\x89PNG\r\n\x1a\n"
COUNTED = {"images_per_second": "images/s", "tokens_per_second": "tokens/s"}
OBJECTIVES = ("next_token", "sft", "masked_diffusion")
"""Kinds whose loss is in nats a token."""


class Recorded:
    """A run's folder, whose files are read anew at each `data`, and metrics.jsonl where it grew."""

    def __init__(self, folder: Path, history: History):
        self.folder, self._history = folder, history
        self._series = self._means = dict[str, Points]()

    def data(self, checkpoints: Sequence[tuple[int, Sequence[str]]]) -> dict[str, Any]:
        """All that the page shows of the run. `checkpoints`: (step, cells of the table)."""
        if self._history.update():
            self._series, self._means = self._history.series()
        config, spent, lines = self.config(), goodput.so_far(self.folder), self._log()
        events = [(step, kind) for step, kind in self._history.events]
        events += [(step, kind) for _, step, kind in spent.resumes]
        events += [(step, "checkpoint") for step in {step for step, _ in checkpoints}]
        objective = config.get("objective") or {}
        return {
            "name": self.folder.resolve().name,
            "folder": str(self.folder),
            **self._progress(config, spent, lines),
            "unit": "nats a token" if objective.get("kind") in OBJECTIVES else "",
            "series": self._series,
            "means": self._means,
            "events": events,
            "goodput": _shares(spent),
            "checkpoints": [cells for _, cells in checkpoints],
            "stragglers": [line for line in lines if SLOW in line[1]],
            "log": lines[-LINES:],
            "texts": self._history.texts(TEXTS),
            "pictures": pictures(self.folder / "samples"),
            "remarks": [*self._remarks(), *spent.remarks],
        }

    def config(self) -> dict[str, Any]:
        """The configuration in config.yml; empty where that cannot be read."""
        read = self._read("config.yml", lambda text: plain(read_yaml(text, "config.yml")))
        return read if isinstance(read, dict) else {}

    def versions(self) -> dict[str, Any]:
        """Those of versions.json; empty where that cannot be read."""
        read = self._read("versions.json", lambda text: strict_json.parse(text, "versions.json"))
        return read if isinstance(read, dict) else {}

    def _read(self, name: str, parse: Any) -> Any:
        try:
            return parse(read_regular(self.folder / name, MAX_BYTES).decode())
        except (OSError, ValueError):
            return None

    def _log(self) -> list[tuple[str, str]]:
        """(time, text) of the lines of log.txt that are not routine."""
        try:
            with (self.folder / "log.txt").open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - LOG))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [(when, line) for when, line in LINE.findall(text) if not ROUTINE.match(line)]

    def _progress(
        self, config: dict[str, Any], spent: goodput.Goodput, lines: Sequence[tuple[str, str]]
    ) -> dict[str, Any]:
        """How far the run is, how fast, and whether it runs."""
        trained = [row for row in last_rows(self.folder) if "loss" in row]
        last = trained[-1] if trained else {}
        recent = [row for row in trained if not row.get("skipped")][-RECENT:]
        step, steps = last.get("step", 0), (config.get("train") or {}).get("steps", 0)
        quiet = time.time() - spent.seen
        begun = max((i for i, (_, line) in enumerate(lines) if line.startswith(BEGINS)), default=0)
        errors = [line for _, line in lines[begun:] if line.startswith(ENDED)]
        if not spent.began:
            state, words = "unknown", f"no {goodput.FILE}, which says whether it runs"
        elif spent.ended:
            state = "finished" if steps and step >= steps else "stopped"
            words = "" if state == "finished" else "the same command goes on"
        elif errors:
            state, words = "failed", errors[-1]
        elif quiet < 5 + 3 * max(1.0, min(30.0, spent.lived / 100)):
            state, words = "running", ""
        else:
            state, words = "killed", "without a word; the same command goes on"
        means = {}
        for key in ("loss", "step_seconds", "mfu", *COUNTED):
            # The mean of a rate is all tokens over all seconds.
            by = "" if key in ("loss", "step_seconds") else "step_seconds"
            rows = [(row[key], row.get(by, 1.0)) for row in recent if _is_finite(row.get(key))]
            if rows:
                means[key] = sum(map(math.prod, rows)) / sum(weight for _, weight in rows)
        rate = next((key for key in COUNTED if key in means), "")
        return {
            "state": state,
            "why": words,
            "seen": spent.seen,
            "step": step,
            "steps": steps,
            "tokens": last.get("tokens"),
            "rate": [means[rate], COUNTED[rate]] if rate else None,
            "loss": means.get("loss"),
            "mfu": means.get("mfu"),
            "left": (steps - step) * means.get("step_seconds", 0.0) if state == "running" else None,
        }

    def _remarks(self) -> list[str]:
        history = self._history
        remarks = [
            f"{name} cannot be read"
            for name, content in (("config.yml", self.config()), ("versions.json", self.versions()))
            if not content and (self.folder / name).exists()
        ]
        if not (self.folder / "metrics.jsonl").exists():
            remarks.append("metrics.jsonl is not there: no step has been done")
        elif not history.rows:
            remarks.append("metrics.jsonl holds no row")
        if history.damaged:
            lines = "1 line" if history.damaged == 1 else f"{history.damaged:,} lines"
            verb = "is" if history.damaged == 1 else "are"
            remarks.append(f"{lines} of metrics.jsonl cannot be read and {verb} left out")
        if history.sampled < 1:
            remarks.append(
                f"figures are sampled: {history.sampled:.1%} of metrics.jsonl was read, so that "
                "refused steps, evaluations and extremes between may be missing; `maxstack report "
                "--exact` reads all of it once"
            )
        return remarks


def compared(runs: Sequence[Recorded]) -> dict[str, Any]:
    """Versions of all runs beside each other, and what differs between their configurations: rows
    of a key and the value of each run."""
    versions, configs = [run.versions() for run in runs], [run.config() for run in runs]
    names = dict.fromkeys(name for each in versions for name in each)
    changes: dict[str, list[str]] = {}
    for i, other in enumerate(configs[1:], 1):
        for key, old, new in difference(configs[0], other):
            changes.setdefault(key, [inline(old)] * len(runs))[i] = inline(new)
    return {
        "versions": [[name, *(str(each.get(name, "")) for each in versions)] for name in names],
        "differences": [[key, *cells] for key, cells in changes.items() if key != "run.name"],
    }


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _shares(spent: goodput.Goodput) -> dict[str, Any] | None:
    """Seconds by cause, with the meaning of each; None for a run without a ledger."""
    if not spent.began:
        return None
    causes = [(cause, spent.seconds[cause], why) for cause, why in goodput.CAUSES.items()]
    return {"sentence": goodput.sentence(spent), "wall": spent.wall, "causes": causes}


def pictures(folder: Path) -> list[tuple[str, str]]:
    """(file's name, data URL) of the last pictures in a folder, by name."""
    found: list[tuple[str, str]] = []
    paths = sorted(folder.glob("*.png"), reverse=True) if folder.is_dir() else []
    for path in paths:
        if len(found) == PICTURES or path.is_symlink() or not path.is_file():
            continue
        if path.stat().st_size > LARGEST:
            continue
        if (data := path.read_bytes()).startswith(PNG):
            url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
            found.append((path.name, url))
    return found[::-1]
