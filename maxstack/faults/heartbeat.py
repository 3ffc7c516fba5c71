"""The process's side of the watchdog: reports phase and step, and exits when the watchdog says so.

Each message says what the main thread does and how long that may take; the watchdog (watchdog.py)
decides alone. Messages go over a socket of datagrams, without waiting. In a run of several
processes this side also connects the watchdogs, that of process 0 with each other one, after the
job's key is proved, and hands them the open connections.
"""

import contextlib
import json
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from maxstack.cluster.connections import Acceptor, connect
from maxstack.cluster.environment import say
from maxstack.cluster.exit_codes import CRASHED, RETRY
from maxstack.cluster.peers import Peers
from maxstack.cluster.roll_call import Missing
from maxstack.faults import preemption, watchdog
from maxstack.faults.preemption import INTERRUPTED
from maxstack.report import stacks
from maxstack.schema.faults import WatchdogConfig

OFTEN = 0.2
"""Seconds between two messages that differ in the step's number alone."""
VERDICT = 8.0
"""Seconds to wait after an error in jax for the watchdog to report a lost peer, its usual cause."""
JOINED_MS = 60_000
"""Milliseconds for the processes, which have joined, to connect their watchdogs."""
PURPOSE = "watchdogs"

_current: "Heartbeat | None" = None


def retire() -> None:
    """End the watchdog of a finished run in a process that goes on with another."""
    if _current:
        _current.retire()


class Heartbeat:
    """A context for the run, with a watchdog process. An error in it ends the other processes of
    the run too. `ends`: this process ends with the run and is watched until then; one that lives
    on, such as a notebook, is not."""

    def __init__(self, cfg: WatchdogConfig, log: Path, peers: Peers, ends: bool = True):
        self._cfg = cfg
        self._several = peers.count > 1
        self._first = peers.number == 0
        self._ends = ends
        self._sent = self._slowest = 0.0
        self._phase = ""
        self._watchdog_gone = self._retired = False
        # Where each thread writes its stack at SIGUSR2, even while the main thread is stuck in C++.
        file = stacks.new_file()
        stacks.show()
        # Datagrams keep the bounds of messages, and file descriptors travel with them.
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        # A watchdog that is stopped must not hold up the run for more than 5 s.
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
        arguments = {
            "line": theirs.fileno(),
            "pid": os.getpid(),
            "process": peers.number,
            "processes": peers.count,
            "log": str(log.absolute()),
            "stacks": str(file),
            "step": cfg.step,
            "retry": RETRY,
        }
        self._process = subprocess.Popen(
            # Without site-packages and the user's environment: 70 ms, and nothing of the run's can
            # break it.
            [sys.executable, "-I", "-S", watchdog.__file__, json.dumps(arguments)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # A terminal's ^C goes to the process alone.
            start_new_session=True,
        )
        theirs.close()
        self.doing("start-up")
        if self._several:
            self._connect(peers)
        threading.Thread(target=self._obey, name="heartbeat", daemon=True).start()
        global _current
        _current = preemption.watched = self

    def retire(self) -> None:
        """End the watchdog's process."""
        preemption.watched = None
        self._retired = True
        # It is not told that the run is over: it would then watch this process until that ends.
        self._process.kill()
        self._process.wait()

    def _connect(self, peers: Peers) -> None:
        """Connect the watchdogs, that of process 0 with each other one, and hand the connections
        over, so that no watchdog listens itself. Missing where a process does not come."""
        listener = address = None
        if self._first:
            listener = socket.create_server((peers.own_address(), 0), backlog=peers.count)
            address = listener.getsockname()
        # After the roll call all processes are there, so a minute is enough.
        address = peers.exchange("watchdog", address, JOINED_MS)[0]
        if listener is None:
            self._hand_over([connect(tuple(address), peers.key, PURPOSE)])
            return
        came: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        deadline = time.monotonic() + JOINED_MS / 1000
        with Acceptor(listener, peers.key, PURPOSE, came.put, say):
            try:
                lines = [
                    came.get(timeout=max(0.0, deadline - time.monotonic()))
                    for _ in range(peers.count - 1)
                ]
            except queue.Empty:
                raise Missing("the watchdogs of some processes did not come") from None
        self._hand_over(lines)

    def _hand_over(self, lines: list[Connection]) -> None:
        for begin in range(0, len(lines), watchdog.LINES):
            part = lines[begin : begin + watchdog.LINES]
            socket.send_fds(self._line, [b"{}"], [line.fileno() for line in part])
        for line in lines:
            # The watchdog's copies are the only ones: a connection then breaks when that dies.
            line.close()

    def __enter__(self) -> "Heartbeat":
        return self

    def doing(self, phase: str, step: int | None = None, seconds: float = 0.0) -> None:
        """Report a phase that the main thread begins: `steps`, or one that may take longer; with
        `step`, that this step is done and took `seconds`."""
        now = time.monotonic()
        self._slowest = max(self._slowest, seconds)
        # Steps may be slower than the default limit; the slowest so far says what is normal here.
        limit = max(self._cfg.step, 10 * self._slowest) if phase == "steps" else self._cfg.other
        message: dict[str, Any] = {"doing": phase, "limit": limit}
        if step is not None:
            message["step"] = step
            # A change of phase is always sent: before it was, the limit of a save held for the
            # steps after it, and 6 of 8 hung workers were ended after 120 s, at a limit of 5.
            if now - self._sent < OFTEN and phase == self._phase:
                return
        self._sent = now
        self._phase = phase
        # A full socket loses a message, and the next one has the same news.
        self._send(message, socket.MSG_DONTWAIT)

    def done(self) -> None:
        """Report that the run is over and the process about to end."""
        self._send({"end": "done", "doing": "ending", "limit": self._cfg.other})

    def interrupted(self, code: int = INTERRUPTED, why: str = "interrupted twice") -> None:
        """Report that the user ends this process at once."""
        if self._several:
            self._send({"end": "failed", "code": code, "why": why})
        else:
            self.done()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or not self._several:
            if self._ends:
                self.done()
            else:
                self.retire()
            return
        # A lost peer shows itself as an error of jax here; the watchdog knows which one it was.
        if isinstance(error, RuntimeError):
            time.sleep(VERDICT)
        code = getattr(error, "exit_code", CRASHED)
        if isinstance(error, KeyboardInterrupt):
            code = INTERRUPTED
        self._send(
            {"end": "failed", "code": code, "why": f"{type(error).__name__}: {error}"[:1000]}
        )
        after = watchdog.FAILED if self._first else watchdog.TOLD  # or when the watchdog says so
        # Python's own end could wait for ever: for a collective that the others never join.
        threading.Thread(target=_leave, args=(code, after), daemon=True).start()

    def _send(self, message: dict[str, Any], flags: int = 0) -> None:
        try:
            self._line.send(json.dumps(message).encode(), flags)
        except BlockingIOError:
            pass  # the watchdog has enough to read
        except OSError:
            if not self._watchdog_gone:
                print("the watchdog is gone: if this run hangs, nothing ends it", file=sys.stderr)
            self._watchdog_gone = True

    def _obey(self) -> None:
        with contextlib.suppress(OSError):
            if (word := self._line.recv(1 << 16)) and not self._retired:
                _leave(json.loads(word)["leave"])


def _leave(code: int, after: float = 0.0) -> None:
    time.sleep(after)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
