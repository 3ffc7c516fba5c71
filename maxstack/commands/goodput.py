"""`maxstack goodput`: where the time of runs went."""

import argparse
from pathlib import Path

from maxstack.command import argument, check_writable, command, write_json
from maxstack.errors import ConfigError
from maxstack.report.goodput import CAUSES, FILE, summary, text

WIDTH = max(map(len, CAUSES))


@command(
    "goodput",
    "Where the time of a run went, since it first began and over all its restarts, "
    "up to its last sign of life.\n\n"
    "goodput is the share of the first of these, which add up to all of it:\n"
    + "\n".join(f"  {cause:<{WIDTH}}  {meaning}" for cause, meaning in CAUSES.items()),
    "goodput runs/quickstart --json goodput.json",
    argument("runs", nargs="+", metavar="RUN", help="a run's folder, or the name of one in runs/"),
    argument(
        "--json",
        metavar="FILE",
        help="write every figure to FILE: an object by RUN, seconds in full precision",
    ),
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
def main(args: argparse.Namespace) -> None:
    """Print the goodput of each run, and write an object of all figures by run."""
    check_writable("--json", args.json)
    runs = {name: summary(folder_of(name)) for name in args.runs}
    for name, goodput in runs.items():
        print(f"{name}: {text(goodput)}")
    write_json(args.json, {name: goodput.json() for name, goodput in runs.items()})


def folder_of(name: str) -> Path:
    """The folder of a run; ConfigError where there is none."""
    path = next((path for path in (Path(name), Path("runs") / name) if path.is_dir()), None)
    if path is None:
        raise ConfigError(
            f"{name}: no such folder, and none of that name in runs/; give a run's folder"
        )
    if not any((path / file).exists() for file in (FILE, ".lock", "config.yml", "metrics.jsonl")):
        runs = ", ".join(sorted(str(ledger.parent) for ledger in path.glob(f"*/{FILE}")))
        advice = f"the runs in it are {runs}" if runs else "give one that train made"
        raise ConfigError(f"{path}: not a run's folder; {advice}")
    return path
