"""`maxstack goodput`: show where the time of runs went."""

from argparse import Namespace
from pathlib import Path

from maxstack.command import JSON, argument, check_writable, command, write_json
from maxstack.errors import ConfigError
from maxstack.report.goodput import CAUSES, FILE, summary, text

WIDTH = max(map(len, CAUSES))


@command(
    "goodput",
    "Show where the time of a run went, from its first start over all restarts to its last sign of "
    "life.\n\n"
    "The causes add up to the whole time; goodput is the share of the first:\n"
    + "\n".join(f"  {cause:<{WIDTH}}  {meaning}" for cause, meaning in CAUSES.items()),
    "goodput runs/quickstart --json goodput.json",
    argument("runs", nargs="+", metavar="RUN", help="run folder, or name of one in runs/"),
    JSON,
)
def main(args: Namespace) -> None:
    """Print the goodput of each run."""
    check_writable("--json", args.json)
    runs = {name: summary(folder_of(name)) for name in args.runs}
    for name, goodput in runs.items():
        print(f"{name}: {text(goodput)}")
    write_json(args.json, {name: goodput.json() for name, goodput in runs.items()})


def folder_of(name: str) -> Path:
    """Return the folder of a run; ConfigError where there is none."""
    path = next((path for path in (Path(name), Path("runs") / name) if path.is_dir()), None)
    if path is None:
        raise ConfigError(f"{name}: no such folder, here or in runs/; give a run's folder")
    if not any((path / file).exists() for file in (FILE, ".lock", "config.yml", "metrics.jsonl")):
        runs = ", ".join(sorted(str(ledger.parent) for ledger in path.glob(f"*/{FILE}")))
        advice = f"the runs in it are {runs}" if runs else "give one that train made"
        raise ConfigError(f"{path}: is not a run's folder; {advice}")
    return path
