"""`maxstack report`: write or serve an HTML page about runs."""

import argparse
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxstack.command import argument, check_writable, command, write
from maxstack.commands import checkpoint
from maxstack.commands.goodput import folder_of
from maxstack.errors import ConfigError, DataError

Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]
"""Title, headings and rows of texts or numbers."""
EVERY = 5
"""Seconds between two looks of a live page at its run."""


@command(
    "report",
    "Write a self-contained HTML report on one or more runs: curves, tasks, speed, where the time "
    "went, checkpoints, spikes, rewinds, stragglers, samples, versions, and what differs between "
    "their configurations.",
    "report runs/quickstart --out report.html",
    argument("runs", nargs="+", metavar="RUN", help="run folder, or name of one in runs/"),
    argument("--out", metavar="FILE", help="file to write (default: report.html)"),
    argument(
        "--serve",
        action="store_true",
        help="serve the page on this machine instead and follow the runs, until Ctrl-C",
    ),
    argument(
        "--port", type=int, default=0, help="with --serve: port, 0 for any free one (default: 0)"
    ),
    argument("--exact", action="store_true", help=argparse.SUPPRESS),  # every report is exact
)
def main(args: argparse.Namespace) -> None:
    """Write or serve the page."""
    out = args.out or "report.html"
    if args.serve and args.out:
        raise ConfigError("--out: --serve writes no file; leave one of them out")
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port {args.port}: must be a number from 0 to 65535")
    folders = [folder_of(name) for name in args.runs]
    if not args.serve:
        check_writable("--out", out)
    from maxstack.report import document, live

    pages = Pages(folders, EVERY if args.serve else 0)
    if args.serve:
        live.serve(
            lambda: document.page(pages.data(), live=True),
            lambda: document.encoded(pages.data()),
            args.port,
        )
        return
    text = document.page(pages.data())
    write("--out", out, text)
    print(f"{out}: {len(text) / 1e6:.1f} MB, opens in any browser")


class Pages:
    """The data of the page, which reads on where files have grown."""

    def __init__(self, folders: Sequence[Path], every: int = 0):
        """`every`: seconds after which a page asks again; 0: never."""
        from maxstack.report import run_data

        self._every = every
        self._runs = [run_data.RunData(folder) for folder in folders]
        self._checkpoints: dict[Path, tuple[float, list[tuple[int, tuple[str, ...]]]]] = {}
        self._profiles: dict[Path, tuple[float, list[Table]]] = {}

    def data(self) -> dict[str, Any]:
        """All that the page shows."""
        from maxstack.report import run_data

        return {
            "made": time.time(),
            "every": self._every,
            "runs": [run.data(self._saved(run.folder)) for run in self._runs],
            "tables": [table for run in self._runs for table in self._profile(run.folder)],
            **run_data.compared(self._runs),
        }

    def _profile(self, folder: Path) -> list[Table]:
        """The table of the run's newest trace, read anew where there is another."""
        own = folder / "profile"
        traces = [path for path in own.glob("*") if path.name.isdecimal()]
        changed = max((path.stat().st_mtime for path in traces), default=0.0)
        if folder not in self._profiles or self._profiles[folder][0] != changed:
            self._profiles[folder] = changed, [profiled(folder)] if changed else []
        return self._profiles[folder][1]

    def _saved(self, folder: Path) -> list[tuple[int, tuple[str, ...]]]:
        """The run's checkpoints, looked for anew where its folder of them changed."""
        from maxstack.checkpoint import survey

        own = folder / "checkpoints"
        changed = own.stat().st_mtime if own.is_dir() else 0.0
        if folder not in self._checkpoints or self._checkpoints[folder][0] != changed:
            cells = []
            with contextlib.suppress(ConfigError):  # nothing is saved yet
                cells = checkpoint.cells_of(survey.find_steps(folder))
            self._checkpoints[folder] = changed, cells
        return self._checkpoints[folder][1]


def profiled(folder: Path) -> Table:
    """Milliseconds of a step by layer and direction, in the newest trace of a run; why there are
    none, where it cannot be read."""
    from maxstack.profile import summary

    try:
        found = summary(folder)
    except (ConfigError, DataError) as error:
        return f"{folder.name}: profile", ("",), ((str(error),),)
    ways = [*found.directions]

    def row(name: str, by_way: Mapping[str, float], total: float) -> list[str]:
        cells = [f"{by_way[way] * 1e3:,.2f}" if way in by_way else "" for way in ways]
        return [name, *cells, f"{total * 1e3:,.2f}", f"{total / found.step_seconds:.1%}"]

    layers = [row(layer.name, layer.seconds, layer.total) for layer in found.layers]
    rest = {"busy": found.busy, "idle": found.idle, "step": found.step_seconds}
    steps = f"steps {found.steps[0]} to {found.steps[-1]}"
    return (
        f"{folder.name}: profile of {steps}, ms of a step (maxstack profile {folder.name})",
        ("layer", *ways, "all", "share"),
        [*layers, *(row(name, {}, seconds) for name, seconds in rest.items())],
    )
