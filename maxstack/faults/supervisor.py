"""`maxstack train --supervise`: a parent that starts the training as its child, and starts it again
after a crash or a preemption.

It restarts after any exit code but 0, 1 (a mistake) and 2 (bad data), since a mistake does not go
away by itself, and gives up after some restarts in a row without a new step. It imports nothing
heavy, and knows of its child only the exit code and goodput.jsonl.
"""

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from maxstack.cluster.exit_codes import CRASHED, RETRY
from maxstack.report import goodput, trace_requests
from maxstack.report.console import Lasting

PARENT = "MAXSTACK_SUPERVISED"
"""Environment variable of the child with the parent's process id."""
MISTAKES = {
    1: "a mistake in the configuration, or another error that a restart does not fix, see above",
    2: "bad data",
}
REASONS = {
    RETRY: "stopped, hung or lost a peer",
    CRASHED: "an error in the program, see above",
    130: "interrupted",
}
KILLED = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGBUS: " (a mapped file that became shorter?)",
}
PAUSE, LONGEST_PAUSE = 1.0, 60.0
LONG = 600.0
"""Seconds of a child's life that count as progress where goodput.jsonl does not grow."""
PR_SET_PDEATHSIG = 1


def run(command: Sequence[str], folder: Path, most: int = 10, pause: float = PAUSE) -> int:
    """Run `command`, the training of the run in `folder`, until it is done; return the exit code.

    A restart comes after `pause` seconds, twice as many each time up to a minute, and at most
    `most` times in a row without progress, which is a step beyond all earlier ones. SIGTERM, SIGINT
    and SIGHUP are passed on and end it; a second SIGINT kills the child. SIGUSR1 asks for a trace
    of the next steps. Call it from the main thread.
    """
    return Supervisor(command, folder, most, pause).run()


def follow_parent() -> None:
    """In a child of `run`, turn the parent's death into a SIGTERM, so that it saves and ends; call
    it once SIGTERM has its handler. Elsewhere do nothing.

    Linux sends the signal (PR_SET_PDEATHSIG); on other systems a thread checks every second.
    """
    # Taken out of the environment: processes that the training starts are not this one's children.
    parent = int(os.environ.pop(PARENT, "0"))
    if not parent:
        return
    # The parent's death breaks its pipe, and the handler of the signal that this sends writes a
    # line first: the error lost all steps since the last save.
    sys.stdout, sys.stderr = Lasting(sys.stdout), Lasting(sys.stderr)  # type: ignore[assignment]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    else:
        threading.Thread(target=_poll, args=(parent,), daemon=True, name="parent").start()
    # It ended before it was asked to send a signal.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


class Supervisor:
    """One call of `run`."""

    def __init__(self, command: Sequence[str], folder: Path, most: int, pause: float):
        self._command = command
        self._folder = folder
        self._most, self._pause = most, pause
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: list[int] = []
        self._restarts = self._in_a_row = 0
        self._steps = goodput.so_far(self._folder).steps

    def run(self) -> int:
        """Run the child until it is done, as the function `run` describes."""
        before: dict[int, Any] = {}
        for asking in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(asking) != signal.SIG_IGN or asking != signal.SIGHUP:
                before[asking] = signal.signal(asking, self._ask)
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._ask_for_trace)
        # A supervisor may be a child too, of `maxstack submit`.
        follow_parent()
        try:
            while True:
                began = time.monotonic()
                size = self._size()
                code = self._live()
                lived = time.monotonic() - began
                # A signal to the supervisor means the run, so a child that left for it is not
                # restarted.
                if code == 0 or code in MISTAKES or self._asked:
                    return self._end(code)
                if self._made_progress(size, lived):
                    self._in_a_row = 0
                if self._in_a_row >= self._most:
                    return self._end(code)
                self._wait(code, lived)
                if self._asked:
                    self._say(f"{signal.Signals(self._asked[0]).name}; no restart follows")
                    return RETRY
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _live(self) -> int:
        """Run the child once and return its return code. In a process group of its own it gets a
        terminal's ^C only from here, once."""
        environment = os.environ | {PARENT: str(os.getpid())}
        self._child = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, env=environment, process_group=0
        )
        for number in self._asked:  # while it was being started
            self._child.send_signal(number)
        code = self._child.wait()
        self._child = None
        return code

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on: each kind once, and a second SIGINT as SIGKILL."""
        again = number in self._asked
        self._asked.append(number)
        if self._child and (not again or number == signal.SIGINT):
            self._child.send_signal(signal.SIGKILL if again else number)

    def _ask_for_trace(self, number: int, frame: FrameType | None) -> None:
        """Pass SIGUSR1 on as a file, which also reaches a child that has not started yet."""
        with contextlib.suppress(OSError):
            trace_requests.ask(self._folder, trace_requests.STEPS)

    def _made_progress(self, size: int, lived: float) -> bool:
        """Return whether the child came further than any before it. `size`: bytes of goodput.jsonl
        before it."""
        # It did not grow: process 0, which writes it, may be on a host whose folder is not seen
        # from here.
        if self._size() == size:
            return lived >= LONG
        before = self._steps
        self._steps = max(before, goodput.so_far(self._folder).steps)
        return self._steps > before

    def _wait(self, code: int, lived: float) -> None:
        """Print the reason and the pause before the restart, and wait; a signal ends the pause."""
        # What fails at once, such as a store that is away, is given time: the pauses of ten
        # restarts are some 5 minutes.
        pause = min(LONGEST_PAUSE, self._pause * 2**self._in_a_row)
        self._restarts += 1
        self._in_a_row += 1
        self._say(
            f"{_reason(code)}, after {datetime.timedelta(seconds=round(lived))}; restart "
            f"{self._restarts} in {pause:g} s, "
            f"{self._in_a_row} of at most {self._most} in a row without progress"
        )
        end = time.monotonic() + pause
        while (left := end - time.monotonic()) > 0 and not self._asked:
            time.sleep(min(0.1, left))

    def _end(self, code: int) -> int:
        """Print how the run ended; return the exit code, 128 + its number for a signal."""
        if code == 0:
            self._say(f"done, after {_restarts(self._restarts)}")
        elif self._asked:
            second = code == -signal.SIGKILL and len(self._asked) > 1
            how = "killed at the second" if second else _reason(code)
            name = signal.Signals(self._asked[0]).name
            self._say(f"{name} was passed on, and no restart follows: {how}")
        elif code in MISTAKES:
            self._say(f"{_reason(code)}; a restart would not help")
        else:
            why = "--max-restarts 0 allows no restart"
            if self._most:
                why = f"{_restarts(self._in_a_row)} in a row (--max-restarts) made no progress"
            self._say(f"gave up: {_reason(code)}; {why}")
        return code if code >= 0 else 128 - code

    def _say(self, text: str) -> None:
        so_far = goodput.so_far(self._folder)
        goodput_line = f"; {goodput.sentence(so_far)}" if so_far.began else ""
        with contextlib.suppress(OSError):  # the reader of stderr may be gone
            print(f"supervise: {text}{goodput_line}", file=sys.stderr)

    def _size(self) -> int:
        try:
            return (self._folder / goodput.FILE).stat().st_size
        except OSError:
            return 0


def _restarts(count: int) -> str:
    return "1 restart" if count == 1 else f"{count} restarts"


def _reason(code: int) -> str:
    """Describe an exit code; a negative one is a signal's."""
    if code < 0:
        number = signal.Signals(-code)
        return f"killed by {number.name}{KILLED.get(number, '')}"
    if code in REASONS or code in MISTAKES:
        return f"left with {code}: {(REASONS | MISTAKES)[code]}"
    with contextlib.suppress(ValueError):
        return f"left with {code}, as after {signal.Signals(code - 128).name}"
    return f"left with {code}"


def _poll(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
