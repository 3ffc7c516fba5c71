"""All fault drills at full count, on this machine's CPU: an hour or two on 2 cores. The table of
results is written into docs/RELIABILITY.md, between its markers. Results of finished drills stay in
drills.json until --again; the exit code is 1 if anything was lost.

example: python scripts/drills.py --only 1,5 --jobs 1
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
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
ALONE = 15
"""The drill that runs without other drills beside it."""
Done = dict[str, dict[str, Any]]


def main() -> int:
    """Run the drills that are not done; 1 if a promise was broken."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--only", metavar="N,N", help="these drills; 0: the skewed clock")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="drills at the same time (default: 2)"
    )
    parser.add_argument(
        "--count",
        type=int,
        metavar="N",
        help="inject each fault so often, in place of the full count; the table is left as it is",
    )
    parser.add_argument("--again", action="store_true", help="forget what is done")
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of everything that is drawn; by default another one each time",
    )
    parser.add_argument(
        "--folder", type=Path, help="where the runs lie, and stay; by default a new one that goes"
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=ROOT / "drills.json",
        help="what is done (default: %(default)s)",
    )
    args = parser.parse_args()
    wanted = [int(number) for number in args.only.split(",")] if args.only else [*DRILLS]
    if unknown := {*wanted} - DRILLS.keys():
        parser.error(
            f"there are no drills {sorted(unknown)}; there are {', '.join(map(str, DRILLS))}"
        )
    done: Done = {}
    if args.json.exists() and not args.again and not args.count:
        done = json.loads(args.json.read_text())
    left = [number for number in wanted if f"{number}" not in done]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    top = args.folder or Path(tempfile.mkdtemp(prefix="drills-"))
    try:
        _run(left, args, top.resolve(), done)
    finally:
        if not args.folder:
            shutil.rmtree(top, ignore_errors=True)
    table = _table(done)
    print(table)
    if not args.count and {*map(int, done)} >= DRILLS.keys():
        page = ROOT / "docs" / "RELIABILITY.md"
        arguments.write_block(page, BEGIN, END, table)
        print(f"wrote the table into {page.relative_to(ROOT)}")
    return 1 if any(done.get(f"{number}", {"lost": 1})["lost"] for number in wanted) else 0


def _stop(number: int, frame: FrameType | None) -> None:
    """Leave no process running; finished results are kept."""
    for leader in [*RUNNING]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    os._exit(128 + number)


def _run(numbers: list[int], args: argparse.Namespace, top: Path, done: Done) -> None:
    """Run the drills, the longest first, several at a time."""
    seed = args.seed if args.seed is not None else random.randrange(10**6)
    running: dict[int, float] = {}
    lock, over = threading.Lock(), threading.Event()

    def one(number: int) -> None:
        drill, folder = DRILLS[number], top / f"{number}"
        if number == 4 and not disks.can_mount():
            print("drill 4 is left out: a full file system needs a mount of one's own", flush=True)
            return
        shutil.rmtree(folder, ignore_errors=True)
        begin = running[number] = time.monotonic()
        try:
            rng = random.Random(f"{seed} {number}")
            outcome = drill.function(folder, args.count or drill.full, rng)
            result = {
                name: getattr(outcome, name) for name in ("injected", "survived", "lost", "notes")
            }
        except Exception:  # printed, and the other drills go on
            result = None
            traceback.print_exc()
        with lock:
            del running[number]
            if result:
                done[f"{number}"] = result | {
                    "seconds": round(time.monotonic() - begin, 1),
                    "seed": seed,
                }
                if not args.count:
                    args.json.write_text(json.dumps(done, indent=1) + "\n")
                clear = "\r\x1b[K" if sys.stderr.isatty() else ""
                print(
                    f"{clear}drill {number}: {_words(result)}, {time.monotonic() - begin:.0f} s",
                    *result["notes"],
                    sep="\n  ",
                    flush=True,
                )

    def show() -> None:
        begin = time.monotonic()
        while not over.wait(1 if sys.stderr.isatty() else 30):
            state = "; ".join(
                f"{number}: {_so_far(top / str(number))} of {args.count or DRILLS[number].full}"
                for number in sorted(running)
            )
            left = len(numbers) - sum(f"{number}" in done for number in numbers)
            print(
                f"{chr(13) if sys.stderr.isatty() else ''}{time.monotonic() - begin:5.0f} "
                f"s, {left} drills left; {state}",
                end="\x1b[K" if sys.stderr.isatty() else "\n",
                file=sys.stderr,
                flush=True,
            )

    print(f"{len(numbers)} drills, seed {seed}, in {top}", flush=True)
    showing = threading.Thread(target=show, daemon=True)
    showing.start()
    beside = sorted({*numbers} - {ALONE}, key=lambda number: -DRILLS[number].full)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, beside))
    if ALONE in numbers:
        one(ALONE)
    over.set()
    showing.join()


def _so_far(folder: Path) -> str:
    try:
        return f"{json.loads((folder / 'outcome.json').read_text())['injected']}"
    except (OSError, ValueError):
        return "0"


def _words(result: dict[str, Any]) -> str:
    return f"{result['injected']} injected, {result['survived']} survived, {result['lost']} lost"


def _table(done: Done) -> str:
    lines = ["| | Drill | Promise | Injected | Survived | Lost |", "|---|---|---|---|---|---|"]
    for number, drill in DRILLS.items():
        if result := done.get(f"{number}"):
            counts = " | ".join(f"{result[name]}" for name in ("injected", "survived", "lost"))
            lines.append(f"| {number or ''} | {drill.fault} | {drill.promise} | {counts} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
