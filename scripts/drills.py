"""Run all fault drills at full count on this machine's CPU: an hour or two on 2 cores. The table of
results is written into docs/RELIABILITY.md, between its markers. Results of finished drills stay in
drills.json until --again; the exit code is 1 if anything was lost.

example: python scripts/drills.py --only 1,5 --jobs 1
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from bench import arguments

ROOT = Path(__file__).resolve().parent.parent
others = [path for path in sys.path if Path(path or ".").resolve() != ROOT / "scripts"]
sys.path[:] = [str(ROOT), str(ROOT / "tests"), *others]  # here `drills` is this file
os.environ |= {"JAX_PLATFORMS": "cpu", "MAXSTACK_DRILLS": "fresh"}

from drills import disks  # noqa: E402
from drills.runs import RUNNING  # noqa: E402
from drills.table import DRILLS  # noqa: E402

BEGIN, END = "<!-- drills: begin -->", "<!-- drills: end -->"
FIELDS = "injected", "survived", "lost", "notes"
ALONE = 15
"""The drill that runs without other drills beside it."""


def main() -> int:
    """Run the drills that are not done; 1 if a promise was broken."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--only", metavar="N,N", help="these drills; 0: the skewed clock")
    parser.add_argument("--jobs", type=int, default=2, help="drills at a time (default: 2)")
    parser.add_argument(
        "--count", type=int, help="inject each fault so often; the table is left as it is"
    )
    parser.add_argument("--again", action="store_true", help="forget what is done")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--json", type=Path, default=ROOT / "drills.json", help="what is done")
    args = parser.parse_args()
    wanted = [int(number) for number in args.only.split(",")] if args.only else [*DRILLS]
    if unknown := {*wanted} - DRILLS.keys():
        parser.error(f"no drills {sorted(unknown)}; there are {', '.join(map(str, DRILLS))}")
    keeps = args.json.exists() and not args.again and not args.count
    done: dict[str, Any] = json.loads(args.json.read_text()) if keeps else {}
    left = {number for number in wanted if f"{number}" not in done}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    print(f"{len(left)} drills, seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="drills-") as top:
        with ThreadPoolExecutor(args.jobs) as pool:  # the longest first
            for number in sorted(left - {ALONE}, key=lambda number: -DRILLS[number].full):
                pool.submit(run, number, args, Path(top), done)
        if ALONE in left:
            run(ALONE, args, Path(top), done)
    table = as_table(done)
    print(table)
    if not args.count and {*map(int, done)} >= DRILLS.keys():
        arguments.write_block(ROOT / "docs" / "RELIABILITY.md", BEGIN, END, table)
    return 1 if any(done.get(f"{number}", {"lost": 1})["lost"] for number in wanted) else 0


def stop(number: int, frame: FrameType | None) -> None:
    """Leave no process running; finished results are kept."""
    for leader in [*RUNNING]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    os._exit(128 + number)


def run(number: int, args: argparse.Namespace, top: Path, done: dict[str, Any]) -> None:
    """Run a drill, and keep its result."""
    if number == 4 and not disks.can_mount():
        print("drill 4 is left out: a full file system needs a mount of one's own", flush=True)
        return
    drill, begin = DRILLS[number], time.monotonic()
    try:
        rng = random.Random(f"{args.seed} {number}")
        outcome = drill.function(top / f"{number}", args.count or drill.full, rng)
    except Exception:  # printed, and the other drills go on
        traceback.print_exc()
        return
    seconds = round(time.monotonic() - begin, 1)
    result = {name: getattr(outcome, name) for name in FIELDS}
    done[f"{number}"] = result | {"seconds": seconds, "seed": args.seed}
    if not args.count:
        args.json.write_text(json.dumps(done, indent=1) + "\n")
    counts = ", ".join(f"{result[name]} {name}" for name in FIELDS[:3])
    print(f"drill {number}: {counts}, {seconds:.0f} s", *result["notes"], sep="\n  ", flush=True)


def as_table(done: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["| | Drill | Promise | Injected | Survived | Lost |", "|---|---|---|---|---|---|"]
    for number, drill in DRILLS.items():
        if result := done.get(f"{number}"):
            counts = " | ".join(f"{result[name]}" for name in FIELDS[:3])
            lines.append(f"| {number or ''} | {drill.fault} | {drill.promise} | {counts} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
