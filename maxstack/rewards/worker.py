"""A worker: `python -m maxstack.rewards.worker SOCKET NAMESPACE`. It runs no code of the
user's, but forks a process that does (runner.py), and ends that, with all that descends from it,
where it takes too long, dies or leaves processes behind, and when the parent ends. Where NAMESPACE,
that of the parent's number, is another, it is in a sandbox, and bounds all that runs there."""

import contextlib
import os
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from maxstack.rewards import processes, runner
from maxstack.rewards.lines import Lines
from maxstack.rewards.processes import Process

LOAD_SECONDS = 300.0
"""For importing a function."""
KILL_SECONDS = 5.0
SILENCE = 30.0
"""Seconds without a sign of life after which a worker is taken to be stopped: what runs in a
sandbox can send SIGSTOP to it, and so to its clock."""
_TICK, _IDLE_TICK, _BEAT = 0.02, 0.1, 1.0
"""Seconds between looks at whether the parent and the runner live, in a call and between calls,
and between signs of life in a call."""
PROCESSES = 64
"""Processes in a sandbox, its own three among them."""
LOAD_MEMORY = 16.0
"""GiB of memory that importing a function may take in a sandbox."""


class Lost(Exception):
    """Why a runner gave no answer, in words that follow the name of what was called; `killed`: by a
    signal, which this module sends only where it knows another reason."""

    def __init__(self, reason: str, killed: bool = False):
        super().__init__(reason)
        self.killed = killed


class Worker:
    """Passes requests on to a runner, and its answers back."""

    def __init__(self, requests: Lines, parent: int, bounded: bool = False):
        self._requests, self._parent, self._bounded = requests, parent, bounded
        self._before = 0
        """Bytes of memory of the runner when a call began."""
        self._memory = LOAD_MEMORY
        """GiB of memory that what runs may add."""
        self._answers: Lines | None = None
        self._runner, self._status = 0, 0
        self._dead = True
        self._kept: dict[str, set[Process]] = {}
        """Processes that a session began, which stay until it is over."""

    def serve(self) -> NoReturn:
        """Answer requests until the parent ends."""
        with contextlib.suppress(EOFError):
            sys.path[:] = self._requests.receive(LOAD_SECONDS)["path"]
            self._requests.send({"ready": True})
            while not self._orphaned():
                try:
                    request = self._requests.receive(_IDLE_TICK)
                except TimeoutError:
                    self._reap()
                    with contextlib.suppress(Lost):
                        self._check_bounds()
                else:
                    self._requests.send(self._answer(request) | {"id": request["id"]})
        self.end()

    def end(self) -> NoReturn:
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
        while (found := self._left_over()) and time.monotonic() < deadline:
            processes.kill(found)
            self._reap()
        if answer.pop("grown", False):
            self._end_runner()
        return answer

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The runner's answer. It gets the request's `timeout` from each time that it begins a
        call, and before that time to import it."""
        timeout, begun = request.get("timeout", LOAD_SECONDS), 0
        calls = len(request.get("texts", ())) + 1
        self._memory = LOAD_MEMORY
        answers, deadline = self._started(), time.monotonic() + LOAD_SECONDS
        beat = time.monotonic()
        try:
            answers.send(request, SILENCE / 2)
            while True:
                dead = self._reap()
                try:
                    message = answers.receive(min(_TICK, deadline - time.monotonic()))
                except TimeoutError:
                    if dead:
                        raise self._death() from None
                    if self._orphaned():
                        self.end()
                    self._check_bounds()
                    if time.monotonic() >= deadline:
                        took = f"took longer than timeout={timeout:g} s"
                        long = f"was not imported within {LOAD_SECONDS:g} s"
                        raise Lost(took if begun else long) from None
                    if time.monotonic() >= beat + _BEAT:
                        self._requests.send({"id": request["id"], "busy": True})
                        beat = time.monotonic()
                    continue
                if not isinstance(message, dict) or message.get("id") != request["id"]:
                    raise ValueError(message)
                if not message.get("begin"):
                    return _checked(message, request["do"])
                if begun == calls:  # what was called has written that
                    raise ValueError(message)
                if self._bounded and not begun:
                    self._before = processes.private_memory().get(self._runner, 0)
                    self._memory = request["memory"]
                begun, deadline = begun + 1, time.monotonic() + timeout
        except EOFError:
            raise self._death() from None
        except TimeoutError:
            raise Lost(f"did not take a request within {SILENCE / 2:g} s") from None
        except (KeyError, TypeError, ValueError, RecursionError):
            raise Lost("answered with too much, or wrote to the socket of its worker") from None

    def _started(self) -> Lines:
        """The socket to the runner, which is forked if there is none."""
        if self._answers and not (self._reap() or self._answers.waiting()):
            return self._answers
        self._end_runner()
        ours, theirs = socket.socketpair()
        worker = os.getpid()
        self._runner = os.fork()
        if not self._runner:
            try:
                ours.close()
                self._requests.close()
                runner.main(Lines(theirs), worker)
            finally:
                os._exit(1)
        theirs.close()
        self._dead, self._answers = False, Lines(ours)
        return self._answers

    def _end_runner(self) -> None:
        """Kill the runner and all that descends from it."""
        if self._answers:
            self._answers.close()
            self._answers = None
        if self._bounded:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all of the sandbox at once: forks outrun a list
        elif not self._reap():
            os.kill(self._runner, signal.SIGKILL)
        processes.kill_all(KILL_SECONDS)
        self._dead = True
        self._kept.clear()

    def _check_bounds(self) -> None:
        """Lost where there are too many processes in the sandbox, or they have too much memory. A
        fork has what its parent had, which is counted once for each."""
        if not self._bounded:
            return
        memory = processes.private_memory()
        spent = sum(memory.values()) - len(memory) * self._before
        if len(memory) <= PROCESSES and spent <= self._memory * 2**30:
            return
        self._end_runner()
        raise Lost(
            f"had more than {PROCESSES} processes, or took more than memory={self._memory:g} GiB "
            "with all of them"
        )

    def _left_over(self) -> list[Process]:
        """Descendants that no session keeps, apart from the runner."""
        spared = {process for kept in self._kept.values() for process in kept}
        return [found for found in processes.descendants(spared) if found.pid != self._runner]

    def _reap(self) -> bool:
        """Take note of children that ended -> whether the runner has."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._runner:
                    self._dead, self._status = True, ended[1]
        return self._dead

    def _death(self) -> Lost:
        """How the runner ended, for which it gets a second."""
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

    def _orphaned(self) -> bool:
        return self._requests.hung_up() or os.getppid() != self._parent


def _checked(message: dict[str, Any], action: str) -> dict[str, Any]:
    """An answer by the rules that the runner has for what it calls, which may have written the
    answer itself. KeyError, TypeError or ValueError where it breaks them."""
    names = ("failure", "messages", "value", "components", "over", "grown")
    answer = {name: message[name] for name in names if name in message}
    if "failure" in answer:
        return answer | {"failure": str(answer["failure"])}
    if action == "turn":
        runner.observed(answer["messages"])
    if action == "reward" or "value" in answer:
        answer |= runner.rewarded({**answer["components"]} or answer["value"])
    return answer


def main() -> NoReturn:
    """Serve the parent. A signal to end is left to it, because it may still want answers."""
    processes.adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs started here inherit
    end, outside = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    assert outside.startswith("pid:[") or not outside, "the name of a namespace"
    bounded = processes.namespace() != outside
    if bounded:
        processes.seal()
    Worker(Lines(end), os.getppid(), bounded).serve()


if __name__ == "__main__":
    main()
