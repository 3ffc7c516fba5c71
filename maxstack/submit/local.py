"""The processes of one run on this machine, each supervised, with one log: a rehearsal of a run on
many hosts. They end together: where one fails for good, the others get SIGTERM, then SIGKILL."""

import contextlib
import fcntl
import glob
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from maxstack.cluster import job_key
from maxstack.errors import ConfigError
from maxstack.faults.supervisor import PARENT
from maxstack.hardware.devices import ACCELERATORS, cpu_devices, visible_gpus
from maxstack.schema import mesh_rules

if TYPE_CHECKING:
    from maxstack.schema.config import Config

LOG = "submit.log"
"""In a run's folder: the lines of all its processes."""
PATIENCE = 20.0
"""Seconds after a process has failed until the others get SIGTERM."""
KILL = 60.0
"""Seconds from then until SIGKILL."""


def process_variables(count: int) -> list[dict[str, str]]:
    """Return the environment variables by which `count` processes on this machine find each other,
    at a free port; empty for a single process."""
    if count == 1:
        return [{}]
    with socket.socket() as free:
        # A port that was free a moment ago: the roll call waits for it, should somebody else take
        # it.
        free.bind(("127.0.0.1", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return [
        {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(i),
        }
        for i in range(count)
    ]


def share_devices(cfg: "Config", count: int) -> tuple[int, list[str], list[dict[str, str]]]:
    """Return (number of devices, overrides for all processes, environment of each process) where
    `count` processes share this machine's GPUs or the run's virtual devices, or have one CPU device
    each."""
    virtual = cfg.run.virtual_devices or count
    on_cpu = cpu_devices(virtual // count)
    if virtual % count:
        raise ConfigError(
            f"--processes {count}: does not divide run.virtual_devices={virtual}; give a divisor"
        )
    if cfg.run.virtual_devices:
        return virtual, ["run.virtual_devices=null"], [on_cpu] * count
    gpus = visible_gpus()
    if os.environ.get("JAX_PLATFORMS") != "cpu" and not gpus and any(map(glob.glob, ACCELERATORS)):
        if count > 1:
            raise ConfigError(
                f"--processes {count}: cannot share this machine's accelerators; give 1, or set "
                "JAX_PLATFORMS=cpu for a rehearsal"
            )
        return math.prod(mesh_rules.mesh_sizes(cfg).values()), [], [{}]
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not gpus:
        return count, [], [on_cpu] * count
    if len(gpus) % count:
        raise ConfigError(
            f"--processes {count}: cannot share {len(gpus)} GPUs; give a divisor, or "
            "run.virtual_devices for a rehearsal on the CPU"
        )
    each = len(gpus) // count
    own = [",".join(gpus[i * each : (i + 1) * each]) for i in range(count)]
    return len(gpus), [], [{"CUDA_VISIBLE_DEVICES": visible} for visible in own]


class Group:
    """The processes of a run, whose output goes to one log, each line with its process's number. A
    context manager that holds the log; ConfigError where another group does."""

    def __init__(self, log: Path):
        self._log = log
        self._lock = threading.Lock()
        # A key for each submission: two on this machine cannot join each other.
        self._key = {job_key.VARIABLE: secrets.token_hex(job_key.LEAST)}
        self._started: list[subprocess.Popen[str]] = []
        self._asked: list[int] = []

    def __enter__(self) -> "Group":
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._log.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"run.output_dir: cannot write to {self._log.parent}: {error.strerror}; "
                "choose another run.output_dir"
            ) from error
        try:
            # The system lets go of the lock when this process ends, however it does.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(
                f"run.name: another submission is writing to {self._log.parent}; see maxstack "
                "status, or choose another run.name"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def asked(self) -> bool:
        """True once a signal has asked the group to end."""
        return bool(self._asked)

    def run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
        """Start a process for each environment, wait for all, and return the run's exit code: 0
        where all were 0, that of a user's mistake before others. SIGTERM and SIGINT are passed on;
        a second SIGINT kills. Call it from the main thread."""
        before = {
            number: signal.signal(number, self._ask)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            readers = [self._start(i, command, own) for i, own in enumerate(environments)]
            for number in self._asked:  # while they were being started
                self._send(number)
            codes = self._wait()
            for reader in readers:
                reader.join(5)
            return _code(codes)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(
        self, number: int, command: Sequence[str], own: Mapping[str, str]
    ) -> threading.Thread:
        # PARENT: children get SIGTERM where this process dies, and save.
        environment = os.environ | own | self._key | {PARENT: str(os.getpid())}
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A terminal's ^C reaches this process alone, which passes it on once.
            process_group=0,
        )
        self._started.append(process)
        reader = threading.Thread(
            target=self._read, args=(number, process), daemon=True, name=f"process {number}"
        )
        reader.start()
        return reader

    def _read(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for line in process.stdout:
            self.say(f"[{number}] {line.rstrip()}")

    def say(self, text: str) -> None:
        """Write a line to the log and the console."""
        with self._lock:
            self._file.write(f"{text}\n")
            self._file.flush()
            with contextlib.suppress(OSError):  # the reader of a pipe may be gone
                print(text, flush=True)

    def _wait(self) -> list[int]:
        """Wait for all processes and return their exit codes. Where one has failed without a signal
        from here, end the others."""
        since: float | None = None
        signals = [(PATIENCE, signal.SIGTERM), (PATIENCE + KILL, signal.SIGKILL)]
        while None in (codes := [process.poll() for process in self._started]):
            # Of all: looking only up to the first that runs would miss a later one's failure while
            # an earlier one hangs.
            failed = next((i for i, code in enumerate(codes) if code), None)
            if failed is not None and not self._asked and signals:
                # They usually leave by themselves, told by their watchdogs.
                since = since or time.monotonic()
                if time.monotonic() - since > signals[0][0]:
                    number = signals.pop(0)[1]
                    self.say(
                        f"submit: process {failed} left with {codes[failed]}; the others get "
                        f"{number.name}"
                    )
                    self._send(number)
            time.sleep(0.05)
        return [code for code in codes if code is not None]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again = number in self._asked
        self._asked.append(number)
        if again and number == signal.SIGINT:
            number = signal.SIGKILL
        elif number == signal.SIGHUP:
            number = signal.SIGTERM
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(number)


def _code(codes: Sequence[int]) -> int:
    """Return the exit code of the run: that of a user's mistake, else the largest."""
    left = [code if code >= 0 else 128 - code for code in codes]
    # A mistake explains the others' exit codes, and a restart would not help.
    return next((code for code in (1, 2) if code in left), max(left))


def command(config: str, overrides: Sequence[str], restarts: int) -> list[str]:
    """Return the command of each process: training under a supervisor."""
    train = [sys.executable, "-m", "maxstack.train", config, *overrides]
    return [*train, "--supervise", "--max-restarts", str(restarts)]
