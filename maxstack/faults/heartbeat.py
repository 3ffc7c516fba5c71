"""The process's side of the watchdog: tells it what is being done, hands it the stacks, and leaves
when it says so."""

import contextlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from maxstack.cluster.exit_codes import CRASHED, RETRY
from maxstack.cluster.peers import Processes
from maxstack.faults import watchdog
from maxstack.faults.preemption import INTERRUPTED
from maxstack.report import stacks
from maxstack.schema.faults import WatchdogConfig

OFTEN = 0.2
"""Seconds between two signs of life that say nothing new but a step's number."""
VERDICT = 8.0
"""Seconds to wait, after an error of jax's, for word that a peer is lost, which it then comes
of."""
JOINED_MS = 60_000
"""How long those that have joined take at most to say so."""


_current: "Heartbeat | None" = None


def retire() -> None:
    """End the watchdog of a run that has ended, where this process goes on with another."""
    if _current:
        _current.retire()


class Heartbeat:
    """A context: whatever ends it but `done` ends the other processes too."""

    def __init__(self, cfg: WatchdogConfig, log: Path, processes: Processes):
        self._cfg, self._several, self._first = cfg, processes.count > 1, processes.number == 0
        self._said, self._slowest, self._alone, self._retired, self._doing = (
            0.0,
            0.0,
            False,
            False,
            "",
        )
        file = stacks.new_file()
        stacks.show()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
        given = {
            "line": theirs.fileno(),
            "pid": os.getpid(),
            "process": processes.number,
            "processes": processes.count,
            "log": str(log.absolute()),
            "stacks": str(file),
            "step": cfg.step,
            "retry": RETRY,
            "host": processes.own_address() if self._several else None,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__, json.dumps(given)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.doing("start-up")
        if self._several:
            self._connect(processes)
        threading.Thread(target=self._obey, name="heartbeat", daemon=True).start()
        global _current
        _current = self

    def retire(self) -> None:
        """End the watchdog's process."""
        self._retired = True
        self._process.kill()
        self._process.wait()

    def _connect(self, processes: Processes) -> None:
        key = processes.tell(
            "watchdog", secrets.token_hex(32) if processes.number == 0 else "", JOINED_MS
        )[0]
        at = None
        if processes.number == 0:
            self._send({"key": key, "at": None})
            at = json.loads(self._line.recv(1 << 16))["at"]
        at = processes.tell("watchdog", at, JOINED_MS)[0]
        if processes.number:
            self._send({"key": key, "at": at})

    def __enter__(self) -> "Heartbeat":
        return self

    def doing(self, what: str, step: int | None = None, seconds: float = 0.0) -> None:
        """What the main thread begins: `steps`, or what may take longer; with `step`, that this
        step is done and took `seconds`."""
        now, self._slowest = time.monotonic(), max(self._slowest, seconds)
        message: dict[str, Any] = {
            "doing": what,
            "limit": max(self._cfg.step, 10 * self._slowest)
            if what == "steps"
            else self._cfg.other,
        }
        if step is not None:
            message |= {"step": step}
            if now - self._said < OFTEN and what == self._doing:
                return
        self._said, self._doing = now, what
        self._send(message, socket.MSG_DONTWAIT)

    def done(self) -> None:
        """All that is left is to end."""
        self._send({"end": "done", "doing": "ending", "limit": self._cfg.other})

    def interrupted(self) -> None:
        """The user ends this process at once."""
        if not self._several:
            self.done()
        else:
            self._send({"end": "failed", "code": INTERRUPTED, "why": "interrupted twice"})

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or not self._several:
            self.done()
            return
        if isinstance(error, RuntimeError):
            time.sleep(VERDICT)
        code = (
            INTERRUPTED
            if isinstance(error, KeyboardInterrupt)
            else getattr(error, "exit_code", CRASHED)
        )
        self._send(
            {"end": "failed", "code": code, "why": f"{type(error).__name__}: {error}"[:1000]}
        )
        after = watchdog.FAILED if self._first else watchdog.TOLD  # unless the watchdog asks before
        threading.Thread(target=_leave, args=(code, after), daemon=True).start()

    def _send(self, message: dict[str, Any], flags: int = 0) -> None:
        try:
            self._line.send(json.dumps(message).encode(), flags)
        except BlockingIOError:
            pass  # it has enough to read
        except OSError:
            if not self._alone:
                print(
                    "the watchdog is gone: nobody ends this run if it hangs",
                    file=sys.stderr,
                    flush=True,
                )
            self._alone = True

    def _obey(self) -> None:
        with contextlib.suppress(OSError):
            if (word := self._line.recv(1 << 16)) and not self._retired:
                _leave(json.loads(word)["leave"])


def _leave(code: int, after: float = 0.0) -> None:
    time.sleep(after)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
