"""The processes of bench_gpu.py. Their events are read line by line, and a crash or hang costs only
the job in progress."""

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "@bench "
MOST_STARTS = 12
"""Starts of one worker, after which its other sections are left out."""


@dataclasses.dataclass
class Outcome:
    """End of a process."""

    code: int | None
    """Exit code; None if it was killed, because it was silent for too long or the time was over."""
    tail: str
    """The end of its other output."""


def events(
    command: list[str], given: dict[str, Any], silence: float, end: float, log: Path
) -> Iterator[dict[str, Any] | Outcome]:
    """The events that a process prints, then its outcome; its other output goes into `log`.

    It is killed after `silence` seconds without an event, or at `end`, in seconds since the epoch.
    """
    paths = [str(ROOT / "scripts"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin and process.stdout
    with contextlib.suppress(BrokenPipeError):  # then the process ended, and has an outcome
        process.stdin.write(json.dumps(given))
        process.stdin.close()
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(
        target=lambda: [*map(lines.put, process.stdout), lines.put(None)], daemon=True
    )
    reader.start()
    said: list[str] = []
    while True:
        try:
            line = lines.get(timeout=max(0.1, min(silence, end - time.time())))
        except queue.Empty:
            process.kill()
            process.wait()
            yield Outcome(None, "".join(said[-20:]))
            return
        if line is None:
            yield Outcome(process.wait(), "".join(said[-20:]))
            return
        if line.startswith(MARK):
            yield json.loads(line.removeprefix(MARK))
        else:
            said.append(line)
            with log.open("a", encoding="utf-8") as file:
                file.write(line)


def work(
    python: str,
    sections: list[str],
    given: dict[str, Any],
    silence: float,
    log: Path,
    hear: Callable[[dict[str, Any]], None],
) -> None:
    """Run sections in a worker, which is started again without the job that ended it until all is
    done. `hear` gets every event, and rows for such jobs.

    If a worker ends while it compiles several programs at once, the next compiles one at a time to
    show which one it was.
    """
    done: list[str] = []
    threads, left = given["threads"], list(sections)
    for _ in range(MOST_STARTS):
        at: dict[str, Any] = {}
        rows: list[dict[str, Any]] = []
        outcome = Outcome(None, "")
        todo = given | {"sections": left, "done": done, "threads": threads}
        for event in events(
            [python, "-m", "bench.gpu_worker"], todo, silence, given["end"] + 30, log
        ):
            if isinstance(event, Outcome):
                outcome = event
            elif "begin" in event:
                at = event
            else:
                if "row" in event:
                    done.append(event["key"])
                    rows.append(event["row"])
                elif "section" in event:
                    left.remove(event["section"])
                hear(event)
        given = given | {"rows": [*given["rows"], *rows]}
        if not left or time.time() > given["end"]:
            break
        how = (
            "did not answer any more" if outcome.code is None else f"ended with code {outcome.code}"
        )
        if not at:
            reason = f"the process {how} before its first job: {outcome.tail[-600:]}"
            hear({"left_out": left.pop(0), "reason": reason})
            continue
        if at["begin"] not in done and (at["phase"] == "run" or threads == 1):
            done.append(at["begin"])
            reason = f"the process {how}: {outcome.tail[-300:]}"
            hear({"row": {"section": left[0], **at["row"], "status": "failed", "reason": reason}})
            threads = given["threads"]
        else:
            threads = 1
    late = time.time() > given["end"]
    reason = "the time was over" if late else f"its process was started {MOST_STARTS} times"
    for section in left:
        hear({"left_out": section, "reason": reason})


def lacks(python: str, packages: list[str]) -> list[str]:
    """The packages that an interpreter cannot find; all of them if there is no such interpreter."""
    missing = _told(python, f"[p for p in {packages} if find_spec(p) is None]")
    return packages if missing is None else missing


def versions(python: str, packages: list[str]) -> dict[str, str]:
    """The versions of those packages that an interpreter has; none if there is no such
    interpreter."""
    return _told(python, f"{{p: version(p) for p in {packages} if find_spec(p)}}") or {}


def _told(python: str, expression: str) -> Any:
    """What an interpreter says of its packages; None if there is no such interpreter."""
    code = (
        "import json; from importlib.metadata import version; "
        f"from importlib.util import find_spec; print(json.dumps({expression}))"
    )
    try:
        said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return json.loads(said.stdout)
