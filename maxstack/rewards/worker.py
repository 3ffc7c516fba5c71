"""A worker: `python -m maxstack.rewards.worker SOCKET NAMESPACE`.

It runs no user code. It forks a process that does (runner.py), and ends that with all of its
descendants where it takes too long, dies or leaves processes behind, and when the parent ends. The
system would give a call's daemons to init, so the worker adopts orphans (Linux alone; elsewhere
such processes stay) and reads /proc for its descendants after each call. Processes that an
environment began are spared until its session is over.

In a sandbox, NAMESPACE (the parent's PID namespace) is not the worker's. There it sees every
process, so it also bounds their number and their memory in all: setrlimit bounds one process, and a
call could have many. There user code can send signals to the worker too, which is why the parent
expects a sign of life each second: a call that stopped its worker's clock once took 340 s of a
timeout of 10.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from maxstack.rewards import runner
from maxstack.rewards.channel import Channel

LOAD_SECONDS = 300.0
"""For importing a function."""
KILL_SECONDS = 5.0
SILENCE = 30.0
"""Seconds without a sign of life after which a worker counts as stopped."""
_TICK, _IDLE_TICK = 0.02, 0.1
"""Seconds between checks of parent and runner, in a call and between calls."""
_BEAT = 1.0
"""Seconds between signs of life in a call."""
PROCESSES = 64
"""Processes in a sandbox, its own three among them."""
LOAD_MEMORY = 16.0
"""GiB of memory that importing a function may take in a sandbox."""
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_JOIN_SESSION_KEYRING = 1
_KEYCTL = {"x86_64": 250, "aarch64": 219}
"""Number of a system call that C's library has no function for, by machine."""
_LINUX = sys.platform == "linux"


class Process(NamedTuple):
    """A process; its start time tells it from a later one of the same number."""

    pid: int
    started: str


class Lost(Exception):
    """A runner gave no answer; the message continues a sentence about the call. `killed`: a signal
    ended it that this module did not send."""

    def __init__(self, reason: str, killed: bool = False):
        super().__init__(reason)
        self.killed = killed


class Worker:
    """Passes requests to a runner and answers back, and enforces the limits."""

    def __init__(self, requests: Channel, parent: int, bounded: bool = False):
        self._requests, self._parent = requests, parent
        self._bounded = bounded
        """In a sandbox."""
        self._before = 0
        """Bytes of the runner's memory when a call began."""
        self._memory = LOAD_MEMORY
        """GiB that the call may add."""
        self._answers: Channel | None = None
        self._runner = 0
        self._status = 0
        self._dead = True
        self._kept: dict[str, set[Process]] = {}
        """Processes of each session that is not over."""

    def serve(self) -> NoReturn:
        """Answer requests until the parent ends."""
        with contextlib.suppress(EOFError):
            sys.path[:] = self._requests.receive(LOAD_SECONDS)["path"]
            self._requests.send({"ready": True})
            while not self._is_orphaned():
                try:
                    request = self._requests.receive(_IDLE_TICK)
                except TimeoutError:
                    self._reap()
                    with contextlib.suppress(Lost):
                        self._check_bounds()
                else:
                    self._requests.send(self._answer(request) | {"id": request["id"]})
        self._end()

    def _end(self) -> NoReturn:
        """End the runner and this process."""
        self._end_runner()
        os._exit(0)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._ask(request)
        except Lost as reason:
            self._end_runner()
            return {"failure": str(reason), "over": True, "killed": reason.killed}
        session = request.get("session")
        if session and not answer.get("over"):
            self._kept.setdefault(session, set()).update(self._left_over())
        elif session:
            self._kept.pop(session, None)
        deadline = time.monotonic() + KILL_SECONDS
        # Again until none is left: one that is being killed may fork.
        while (found := self._left_over()) and time.monotonic() < deadline:
            _kill(found)
            self._reap()
        if answer.pop("grown", False):
            self._end_runner()
        return answer

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the runner's answer. The runner has LOAD_SECONDS to import the call, then the
        request's `timeout` from each time that it reports that a call begins."""
        timeout = request.get("timeout", LOAD_SECONDS)
        begun, calls = 0, len(request.get("texts", ())) + 1
        self._memory = LOAD_MEMORY
        answers = self._start()
        beat = time.monotonic()
        deadline = beat + LOAD_SECONDS
        try:
            answers.send(request, SILENCE / 2)
            while True:
                # Before the answer is looked for: a runner that answered and then died has
                # answered.
                dead = self._reap()
                try:
                    message = answers.receive(min(_TICK, deadline - time.monotonic()))
                except TimeoutError:
                    if dead:
                        raise self._death() from None
                    if self._is_orphaned():
                        self._end()
                    self._check_bounds()
                    if time.monotonic() >= deadline:
                        if begun:
                            raise Lost(f"took longer than timeout={timeout:g} s") from None
                        raise Lost(f"was not imported within {LOAD_SECONDS:g} s") from None
                    if time.monotonic() >= beat + _BEAT:
                        self._requests.send({"id": request["id"], "busy": True})
                        beat = time.monotonic()
                    continue
                if not isinstance(message, dict) or message.get("id") != request["id"]:
                    raise ValueError(message)
                if not message.get("begin"):
                    return _check(message, request["do"])
                if begun == calls:  # user code wrote this
                    raise ValueError(message)
                # What importing took is not the call's.
                if self._bounded and not begun:
                    self._before = _private_memory().get(self._runner, 0)
                    self._memory = request["memory"]
                begun += 1
                deadline = time.monotonic() + timeout
        except EOFError:
            raise self._death() from None
        except TimeoutError:
            raise Lost(f"did not take a request within {SILENCE / 2:g} s") from None
        except (KeyError, TypeError, ValueError, RecursionError):
            raise Lost("answered with too much, or wrote to the socket of its worker") from None

    def _start(self) -> Channel:
        """Return the channel to the runner, and fork one if there is none. One that has sent
        something unasked is replaced."""
        if self._answers and not (self._reap() or self._answers.has_input()):
            return self._answers
        self._end_runner()
        ours, theirs = socket.socketpair()
        worker = os.getpid()
        # A fork has Python and this package loaded already; nothing of the user's was ever run
        # here.
        self._runner = os.fork()
        if not self._runner:
            try:
                ours.close()
                # Or user code could write to the trainer.
                self._requests.close()
                runner.main(Channel(theirs), worker)
            finally:
                os._exit(1)
        theirs.close()
        self._dead = False
        self._answers = Channel(ours)
        return self._answers

    def _end_runner(self) -> None:
        """Kill the runner and all its descendants."""
        if self._answers:
            self._answers.close()
            self._answers = None
        if self._bounded:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # the whole sandbox: forks outrun a list
        elif not self._reap():
            os.kill(self._runner, signal.SIGKILL)
        _kill_all(KILL_SECONDS)
        self._dead = True
        self._kept.clear()

    def _check_bounds(self) -> None:
        """Lost where the sandbox has too many processes, or these too much memory. A fork begins
        with its parent's memory, so that is subtracted for each."""
        if not self._bounded:
            return
        memory = _private_memory()
        spent = sum(memory.values()) - len(memory) * self._before
        if len(memory) <= PROCESSES and spent <= self._memory * 2**30:
            return
        self._end_runner()
        raise Lost(
            f"had more than {PROCESSES} processes, or took more than memory={self._memory:g} GiB "
            "with all of them"
        )

    def _left_over(self) -> list[Process]:
        """List descendants that no session keeps, apart from the runner."""
        spared = set[Process]().union(*self._kept.values())
        return [found for found in _descendants(spared) if found.pid != self._runner]

    def _reap(self) -> bool:
        """Reap children that ended; return whether the runner has."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._runner:
                    self._dead, self._status = True, ended[1]
        return self._dead

    def _death(self) -> Lost:
        """Describe how the runner ended, which may take it a second."""
        deadline = time.monotonic() + 1
        while not self._reap() and time.monotonic() < deadline:
            time.sleep(_TICK)
        code = os.waitstatus_to_exitcode(self._status)
        if not self._dead or code == runner.CLOSED:
            return Lost("closed the socket of its worker")
        if code >= 0:
            return Lost(f"ended its process with exit code {code}")
        name = signal.Signals(-code).name if -code in {*signal.Signals} else str(-code)
        memory = " (out of memory?)" if -code == signal.SIGKILL else ""
        return Lost(f"ended its process by signal {name}{memory}", killed=True)

    def _is_orphaned(self) -> bool:
        return self._requests.is_closed() or os.getppid() != self._parent


def _check(message: dict[str, Any], action: str) -> dict[str, Any]:
    """Hold an answer to the runner's own rules, since user code may have written it itself.
    KeyError, TypeError or ValueError where it breaks them."""
    names = ("failure", "messages", "value", "components", "over", "grown")
    answer = {name: message[name] for name in names if name in message}
    if "failure" in answer:
        return answer | {"failure": str(answer["failure"])}
    if action == "turn":
        runner.check_observation(answer["messages"])
    if action == "reward" or "value" in answer:
        answer |= runner.check_reward({**answer["components"]} or answer["value"])
    return answer


def pid_namespace() -> str:
    """Name of this process's PID namespace; "" where there are none."""
    return os.readlink("/proc/self/ns/pid") if _LINUX else ""


def main() -> NoReturn:
    """Serve the parent. A signal to end is ignored: the parent may still want answers."""
    if _LINUX:
        # Linux gives orphans to this process, not to init, so daemons of a call can be found.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs started here inherit
    outside = sys.argv[2]
    assert outside.startswith("pid:[") or not outside, "the name of a namespace"
    # Found out, not told: an argument that says so could be wrong.
    bounded = pid_namespace() != outside
    if bounded:
        _seal()
    Worker(Channel(socket.socket(fileno=int(sys.argv[1]))), os.getppid(), bounded).serve()


def _seal() -> None:
    """Keep other programs of the same user from memory and descriptors of this process and of its
    forks (no /proc/PID/mem, /proc/PID/fd, ptrace, pidfd_getfd), and these from the session's keys.
    OSError where the first cannot be."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
    if call := _KEYCTL.get(os.uname().machine):
        library.syscall(call, _JOIN_SESSION_KEYRING, None)  # fails where the kernel has no keys


def _descendants(spared: Collection[Process] = ()) -> list[Process]:
    """List living descendants of this process, parents first, without the spared ones and their
    descendants."""
    found: list[Process] = []
    parents = [os.getpid()]
    while parents:
        for pid in _children(parents.pop()):
            process = _read_process(pid)
            if process and process not in spared:
                found.append(process)
                parents.append(pid)
    return found


def _kill(processes: Collection[Process]) -> None:
    """Send SIGKILL to each."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def _kill_all(seconds: float) -> None:
    """Kill and reap the descendants until none is left, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        _kill(_descendants())
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _private_memory() -> dict[int, int]:
    """Bytes of private anonymous memory of each process that this one sees."""
    found = dict[int, int]()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            _, resident, shared = Path(f"/proc/{name}/statm").read_bytes().split()[:3]
            found[int(name)] = (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    return found


def _children(pid: int) -> list[int]:
    """List children of all threads of a process, from the kernel's lists or, where it keeps none
    (CONFIG_PROC_CHILDREN), by reading every process's parent, which takes longer."""
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
        numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [number for number in numbers if (_stat(number) or [b"", b""])[1] == b"%d" % pid]
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, task.read_bytes().split())
    return found


def _read_process(pid: int) -> Process | None:
    fields = _stat(pid)
    # Zombies cannot be killed again; field 22 of stat(5) is the start time.
    return None if fields is None or fields[0] in b"ZX" else Process(pid, fields[19].decode())


def _stat(pid: int) -> list[bytes] | None:
    """Fields of /proc/PID/stat after the name: state, parent and so on."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name before it may hold spaces and brackets.
    return stat[stat.rindex(b")") + 2 :].split()


if __name__ == "__main__":
    main()
