"""Parts of every drill: real `maxstack train` processes that are harmed, an uninterrupted
run of the same config, and a comparison."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import processes
import yaml
from forked import Forked
from processes import TIMED, rows

from maxstack.checkpoint import manifest
from maxstack.submit import local

ROOT = Path(__file__).resolve().parents[2]
STEPS, SEVERAL = 40, 24
"""Steps of a run of one process, and of several."""
FORKS = os.environ.get("MAXSTACK_DRILLS") != "fresh"
"""True where training processes may be forks (tests/forked.py); `make drills` starts each anew."""
LIMIT = 300.0
"""Seconds after which a run that should have ended counts as hung."""
FIGURES = ("loss", "eval_loss", "eval_reward")
"""Each is in the rows of one kind."""
Fault = dict[str, Any]
"""For faulty.py: `kind`, and that fault's arguments."""
RUNNING: set[int] = set()
"""Leaders of the sessions of processes that were started and not awaited."""
_loading = threading.Lock()


@dataclasses.dataclass
class Outcome:
    """How often a fault was injected, and how often the promise was broken; kept in `folder` too,
    where others can follow it."""

    folder: Path
    injected: int = 0
    lost: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def survived(self) -> int:
        """Faults that cost nothing that was promised."""
        return self.injected - self.lost

    def add(self, wrong: Sequence[str] = ()) -> None:
        """A fault, and what was wrong afterwards."""
        self.injected += 1
        self.wrong(wrong)

    def wrong(self, wrong: Sequence[str]) -> None:
        """Errors after faults that are counted already."""
        if wrong:
            self.lost = min(self.lost + 1, self.injected)
            self.notes += wrong[:5]
        self.write()

    def write(self) -> None:
        """Bring the file up to date."""
        names = "injected", "survived", "lost", "notes"
        found = {name: getattr(self, name) for name in names}
        (self.folder / "outcome.json").write_text(json.dumps(found, indent=1) + "\n")


def outcome(folder: Path) -> Outcome:
    """Nothing injected yet, in a folder made for it."""
    folder.mkdir(parents=True, exist_ok=True)
    found = Outcome(folder)
    found.write()
    return found


def settings(folder: Path, **sections: Any) -> Path:
    """The tiny run of tests/processes.py with an evaluation now and then; all drills beside each
    other share one cache of compiled programs."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {
        "name": "run",
        "output_dir": str(folder),
        "trackers": [],
        "compilation_cache": processes.COMPILED or str(folder.parent / "cache"),
    }
    return processes.write_config(
        folder,
        run=run,
        **{"train": {"steps": STEPS, "batch_size": 8}, "eval": {"every": 20, "steps": 2}}
        | sections,
    )


def across(folder: Path, **sections: Any) -> Path:
    """The same for several processes, without an evaluation."""
    more = {
        "train": {"steps": SEVERAL, "batch_size": 8},
        "eval": {"every": 0},
        "mesh": {"data": 1, "fsdp": -1},
    }
    return settings(folder, **more | sections)


class Started:
    """The processes of one run, each the leader of a session of its own, with their output in
    files. What is left of them ends with the `with`."""

    def __init__(
        self,
        config: Path,
        name: str,
        *overrides: str,
        count: int = 1,
        each: int = 1,
        fault: Fault | None = None,
        at: int | None = None,
        within: Sequence[str] = (),
    ):
        """`each`: devices of a process; `fault` is in process `at`, None: in all; `within`: a
        command that runs the process as its arguments, in the same process."""
        self.folder, self.began, self._killed, self.took = (
            config.parent / name,
            time.monotonic(),
            0.0,
            0.0,
        )
        self._before = _size(self.folder / "metrics.jsonl")
        self._mark = uuid.uuid4().hex
        """In the environment of these processes and of all that they start."""
        (config.parent / "output").mkdir(exist_ok=True)
        self.outputs = [
            config.parent / "output" / f"{name}-{time.time_ns()}-{i}.txt" for i in range(count)
        ]
        members = local.process_variables(count)
        self.processes = []
        for i, path in enumerate(self.outputs):
            command = processes.command(config, f"run.name={name}", *overrides)
            paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
            environment = processes.environment() | members[i] | paths
            environment |= {"DRILL_RUN": self._mark}
            if each > 1:
                environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={each}"
            if fault and at in (None, i):
                command[1:3] = [str(Path(__file__).with_name("faulty.py"))]
                environment |= {"DRILL_FAULT": json.dumps(fault), "GLIBC_TUNABLES": ""}
            self.processes.append(_start([*within, *command], environment, path))
            RUNNING.add(self.processes[-1].pid)

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            RUNNING.discard(process.pid)

    def output(self, process: int = 0) -> str:
        """Output of a process so far."""
        return self.outputs[process].read_text(errors="replace")

    def ended(self) -> bool:
        """True where no process runs."""
        return all(process.poll() is not None for process in self.processes)

    def reach(self, step: int) -> bool:
        """Wait until a row of this step, or a later one, is written since the start; False where
        the processes end before."""
        return self.until(lambda: last_step(self.folder, self._before) >= step)

    def until(self, condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
        """Wait; False where all processes end before, or none of it happens in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.ended() or time.monotonic() > deadline:
                return condition()
            time.sleep(0.005)
        return True

    def send(self, number: int, process: int = 0) -> None:
        """A signal to one process."""
        self._killed = time.monotonic()
        self.processes[process].send_signal(number)

    def wait(self, seconds: float = LIMIT) -> list[int | None]:
        """The exit codes, `took` seconds after the last signal or the start; None for a process
        that still ran after so many seconds."""
        deadline = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.took = time.monotonic() - (self._killed or self.began)
        codes = [process.poll() for process in self.processes]
        self.__exit__()
        return codes

    def leftovers(self, seconds: float = 5.0) -> list[str]:
        """Commands of what still runs so long after the processes ended: workers of data and of
        rewards, watchdogs."""
        deadline, found = time.monotonic() + seconds, [""]
        while found and time.monotonic() < deadline:
            found = _left({process.pid for process in self.processes}, self._mark.encode())
            time.sleep(0.02)
        return [f"still runs: {command}" for command in found]


def _start(command: Sequence[str], env: dict[str, str], output: Path) -> subprocess.Popen | Forked:
    """A process in a session of its own: in a fork where tests may, and it is plain Python."""
    if FORKS and command[0] == sys.executable:
        return Forked(command, env, output, cwd=ROOT)
    with output.open("w") as file:
        return subprocess.Popen(
            command,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )


def _left(leaders: set[int], mark: bytes) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended since
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            marked = mark in (process / "environ").read_bytes()
            if state != "Z" and (int(session) in leaders or marked):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                found.append(command.decode(errors="replace")[:200])
    return found


def last_step(folder: Path, start: int = 0) -> int:
    """The step of the last row of metrics.jsonl, of those from byte `start` on; 0 where there is
    none."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - 4096))
        found = re.findall(rb'^\{"step": (\d+), "loss".*\}\n', file.read(), re.MULTILINE)
    return int(found[-1]) if found else 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def newest(folder: Path, disk: Path | None = None, count: int = 1) -> int:
    """The newest step that counts: in the run's own folder, or whole on the `disk`s of its
    processes. 0 where there is none."""
    return max(
        [
            *manifest.steps(folder / "checkpoints"),
            *(whole(disk / folder.name, count) if disk else []),
        ],
        default=0,
    )


def whole(disk: Path, count: int) -> list[int]:
    """The steps of which every process's shards are on some disk, as written or as a copy."""
    while True:
        try:
            parts = {
                (path.parent.parent.name, path.parent.name)
                for path in disk.glob(f"host_*/*/of_*/{manifest.NAME}")
            }
        except FileNotFoundError:  # a step was removed meanwhile
            continue
        return [
            step
            for step in {int(step) for step, _ in parts}
            if {(f"{step}", f"of_{i}") for i in range(count)} <= parts
        ]


def baseline(config: Path, *overrides: str, count: int = 1, each: int = 1) -> Path:
    """The folder of an uninterrupted run that saves its last step alone, made once for all drills
    beside each other."""
    sections = yaml.safe_load(config.read_text())
    wanted = {
        name: section
        for name, section in sections.items()
        if name not in ("run", "checkpoint", "faults")
    }
    key = hashlib.blake2b(
        json.dumps([wanted, overrides, count, each]).encode(), digest_size=6
    ).hexdigest()
    folder = config.parent.parent / "baselines" / key
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            copied = folder / "config.yml"
            copied.write_text(
                yaml.safe_dump(
                    wanted
                    | {
                        "run": sections["run"] | {"output_dir": str(folder)},
                        "checkpoint": {"every": 1000},
                    }
                )
            )
            complete(copied, "baseline", *overrides, count=count, each=each)
            (folder / "done").touch()
    return folder / "baseline"


def complete(
    config: Path,
    name: str,
    *overrides: str,
    count: int = 1,
    each: int = 1,
    code: int = 0,
    fault: Fault | None = None,
) -> str:
    """Run to the end -> what process 0 printed. AssertionError unless all leave with `code`."""
    with Started(config, name, *overrides, count=count, each=each, fault=fault) as started:
        codes = started.wait()
        assert codes == [code] * count, f"exit {codes}\n" + "\n".join(
            started.output(i)[-3000:] for i in range(count)
        )
        return started.output()


Harm = Callable[[Started], "list[str] | None"]
"""Waits for its moment, does it, and waits until all is over -> what was wrong; None where the run
ended before."""
GLOO = "Gloo context initialization failed"
"""Processes that did not find each other at their first step, on a machine with too much to do:
jax's own limit of 30 s."""


def chain(
    found: Outcome,
    config: Path,
    count: int,
    plan: Callable[[int], tuple[Fault | None, Harm]],
    *,
    processes: int = 1,
    prefix: str = "run",
    disk: Path | None = None,
) -> None:
    """Start a run again and again, harm it each time, and run it to its end after `count` faults;
    one that has ended is followed by another.

    plan(step that it goes on from) -> (a fault for the processes, what to do to them). Every loss
    that was ever written is held against the baseline's, and each run's last state.
    """
    base, number, injected, failed = baseline(config, count=processes), 0, 0, 0
    while True:
        folder = config.parent / f"{prefix}-{number}"
        begin, before = newest(folder, disk, processes), len(rows(folder))
        fault, harm = plan(begin) if injected < count else (None, None)
        at = fault and fault.pop("at", None)
        with Started(config, folder.name, count=processes, fault=fault, at=at) as started:
            wrong = harm(started) if harm else None
            codes = started.wait()
            output = started.output()
        later = rows(folder)[before:]
        if wrong is None and GLOO in output and (failed := failed + 1) < 4:
            found.notes.append(f"{folder.name}: started once more: {GLOO}")
            continue
        if later and later[0]["step"] != begin + 1:
            wrong = [
                *(wrong or []),
                f"{folder.name}: went on after step {later[0]['step'] - 1}, and {begin} "
                "was the newest",
            ]
        if harm and wrong is not None:
            injected += 1
            found.add([*wrong, *divergent(folder, base)])
            continue
        failed_to_end = (
            [] if codes == [0] * processes else [f"{folder.name}: exit {codes}: {output[-1500:]}"]
        )
        found.wrong([*failed_to_end, *unlike(folder, base), *(wrong or [])])
        if injected >= count or codes != [0] * processes:
            return
        number += 1
        assert number < 2 * count + 10, "no run lives long enough to be harmed"


def divergent(folder: Path, base: Path, last: bool = False) -> list[str]:
    """Every row of losses or evaluations, those that were done again too, that is not bit for bit
    the baseline's; or the last row of each step."""
    wrong = []
    for key in FIGURES:
        wanted = {step: _steady(row) for step, row in processes.numbers(base, key).items()}
        try:
            written = [*processes.numbers(folder, key).values()] if last else rows(folder, key)
        except ValueError as error:
            return [f"{folder.name}: metrics.jsonl has a line that is no row: {error}"]
        for row in written:
            mine = _steady(row)
            if mine != wanted.get(row["step"]):
                wrong.append(
                    f"{folder.name}: step {row['step']}: {mine}, and the baseline has "
                    f"{wanted.get(row['step'])}"
                )
    return wrong


def _steady(row: dict[str, Any]) -> dict[str, Any]:
    """What of a row does not depend on the clock."""
    return {k: v for k, v in row.items() if k not in TIMED and not k.endswith(("seconds", "_wait"))}


def unlike(folder: Path, base: Path, last: bool = False) -> list[str]:
    """Differences of a run that has ended from the baseline: a row (of several of a step,
    only the `last`), a missing step, an array of its last state."""
    if wrong := divergent(folder, base, last):
        return wrong
    for key in FIGURES:
        if missing := processes.numbers(base, key).keys() - processes.numbers(folder, key).keys():
            wrong.append(f"{folder.name}: no {key} of steps {sorted(missing)}")
    step = newest(base)
    if newest(folder) != step:
        return [
            *wrong,
            f"{folder.name}: its last checkpoint is of step {newest(folder)}, not {step}",
        ]
    ours, theirs = state(folder, step), state(base, step)
    if ours.keys() != theirs.keys():
        wrong.append(f"{folder.name}: other arrays in its state")
    return wrong + [
        f"{folder.name}: {name} of the last state is another"
        for name in ours
        if not np.array_equal(ours[name], theirs.get(name))
    ]


def state(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint in the run's own folder, and the data's position."""
    import jax
    from orbax.checkpoint import v1 as ocp

    here, path = (
        jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        folder / "checkpoints" / f"{step}",
    )
    with _loading:
        found = ocp.checkpointables_metadata(path).metadata
        wanted = {
            part: {
                key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
                for key, leaf in found[part].items()
            }
            for part in ("state", "data")
        }
        loaded = ocp.load_checkpointables(path, wanted)
    return {key: np.asarray(value) for part in wanted for key, value in loaded[part].items()}


def maxstack(*arguments: str) -> tuple[int, str]:
    """A command of maxstack -> exit code and output."""
    command = [sys.executable, "-m", "maxstack.cli", *arguments]
    with tempfile.NamedTemporaryFile() as output:
        process = _start(command, processes.environment(), Path(output.name))
        return process.wait(LIMIT), Path(output.name).read_text()


def told(folder: Path) -> str:
    """log.txt."""
    path = folder / "log.txt"
    return path.read_text(errors="replace") if path.exists() else ""


def sizes(counts: Sequence[int] = (2, 4, 8)) -> Iterator[int]:
    """Numbers of processes in turn, the small ones more often."""
    while True:
        for i in range(len(counts)):
            yield from counts[: i + 1]
