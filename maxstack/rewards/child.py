"""The parent's side of a worker process."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from maxstack.rewards import processes, sandbox
from maxstack.rewards.lines import Lines
from maxstack.rewards.worker import KILL_SECONDS, LOAD_SECONDS, SILENCE

_START_SECONDS, _GRACE_SECONDS = 120.0, 30.0


class Closed(RuntimeError):
    """The pool is closed."""

    def __init__(self) -> None:
        super().__init__("the pool of rewards is closed")


class Child:
    """A process of worker.py, started at the first request and again after it died; with
    `sandbox`, the words before a command that runs in one, in a sandbox of its own."""

    def __init__(self, sandbox: Sequence[str] = ()) -> None:
        self._sandbox = sandbox
        self._lock = threading.Lock()
        self._closed = False
        self._lines: Lines | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.killed: deque[str] = deque()
        """How processes ended that a signal killed, and whose request was made once more."""

    @property
    def alive(self) -> bool:
        """True from the first request on, until it dies."""
        return self._lines is not None

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a request that may call for so many seconds; {"failure": reason} where the
        worker itself dies. Call it from one thread. RuntimeError if no worker can be started,
        Closed if the pool is.

        A process that a signal ended need not have brought that on itself: the request is then
        made once more, to a new worker. One that ends that way too has failed.
        """
        if self._process and self._lines and self._process.poll() is not None:
            self._end()
        answer = self._answer(request, seconds)
        if not answer.pop("killed", False):
            return answer
        self.killed.append(answer["failure"])
        if self._lines:
            self._end()
        again = self._answer(request, seconds)
        if again.pop("killed", False):
            again["failure"] += ", and once more on a new worker"
        return again

    def _answer(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """`ask`, once; `killed` is true in a failure by a signal that nobody here sent."""
        lines, name = self._started(), secrets.token_hex(16)
        deadline = time.monotonic() + LOAD_SECONDS + seconds + KILL_SECONDS + _GRACE_SECONDS
        try:
            lines.send({**request, "id": name}, SILENCE)
            while time.monotonic() < deadline:
                answer = lines.receive(SILENCE)
                if answer.pop("id", "") != name:
                    raise ValueError("an answer to another request")
                if not answer.pop("busy", False):
                    return answer
            raise TimeoutError
        except (EOFError, TimeoutError, ValueError) as error:
            if self._closed:
                raise Closed from None
            code, kind = self._end(), type(error).__name__
            return {
                "failure": f"its worker did not answer ({kind}, exit code {code})",
                "killed": isinstance(error, EOFError) and code < 0,
            }

    def hang_up(self) -> None:
        """Make the worker end, from any thread."""
        with self._lock:
            self._closed = True
            if self._lines:
                self._lines.hang_up()

    def close(self) -> None:
        """Wait until the worker has ended, which `hang_up` asked it to."""
        if self._lines:
            self._end()

    def _started(self, again: bool = True) -> Lines:
        """The socket to the worker, which is started if there is none; `again`: once more, where a
        signal kills it before it is ready."""
        with self._lock:
            if self._closed:
                raise Closed
            if self._lines:
                return self._lines
            ours, theirs = socket.socketpair()
            own = sandbox.environment() if self._sandbox else os.environ
            with theirs:
                self._process = subprocess.Popen(
                    [
                        *(*self._sandbox, sys.executable, "-m", "maxstack.rewards.worker"),
                        *(str(theirs.fileno()), processes.namespace()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # all that a sandbox inherits can be opened in it, as /proc/PID/fd/2
                    stderr=subprocess.DEVNULL if self._sandbox else None,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={"PYTHONHASHSEED": "0", **own, "JAX_PLATFORMS": "cpu"},
                )
            lines = self._lines = Lines(ours)
        try:
            lines.send({"path": [os.getcwd(), *sys.path]}, _START_SECONDS)
            lines.receive(_START_SECONDS)
        except (EOFError, TimeoutError, ValueError) as error:
            if self._closed:
                raise Closed from None
            code = self._end()
            if again and isinstance(error, EOFError) and code < 0:
                return self._started(again=False)
            raise RuntimeError(f"a worker for rewards did not start (exit code {code})") from error
        return lines

    def _end(self) -> int:
        """End the worker, which kills what descends from it -> its exit code."""
        with self._lock:
            assert self._lines and self._process
            self._lines.hang_up()
            try:
                code = self._process.wait(2 * KILL_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                code = self._process.wait()
            self._lines.close()
            self._lines = None
            # bubblewrap leaves with 128 and the signal that ended what it ran
            return 128 - code if self._sandbox and code > 128 else code
