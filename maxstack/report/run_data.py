"""Reads a run's folder as plain data for the report's page."""

import base64
import itertools
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
"""Lines of log.txt that every run has many of, by their beginnings."""
BEGINS = "devices: "
ENDED = "ended by "
SLOW = " is slow: "
LOG = 4 << 20
"""Bytes of log.txt that are read, from its end."""
LINES = 200
"""Lines of log.txt that are shown, the last."""
TEXTS = 5
"""Rows of texts that are shown, the last."""
PICTURES = 6
"""Pictures that are shown, the last."""
RECENT = 20
"""Steps in the means of current loss and speed."""
LARGEST = 2 << 20
"""Bytes of a picture."""
PNG = b"\x89PNG\r\n\x1a\n"
COUNTED = {"images_per_second": "images/s", "tokens_per_second": "tokens/s"}
OBJECTIVES = ("next_token", "sft", "masked_diffusion")
"""Kinds whose loss is in nats per token."""


class RunData:
    """A run's folder. `data` reads its files again, and what has been added to metrics.jsonl."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._history = History(folder)
        self._series = dict[str, Points]()
        self._means = dict[str, Points]()

    def data(self, checkpoints: Sequence[tuple[int, Sequence[str]]]) -> dict[str, Any]:
        """Return all that the page shows of the run. `checkpoints`: (step, cells of the table)."""
        # A live page asks every few seconds, and mostly nothing has changed.
        if self._history.update():
            self._series, self._means = self._history.series()
        config = self.config()
        spent = goodput.so_far(self.folder)
        lines = self._log()
        events = [*self._history.events]
        events += [(step, kind) for _, step, kind in spent.resumes]
        events += dict.fromkeys((step, "checkpoint") for step, _ in checkpoints)
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
        """Return the configuration in config.yml; empty if it cannot be read."""
        read = self._read("config.yml", lambda text: plain(read_yaml(text, "config.yml")))
        return read if isinstance(read, dict) else {}

    def versions(self) -> dict[str, Any]:
        """Return the versions in versions.json; empty if it cannot be read."""
        read = self._read("versions.json", lambda text: strict_json.parse(text, "versions.json"))
        return read if isinstance(read, dict) else {}

    def _read(self, name: str, parse: Any) -> Any:
        try:
            return parse(read_regular(self.folder / name, MAX_BYTES).decode())
        except (OSError, ValueError):
            return None

    def _log(self) -> list[tuple[str, str]]:
        """Return (time, text) of the lines of log.txt that are not routine."""
        try:
            with (self.folder / "log.txt").open("rb") as file:
                # From its end: the log of a run of months is larger than a page should read.
                file.seek(max(0, file.seek(0, 2) - LOG))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [(when, line) for when, line in LINE.findall(text) if not ROUTINE.match(line)]

    def _progress(
        self, config: dict[str, Any], spent: goodput.Goodput, lines: Sequence[tuple[str, str]]
    ) -> dict[str, Any]:
        """Return the run's progress and speed, and whether it is running."""
        # The last bytes of metrics.jsonl are enough, so progress costs the same for a run of any
        # length.
        trained = [row for row in last_rows(self.folder) if "loss" in row]
        last = trained[-1] if trained else {}
        recent = [row for row in trained if not row.get("skipped")][-RECENT:]
        step = last.get("step", 0)
        steps = (config.get("train") or {}).get("steps", 0)
        quiet = time.time() - spent.seen
        errors: list[str] = []
        """Those of the last process."""
        for _, line in lines:
            # log.txt holds all processes of the run; each begins with a line of its devices.
            if line.startswith(BEGINS):
                errors.clear()
            elif line.startswith(ENDED):
                errors.append(line)
        if not spent.began:
            state, words = "unknown", f"there is no {goodput.FILE} to tell its state"
        elif spent.ended:
            state = "finished" if steps and step >= steps else "stopped"
            words = "" if state == "finished" else "run the same command to resume"
        elif errors:
            state, words = "failed", errors[-1]
        # Three times the pause between two rows of the ledger (ledger.py), and 5 s for a slow disk.
        elif quiet < 5 + 3 * max(1.0, min(30.0, spent.lived / 100)):
            state, words = "running", ""
        else:
            state, words = "killed", "run the same command to resume"
        means = {}
        for key in ("loss", "step_seconds", "mfu", *COUNTED):
            # A mean rate is weighted by seconds: all tokens over all seconds.
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
        contents = {"config.yml": self.config(), "versions.json": self.versions()}
        remarks = [
            f"{name} cannot be read"
            for name, content in contents.items()
            if not content and (self.folder / name).exists()
        ]
        if not (self.folder / "metrics.jsonl").exists():
            remarks.append("there is no metrics.jsonl: no step has been done")
        elif not history.rows:
            remarks.append("metrics.jsonl is empty")
        if history.damaged:
            remarks.append(f"damaged lines of metrics.jsonl, left out: {history.damaged:,}")
        return remarks


def compared(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return the versions of all runs side by side, and what differs between their configurations:
    rows of a key and the value of each run."""
    versions = [run.versions() for run in runs]
    configs = [run.config() for run in runs]
    names = dict.fromkeys(itertools.chain.from_iterable(versions))
    changes: dict[str, list[str]] = {}
    for i, other in enumerate(configs[1:], 1):
        for key, old, new in difference(configs[0], other):
            # Each run is compared with the first; a run that does not differ in this key shows the
            # first's value.
            changes.setdefault(key, [inline(old)] * len(runs))[i] = inline(new)
    # Names of runs always differ.
    changes.pop("run.name", None)

    def row(name: str) -> list[str]:
        return [name, *(str(each.get(name, "")) for each in versions)]

    return {
        "versions": [row(name) for name in names],
        "differences": [[key, *cells] for key, cells in changes.items()],
    }


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _shares(spent: goodput.Goodput) -> dict[str, Any] | None:
    """Return the seconds by cause, with the meaning of each; None for a run without a ledger."""
    if not spent.began:
        return None
    causes = [(cause, spent.seconds[cause], why) for cause, why in goodput.CAUSES.items()]
    return {"sentence": goodput.sentence(spent), "wall": spent.wall, "causes": causes}


def pictures(folder: Path) -> list[tuple[str, str]]:
    """Return (name, data URL) of the last pictures in a folder, by name."""
    found: list[tuple[str, str]] = []
    paths = sorted(folder.glob("*.png"), reverse=True) if folder.is_dir() else []
    for path in paths:
        # A folder that was sent may hold links to files of this machine, which the page would
        # embed.
        if len(found) == PICTURES or path.is_symlink() or not path.is_file():
            continue
        if path.stat().st_size > LARGEST:
            continue
        # By content, not by name: only a picture may go into the page.
        if (data := path.read_bytes()).startswith(PNG):
            url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
            found.append((path.name, url))
    return found[::-1]
