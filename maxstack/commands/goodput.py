"""`maxstack goodput`: where the time of runs went."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from maxstack.report.goodput import CAUSES, FILE, lines, summary


def main(argv: Sequence[str]) -> int:
    """`maxstack goodput`: print, and write, what the arguments ask for; the exit code."""
    causes = "\n".join(
        f"  {cause:<{max(map(len, CAUSES))}}  {words}" for cause, words in CAUSES.items()
    )
    parser = argparse.ArgumentParser(
        prog="maxstack goodput",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Where the time of a run went, since it first began and over all its restarts, "
        "up to its last sign of life.\n\n"
        f"goodput is the share of the first of these, which add up to all of it:\n{causes}",
        epilog="example: maxstack goodput runs/quickstart --json goodput.json",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's folder, or the name of one in runs/"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="write every figure to FILE: an object by RUN, seconds in full precision",
    )
    args = parser.parse_args(argv)
    from maxstack.config import ConfigError

    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        missing = f"the folder {args.json.parent} does not exist"
        raise ConfigError(f"--json {args.json}: {'is a folder' if args.json.is_dir() else missing}")
    found = {name: summary(_folder(name)) for name in args.runs}
    for name, goodput in found.items():
        head, *rest = lines(goodput)
        print("\n".join((f"{name}: {head}", *rest)))
    if args.json:
        try:
            args.json.write_text(
                json.dumps({name: goodput.json() for name, goodput in found.items()}, indent=1)
                + "\n"
            )
        except OSError as error:
            raise ConfigError(f"--json {args.json}: cannot be written: {error.strerror}") from error
    return 0


def _folder(name: str) -> Path:
    """The run that a person means; ConfigError where it is none."""
    from maxstack.config import ConfigError

    path = next((path for path in (Path(name), Path("runs") / name) if path.is_dir()), None)
    if path is None:
        raise ConfigError(
            f"{name}: no such folder, and none of that name in runs/; give a run's folder"
        )
    if not any((path / file).exists() for file in (FILE, ".lock", "config.yml", "metrics.jsonl")):
        inside = sorted(str(found.parent) for found in path.glob(f"*/{FILE}"))
        raise ConfigError(
            f"{path}: not a run's folder; "
            + (f"the runs in it are {', '.join(inside)}" if inside else "give one that train made")
        )
    return path
