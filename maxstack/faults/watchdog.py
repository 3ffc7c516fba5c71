"""The watchdog: a separate process beside each process of a run. heartbeat.py starts it as a
script, so it imports the standard library alone (70 ms of processor time to start).

It ends its process where no step is done in time, with the stacks of all threads in the log, and
all processes of the run where one is lost. Its process tells it what it does and how long that may
take; all else it reads from /proc, so no lock, no GIL and no C++ that the process hangs in can keep
it from deciding. Each watchdog has a connection to that of process 0, which decides for all and
tells the others; the processes make these connections and hand them over, so a watchdog listens to
nobody. A connection that breaks is a death, noticed within a second, where jax's heartbeats need
100 s. The process is asked to leave, then killed.
"""

import contextlib
import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TICK = 0.25
SILENCE = 30.0
"""Seconds without a message after which a host is lost, with its network or its power."""
PAUSED = 5.0
"""Seconds between two ticks after which a watchdog resets its clocks: the machine was stopped or
moved."""
ASKED = 2.0
"""Seconds that a process has to leave when asked to."""
FAILED = 10.0
"""Seconds that it has after an error of its own."""
TOLD = 2.0
"""Seconds that process 0 has to print an error of its own."""
LAST = 8.0
"""Seconds, at most, that process 0 waits for the others to leave: jax aborts those that it leaves
behind."""
LONGEST = 1 << 22
"""Bytes of another watchdog's message; an alarm has a line for each process."""
LINES = 200
"""Connections that are handed over at a time; Linux allows 253."""


class Watchdog:
    """The watchdog of the process that started it. `line`: the socket to that process; `arguments`:
    its pid, process, processes, log, stacks (a file), step (seconds that
    it may be stopped), retry (the exit code that asks for a restart)."""

    def __init__(self, line: socket.socket, arguments: Mapping[str, Any]):
        self._line = line
        self._arguments = arguments
        # Told, not asked of the system: of 100 processes that were killed at random, 18 ended
        # before their watchdog could ask for its parent, and left it behind for ever.
        self._pid = arguments["pid"]
        self._own: dict[str, Any] = {
            "process": arguments["process"],
            "host": platform.node(),
            "pid": self._pid,
            "doing": "start-up",
            "step": 0,
            "state": "",
            "done": False,
        }
        self._beat = time.monotonic()
        """Time of the last sign of life."""
        self._limit = float("inf")
        """Seconds until the next one is due."""
        self._failed = False
        """The process reported an error."""
        self._first: Connection | None = None
        self._first_done = False
        self._others: dict[Connection, dict[str, Any]] = {}
        self._heard: dict[Connection, float] = {}
        self._sent = 0.0
        self._looked = self._ran = time.monotonic()

    def watch(self) -> None:
        """Watch until the process has ended."""
        lives = True
        while lives:
            for ready in wait([self._line, *self._heard], TICK):
                if ready is self._line:
                    self._read_process()
                else:
                    self._read_watchdog(ready)  # type: ignore[arg-type]
            self._look()
            # The kernel gives an orphan another parent, so this cannot be fooled by a new process
            # with the same number.
            lives = os.getppid() == self._pid
        if not self._own["done"]:
            self._alarm(
                f"{_name(self._own)} ended without a message: killed, out of memory, or crashed",
                stacks=False,
            )

    def _look(self) -> None:
        """Raise an alarm where the process or another host is late, and report to the others."""
        own, most = self._own, self._arguments["step"]
        now = time.monotonic()
        own["state"] = state_of(self._pid)
        if now - self._looked > PAUSED:  # the watchdog stood still too, and perhaps all of them
            self._tell_pause(now - self._looked, "its whole machine, or all that runs here")
            # Otherwise all watchdogs of a machine that was suspended would end their runs as it
            # wakes up.
            self._beat = self._ran = now
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        if own["state"] != "stopped":
            if now - self._ran > PAUSED:
                self._tell_pause(now - self._ran, "stopped by a signal")
            self._ran = now
        elif self._arguments["processes"] == 1:
            self._beat = self._ran = now  # somebody wants it to be (^Z), and nobody waits for it
        if now - self._ran > most:
            self._alarm(f"{_name(own)} is stopped by a signal for {most:.0f} s", stacks=True)
        if now - self._beat > self._limit:
            self._alarm(
                f"no sign of life from {_name(own)} for {self._limit:.0f} s "
                f"(faults.watchdog), in {own['doing']} after step {own['step']}",
                stacks=True,
            )
        for link, heard in list(self._heard.items()):
            if now - heard > SILENCE:
                name = _name(self._others.get(link, {"process": 0}))
                self._alarm(f"{name}: its host was silent for {SILENCE:.0f} s", stacks=False)
        if now - self._sent >= 1.0:
            self._sent = now
            self._send({"status": own})

    def _tell_pause(self, seconds: float, how: str) -> None:
        self._say(f"{_name(self._own)} stood still for {seconds:.0f} s ({how})", log=True)

    def _read_process(self) -> None:
        """Read a message of the process, and connections to other watchdogs that come with it."""
        try:
            text, lines, *_ = socket.recv_fds(self._line, 1 << 16, LINES, socket.MSG_DONTWAIT)
            message = json.loads(text)
        except (OSError, ValueError):  # its end is closed
            return
        self._beat = time.monotonic()
        for line in lines:
            link: Connection = Connection(line)
            self._heard[link] = self._beat
            # Only process 0 is handed more than one connection.
            if self._own["process"]:
                self._first = link
                self._send({"status": self._own})
            else:
                self._others[link] = {"process": "?"}
        self._limit = message.get("limit", self._limit)
        self._own |= {name: message[name] for name in ("doing", "step") if name in message}
        if message.get("end") == "done":
            self._own["done"] = True
            self._send({"status": self._own})
        elif message.get("end") == "failed":
            self._failed = True
            self._alarm(
                f"{_name(self._own)} ended with an error: {message['why']}",
                stacks=False,
                code=message["code"],
            )

    def _read_watchdog(self, link: Connection) -> None:
        """Read a message of another watchdog, or raise an alarm where it is gone."""
        try:
            message = json.loads(link.recv_bytes(LONGEST))
        except (EOFError, OSError):
            self._heard.pop(link)
            status = self._others.pop(link, None)
            if link is self._first:
                self._first = None
                # Where this process is done itself, process 0 may end without a word.
                status = {"process": 0, "done": self._own["done"] or self._first_done}
            if status and not status.get("done"):
                self._alarm(f"the watchdog of {_name(status)} is gone", stacks=False)
            return
        self._heard[link] = time.monotonic()
        if "verdict" in message:
            self._end(**message["verdict"])
        elif "alarm" in message:
            self._alarm(**message["alarm"])
        elif link is self._first:
            self._first_done = message["status"]["done"]
        else:
            self._others[link] = message["status"]

    def _send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode()
        for link in self._heard:
            with contextlib.suppress(OSError):  # reading notices that it is gone
                link.send_bytes(data)

    def _alarm(self, text: str, stacks: bool, code: int | None = None) -> None:
        """End the run for the reason `text`. Process 0's watchdog decides for all; where that does
        not answer, each decides for itself."""
        alarm: dict[str, Any] = {
            "text": text,
            "code": self._arguments["retry"] if code is None else code,
            "stacks": stacks,
        }
        if self._first:
            self._send({"status": self._own})
            self._send({"alarm": alarm})
            # 5 s for the verdict of process 0, which names the states of all.
            for _ in range(20):
                if self._first and wait([self._first], TICK):
                    self._read_watchdog(self._first)
        elif self._others:
            statuses = sorted([self._own, *self._others.values()], key=_number)
            stopped = [
                f"{_name(status)} is {status['state']}"
                for status in statuses
                if status.get("state") not in (None, "", "ended")
            ]
            alarm["text"] = "\n".join([": ".join([text, *stopped]), *map(_line, statuses)])
            self._send({"verdict": alarm})
        self._end(**alarm)

    def _end(self, text: str, code: int, stacks: bool) -> None:
        """End the process, then this one."""
        first = self._own["process"] == 0
        lives = os.getppid() == self._pid
        self._say(f"WATCHDOG: {text}", log=first)
        if stacks and lives:
            self._say("".join(stacks_of(self._pid, Path(self._arguments["stacks"]))), log=True)
        if first and lives:
            self._let_others_leave()  # or jax aborts them, with 134, when it loses process 0
        # One that failed by itself is already leaving with its own code.
        if lives and (first or not self._failed):
            with contextlib.suppress(OSError):
                self._line.send(json.dumps({"leave": code}).encode())
        # Then SIGKILL: a process that hangs in C++ runs no handler of Python's, so asking may not
        # help.
        deadline = time.monotonic() + (FAILED if self._failed else ASKED)
        while os.getppid() == self._pid and time.monotonic() < deadline:
            time.sleep(0.05)
        if os.getppid() == self._pid:
            os.kill(self._pid, signal.SIGKILL)
        sys.exit()

    def _let_others_leave(self) -> None:
        begin = time.monotonic()
        links = [*self._heard]
        while links and time.monotonic() < begin + LAST:
            for link in wait(links, TICK):
                try:
                    # What they say no longer matters; the end of the connection is the end of the
                    # watchdog.
                    link.recv_bytes()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    links.remove(link)  # type: ignore[arg-type]
        if self._failed:
            time.sleep(max(0.0, begin + TOLD - time.monotonic()))

    def _say(self, text: str, log: bool) -> None:
        with contextlib.suppress(OSError):  # the reader may be gone
            print(text, file=sys.stderr)
        if log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError), open(self._arguments["log"], "a") as file:
                file.write("".join(f"{stamp} {line}\n" for line in text.splitlines()))


def _number(status: Mapping[str, Any]) -> int:
    return status["process"] if isinstance(status["process"], int) else sys.maxsize


def _name(status: Mapping[str, Any]) -> str:
    where = f" (pid {status['pid']} on {status['host']})" if "pid" in status else ""
    return f"process {status['process']}{where}"


def _line(status: Mapping[str, Any]) -> str:
    if "pid" not in status:
        return f"  {_name(status)}: has reported nothing yet"
    state = f", {status['state']}" if status["state"] else ""
    return f"  {_name(status)}: {status['doing']}, step {status['step']}{state}"


def state_of(pid: int) -> str:
    """Return the state of a process that does not run (stopped, held by a debugger, ended); "" for
    one that runs."""
    states = {"T": "stopped", "t": "held by a debugger", "Z": "ended", "X": "ended"}
    return states.get((_stat(pid) or [""])[0], "")


def stacks_of(pid: int, file: Path) -> list[str]:
    """Return the stacks of all threads of a process and of its descendants. Each appends its own to
    `file` when it gets SIGUSR2."""
    texts = []
    for each in [pid, *_children(pid)]:
        name = "this run's"
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{each}/cmdline").read_bytes().decode(errors="replace")
            name = " ".join(command.replace("\0", " ").split())[:150]
        texts.append(f"stacks of process {each} ({name}):\n{_stacks(each, file)}")
    return texts


def _stacks(pid: int, file: Path) -> str:
    if state_of(pid) == "stopped":
        return "  none: it is stopped by a signal\n"
    if not _handles_signal(pid):
        return "  none: it is not a Python process, or has only begun\n"
    # All processes append to one file: read is what is new in it.
    before = size = file.stat().st_size
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR2)
    for _ in range(20):
        time.sleep(0.1)
        # faulthandler writes thread by thread and does not say when it is done: once nothing is
        # added.
        if (now := file.stat().st_size) == size > before:
            break
        size = now
    with file.open("rb") as opened:
        opened.seek(before)
        return opened.read().decode(errors="replace") or "  none: it did not answer\n"


def _stat(pid: int) -> list[str]:
    """Read state, parent, and so on, of a process; empty where there is no /proc."""
    try:
        # The name before the fields may hold spaces and brackets itself.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def _children(pid: int) -> list[int]:
    """List the descendants of a process, without this one."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if (stat := _stat(int(path.name))) and int(path.name) != os.getpid():
            parents[int(path.name)] = int(stat[1])
    family: set[int] = set()
    more = {pid}
    while more:
        more = {child for child, parent in parents.items() if parent in more}
        family |= more
    return sorted(family)


def _handles_signal(pid: int) -> bool:
    """Return whether a process has a handler for SIGUSR2, which would kill it otherwise; without
    /proc, whether it is the watched one."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return pid == os.getppid()
    return any(
        int(line.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1
        for line in lines
        if line.startswith("SigCgt:")
    )


if __name__ == "__main__":
    # Launchers signal all processes of a job; this one has to outlive its own.
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    arguments = json.loads(sys.argv[1])
    try:
        Watchdog(socket.socket(fileno=arguments["line"]), arguments).watch()
    finally:
        Path(arguments["stacks"]).unlink(missing_ok=True)
