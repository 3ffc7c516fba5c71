"""Training processes that are forked instead of started: jax, orbax and grain are imported once for
all of them, which is a third of what a tiny run costs. Each is a process of its own, in a session
of its own, with signals, exit codes and files as `python -m maxstack.train` has them."""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

LIBRARIES = [
    "jax",
    "flax.nnx",
    "optax",
    "grain",
    "tensorstore",
    "orbax.checkpoint.v1",
    "maxstack.elastic",
    "maxstack.checkpoint.store",
    "maxstack.checks",
    "maxstack.cluster.membership",
    "maxstack.plan.fit",
    "maxstack.data.feed",
    "maxstack.evals.held_out",
    "maxstack.report.goodput",
    "maxstack.startup",
]
"""Modules that the server of forks imports. None of them starts a backend of jax."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(LIBRARIES)


class Forked:
    """A Python program in a fork, with the part of subprocess.Popen's interface that tests use.

    `command`: sys.executable, then `-m MODULE` or the path of a program, then its arguments.
    `output`: the file that gets stdout; stderr too, or apart in `errors`."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        cwd: Path | None = None,
    ):
        self.args = [*command]
        where = str(cwd or Path.cwd())
        environment = {**env, "GLIBC_TUNABLES": ""}  # or train starts its program over, unforked
        self._process = _CONTEXT.Process(
            target=_program,
            args=(self.args, environment, where, str(output), str(errors or output)),
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """`returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """`returncode` once it has ended; subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """A signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _program(command: list[str], env: dict[str, str], cwd: str, output: str, errors: str) -> None:
    """In the fork: become that command, and leave as an interpreter does."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(cwd)
    for path, numbers in ((output, (1, 2) if errors == output else (1,)), (errors, (2,))):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number in numbers:
            os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv = command
    sys.path[:0] = [part for part in env.get("PYTHONPATH", "").split(":") if part]
    code: object = 0
    try:
        if command[1] == "-m":
            sys.argv = command[2:]
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command[1:]
            sys.path.insert(0, str(Path(command[1]).parent))
            runpy.run_path(command[1], run_name="__main__")
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
