"""Preemption: a signal asks the run to save and leave.

Python runs signal handlers in the main thread, between two instructions of its own: not while that
waits in a program of jax's or for a compiler. So a thread hears of signals, by the file descriptor
that Python's handler in C writes to, and where the main thread stays away it saves and leaves
itself.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from maxstack.cluster.exit_codes import RETRY
from maxstack.errors import Passing
from maxstack.report.console import tell

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
INTERRUPTED = 130
"""The exit code after a second SIGINT."""
COMES = 2.0
"""Seconds that the main thread has to come to the end of a step by itself."""
LOOKS, LONGEST, A_SECOND = 0.5, 5.0, 200
"""Seconds between two looks for a signal to another process, at least and at most, and looks a
second of all processes together, which process 0 answers."""
_NOTICE = "leaving"


class Watched(Protocol):
    """The part of a heartbeat that leaving takes."""

    def done(self) -> None:
        """Report that the process has only to end."""

    def interrupted(self, code: int = 0, why: str = "") -> None:
        """Report that the user ends this process at once."""


watched: Watched | None = None
"""The heartbeat of this process, where it has one: it tells the watchdogs that leaving is meant."""


def _leave_early(number: int) -> None:
    """Before the loop there is nothing to save, and neither a compilation nor a restore under way
    is worth waiting for."""
    tell(why := f"{signal.Signals(number).name}: leaving before the first step\n")
    if watched:
        watched.interrupted(RETRY, why.strip())
    os._exit(RETRY)


class CutShort(Exception):
    """What is under way ends here, since a signal asked the run to leave."""


def piece() -> None:
    """A piece of a long evaluation begins: CutShort where the run in this process is to leave."""
    if _current:
        _current.piece()


_current: "Preemption | None" = None
_hear: Callable[[int], None] = _leave_early
_listens = False


def listen() -> None:
    """Hear of signals from now on, in a process that is one run. SIGHUP that is ignored, as by
    nohup, stays so. Call it from the main thread."""
    global _listens
    _listens = True
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    for number in ASKING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _nothing)

    def hear() -> None:
        with theirs:  # kept open
            while heard := ours.recv(64):
                for number in heard:
                    if number in ASKING:
                        _hear(number)

    threading.Thread(target=hear, name="signals", daemon=True).start()


class Preemption:
    """SIGTERM, SIGINT or SIGHUP asks the run to save and leave; a SIGINT after that leaves at once.

    The loop asks `requested` after each step, and what takes long between two calls `piece`. Where
    it is about to wait with a whole state at hand, for data, an evaluation, a compiler, it says so
    by `waiting`, and there `leave` is called for it from a thread of this, with the step. In a
    process that `listen` was not called in, the thread does nothing. `grace` seconds after the
    signal the process ends in any case.

    With several processes one signalled process is enough: they agree on the step or piece after
    the furthest, or, where one of them does not get there, on where all are. What runs a program
    of all devices meanwhile is not saved beside, since a save does too: it ends by pieces.
    """

    def __init__(
        self,
        grace: float,
        leave: Callable[[int], None],
        begin: int = 0,
    ) -> None:
        from maxstack.cluster.peers import Peers

        self._grace, self._leave = grace, leave
        self._peers = Peers()
        self._looks = min(max(LOOKS, self._peers.count / A_SECOND), LONGEST)
        self._turn = threading.Condition()
        self._asked = threading.Event()
        self._reached, self._whole = (begin, 0), False
        """The last step that was begun, and how many pieces after it; whether the state after it is
        whole and stays so."""
        self._last: tuple[int, int] | None = None
        """The step and piece that all processes leave after."""
        self._held = self._stays = self._taken = self._closed = False
        """Whether no step may begin while processes agree, none at all any more, whether the thread
        saves and leaves, and whether the loop has ended."""
        self._leaves = False
        """Whether `requested` said so."""
        self.finished = False
        """All steps are done: a signal after `close` changes nothing."""
        self.why = ""
        """What asked: a signal, or a failure."""
        global _hear, _current
        _hear, _current = self._ask, self
        self._before = {}
        if not _listens:
            self._before = {
                number: signal.signal(number, lambda number, frame: self._ask(number))
                for number in ASKING
            }
        self._threads = [
            threading.Thread(target=target, name="leaving", daemon=True)
            for target in (self._follow, self._listen_to_peers)[: min(self._peers.count, 2)]
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Let signals do what they did before."""
        global _hear, _current
        _hear, _current = _nothing if self.finished else _leave_early, None
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self._asked.set()
        for thread in self._threads:  # one that was still in a call of jax's would abort Python
            thread.join(3 * COMES)
        for number, before in self._before.items():
            signal.signal(number, before)

    def requested(self, step: int) -> bool:
        """True where to save after `step` and leave; the same in every process."""
        if (leaves := self._reaches((step, 0), self._peers.count > 1)) and self._peers.count > 1:
            tell(f"\nleaving after step {step}: a signal asked a process of the run to\n")
        return leaves

    def piece(self) -> None:
        """CutShort where to leave before the next piece of what is under way; the same in every
        process."""
        with self._turn:
            step, pieces = self._reached
        if self._reaches((step, pieces + 1), self._whole):
            raise CutShort

    def _reaches(self, at: tuple[int, int], whole: bool) -> bool:
        """Note where the main thread is, and that the state is `whole` meanwhile -> whether it is
        to leave here."""
        with self._turn:
            stays, self._whole = self._whole, whole
            self._reached = at
            self._turn.notify_all()
            self._pass()
            self._whole, self._leaves = stays, self._asked.is_set()
            if self._peers.count > 1:
                self._leaves = self._last is not None and at >= self._last
            return self._leaves

    @contextlib.contextmanager
    def waiting(self, step: int, begins: bool = False, computes: bool = False) -> Iterator[None]:
        """A block that leaves the state after `step` as it is; `begins`: the next step begins
        after it; `computes`: it runs programs of all devices. A failure in it that may pass ends
        the run as a signal does."""
        with self._turn:
            if self._reached[0] != step:
                self._reached = step, 0
            self._whole = not computes or self._peers.count == 1
            self._turn.notify_all()
        try:
            yield
        except Passing as error:
            if not _listens or not self._whole:
                raise
            self._request(f"{error}")
            with self._turn:
                self._turn.wait_for(lambda: False)
        finally:
            with self._turn:
                self._pass()
                self._reached = max(self._reached, (step + begins, 0))
                self._whole = False

    def _pass(self) -> None:
        """Wait until this thread may go on: for ever where the other one leaves."""
        self._turn.wait_for(lambda: not (self._held or self._stays or self._taken))

    def _ask(self, number: int) -> None:
        if self._asked.is_set() and number == signal.SIGINT:
            tell("\nSIGINT again: leaving at once; what was not saved before is lost\n")
            if watched:
                watched.interrupted()
            os._exit(INTERRUPTED)
        if not self._asked.is_set():
            self._request(signal.Signals(number).name)

    def _request(self, why: str) -> None:
        tell(f"\n{why}: leaving after this step\n")
        self.why = why
        if self._peers.count > 1:
            with contextlib.suppress(RuntimeError):  # another one did
                self._peers.post(_NOTICE, 0, f"process {self._peers.number}: {why}")
        self._asked.set()

    def _listen_to_peers(self) -> None:
        """Hear of a signal to another process."""
        with contextlib.suppress(RuntimeError):  # a peer was lost, and the watchdog ends this one
            while not self._asked.wait(self._looks):
                if why := self._peers.posted(_NOTICE, 0):
                    self.why = self.why or why
                    self._asked.set()

    def _follow(self) -> None:
        """From a signal to the end."""
        self._asked.wait()
        if self._closed:
            return
        if _listens:
            # jax aborts whoever process 0 leaves behind
            sooner = (COMES + self._looks) * (self._peers.number > 0)
            late = threading.Timer(max(self._grace - sooner, 0.0), self._end, ["the signal"])
            late.daemon = True
            late.start()
        if self._peers.count == 1:
            if not self._comes() and _listens:
                self._take()
            return
        with contextlib.suppress(RuntimeError):  # a peer was lost, and the watchdog ends this one
            at = self._agree(first=True)
            while not all(leaves for _, leaves, _ in at):
                self._comes()
                at = self._agree()
                if self._stays:
                    self._take()

    def _comes(self) -> bool:
        """Wait a while for the main thread to leave by itself."""
        with self._turn:
            return self._turn.wait_for(lambda: self._leaves or self._closed, COMES)

    def _agree(self, first: bool = False) -> list[tuple[list[int], bool, bool]]:
        """Tell one another where each is, whether it has left the loop, and whether its state is
        whole. At `first` agree to leave at whatever comes after the furthest; later, where all wait
        at one place, to stay there."""
        with self._turn:
            self._held = True
            own = self._reached, self._leaves or self._closed, self._whole
        at = self._peers.exchange("leaving at", own)
        with self._turn:
            if first:
                step, pieces = max(tuple(place) for place, *_ in at)
                self._last = step, pieces + 1
            one = [at[0][0], False, True]
            self._stays = _listens and not first and all(each == one for each in at)
            self._held = False
            self._turn.notify_all()
        return at

    def _take(self) -> None:
        """Where the main thread waits, or once it does, save and leave for it."""
        with self._turn:
            self._turn.wait_for(lambda: self._whole or self._closed)
            self._taken = not self._closed
        if self._taken:
            try:
                self._leave(self._reached[0])
                self._peers.barrier("left")
                time.sleep(LOOKS * (self._peers.count > 1 and self._peers.number == 0))
            except Exception as error:  # told, since nothing follows
                tell(f"{type(error).__name__}: {error}\n")
            self._end()

    def _end(self, late: str = "") -> None:
        """End the process. Without an exception, which would wait for what the main thread is
        in."""
        if late:
            tell(
                f"\nstill here faults.grace={self._grace:g} s after {late}: leaving with what was "
                "saved before\n"
            )
        if watched:
            watched.done()
        os._exit(RETRY)


def _nothing(*_: object) -> None:
    """A handler, so that the system's default does not end the process."""
