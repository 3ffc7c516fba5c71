"""Preemption: a signal asks the run to save and leave.

Python runs signal handlers in the main thread, between two of its instructions: not while that
waits in a compiled program or a compiler. So a thread gets the signals, by the file descriptor that
Python's handler in C writes to, and where the main thread does not come to the end of a step, it
saves and leaves itself.

Several processes agree on the step after the furthest: each tells where it is, none begins a step
meanwhile, and all save the same step. Where one stands still they agree again and again; once all
wait at one place with a whole state, their threads save that. A save runs programs of all devices,
and so cannot run beside an evaluation: that is split into pieces, and ends before the next one.
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
from maxstack.errors import TransientError
from maxstack.report.console import tell

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
INTERRUPTED = 130
"""The exit code after a second SIGINT."""
COMES = 2.0
"""Seconds that the main thread has to come to the end of a step by itself."""
POLL, LONGEST_POLL = 0.5, 5.0
"""Seconds between two polls for a signal to another process, at least and at most."""
POLLS_A_SECOND = 200
"""Polls of all processes together, which process 0 answers."""
_NOTICE = "leaving"


class Watched(Protocol):
    """The part of a heartbeat that leaving needs."""

    def done(self) -> None:
        """Report that the process is about to end."""

    def interrupted(self, code: int = 0, why: str = "") -> None:
        """Report that the user ends this process at once."""


watched: Watched | None = None
"""The heartbeat of this process, if any: it tells the watchdogs that the process means to leave."""


def _leave_early(number: int) -> None:
    """Leave before the first step: there is nothing to save, and a compilation or a restore is not
    worth waiting for."""
    tell(why := f"{signal.Signals(number).name}: leaving before the first step\n")
    if watched:
        watched.interrupted(RETRY, why.strip())
    os._exit(RETRY)


class CutShort(Exception):
    """An evaluation ends here, since a signal asked the run to leave."""


def raise_if_leaving() -> None:
    """Begin the next piece of a long evaluation; CutShort where the run is to leave. All processes
    call it alike."""
    if _current:
        _current.raise_if_leaving()


_current: "Preemption | None" = None
_hear: Callable[[int], None] = _leave_early
_listens = False


def listen() -> None:
    """Listen for signals from now on, in a process that is one run. SIGHUP that is ignored, as by
    nohup, stays so. Call it from the main thread."""
    global _listens
    _listens = True
    # With handlers in Python and a check between steps, a run that waited for data was still alive
    # 40 s after its signal; this way it leaves within 2.2 s.
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    # Where it is full of earlier signals, the thread has enough to read.
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    for number in ASKING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            # Any handler of Python's will do: only with one does its handler in C write to the
            # descriptor.
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

    The loop asks `requested` after each step; what takes long between two calls asks
    `raise_if_leaving`. Where the loop waits with a whole state at hand, for data, an evaluation, a
    compiler, it does so inside `waiting`; there a thread may call `leave` with the step. Where
    `listen` was not called, the thread does nothing. `grace` seconds after the signal the process
    ends in any case. Of several processes a signal to one is enough.
    """

    def __init__(
        self,
        grace: float,
        leave: Callable[[int], None],
        begin: int = 0,
    ) -> None:
        from maxstack.cluster.peers import Peers

        self._grace = grace
        self._leave = leave
        self._peers = Peers()
        self._poll = min(max(POLL, self._peers.count / POLLS_A_SECOND), LONGEST_POLL)
        self._turn = threading.Condition()
        self._asked = threading.Event()
        self._reached = (begin, 0)
        """The last step that was begun, and the number of pieces after it."""
        self._whole = False
        """The state after that step is whole and stays so."""
        self._last: tuple[int, int] | None = None
        """The step and piece after which all processes leave."""
        self._held = False
        """No step may begin while processes agree."""
        self._stays = False
        """No step may begin any more."""
        self._taken = False
        """The thread saves and leaves."""
        self._closed = False
        """The loop has ended."""
        self._leaves = False
        """`requested` has returned true."""
        self.finished = False
        """All steps are done: a signal after `close` changes nothing."""
        self.why = ""
        """The cause: a signal, or a failure."""
        global _hear, _current
        _hear, _current = self._ask, self
        self._before = {}
        # In a process that goes on after its run, such as a notebook, the main thread's handlers
        # are set for the time of the run; a thread that ends the process would be wrong there.
        if not _listens and threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, lambda number, frame: self._ask(number))
                for number in ASKING
            }
        targets = [self._follow]
        if self._peers.count > 1:
            targets.append(self._listen_to_peers)
        self._threads = [
            threading.Thread(target=target, name="leaving", daemon=True) for target in targets
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Restore the signals' former handlers."""
        global _hear, _current
        _current = None
        _hear = _nothing if self.finished else _leave_early
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self._asked.set()
        for thread in self._threads:  # one that is still in a call of jax would abort Python
            thread.join(3 * COMES)
        for number, before in self._before.items():
            signal.signal(number, before)

    def requested(self, step: int) -> bool:
        """Return whether to save after `step` and leave; the same in every process."""
        several = self._peers.count > 1
        if (leaves := self._reach((step, 0), several)) and several:
            tell(f"\nleaving after step {step}: a signal asked a process of the run to\n")
        return leaves

    def raise_if_leaving(self) -> None:
        """Begin the next piece of an evaluation; CutShort where to leave before it, the same in
        every process."""
        with self._turn:
            step, pieces = self._reached
        if self._reach((step, pieces + 1), self._whole):
            raise CutShort

    def _reach(self, at: tuple[int, int], whole: bool) -> bool:
        """Record where the main thread is, and that the state is `whole` meanwhile; return whether
        it is to leave here."""
        with self._turn:
            # While the main thread waits here the other one may save, if the state is whole.
            stays, self._whole = self._whole, whole
            self._reached = at
            self._turn.notify_all()
            self._wait_turn()
            self._whole, self._leaves = stays, self._asked.is_set()
            if self._peers.count > 1:
                # Of several processes the signal alone decides nothing: each would leave after
                # another step.
                self._leaves = self._last is not None and at >= self._last
            return self._leaves

    @contextlib.contextmanager
    def waiting(self, step: int, begins: bool = False, computes: bool = False) -> Iterator[None]:
        """A context whose block leaves the state after `step` as it is; `begins`: the next step
        begins after it; `computes`: it runs programs of all devices. A passing failure in it, such
        as a store that is away, ends the run as a signal does."""
        with self._turn:
            if self._reached[0] != step:
                self._reached = step, 0
            # A save of several processes has collectives, which met those of an evaluation: gloo
            # aborted both, 4 of 4 times.
            self._whole = not computes or self._peers.count == 1
            self._turn.notify_all()
        try:
            yield
        except TransientError as error:
            if not _listens or not self._whole:
                raise
            self.request(f"{error}")
            with self._turn:
                # For ever: the other thread saves and ends the process.
                self._turn.wait_for(lambda: False)
        finally:
            with self._turn:
                self._wait_turn()
                self._reached = max(self._reached, (step + begins, 0))
                self._whole = False

    def _wait_turn(self) -> None:
        """Wait until this thread may go on; for ever where the other one leaves."""
        self._turn.wait_for(lambda: not (self._held or self._stays or self._taken))

    def _ask(self, number: int) -> None:
        if self._asked.is_set() and number == signal.SIGINT:
            if not _listens:  # what lives on, such as a notebook, must not end
                raise KeyboardInterrupt
            tell("\nSIGINT again: leaving at once; what was not saved before is lost\n")
            if watched:
                watched.interrupted()
            os._exit(INTERRUPTED)
        if not self._asked.is_set():
            self.request(signal.Signals(number).name)

    def request(self, why: str) -> None:
        """Ask the run to save and leave after the step under way."""
        tell(f"\n{why}: leaving after this step\n")
        self.why = why
        if self._peers.count > 1:
            with contextlib.suppress(RuntimeError):  # another process posted before
                # Before the event is set: the others must hear of it even where this process ends
                # at once.
                self._peers.post(_NOTICE, 0, f"process {self._peers.number}: {why}")
        self._asked.set()

    def _listen_to_peers(self) -> None:
        """Wait for a signal to another process."""
        # A blocking call of the coordination client here makes Python abort at its end, so this
        # polls; jax's preemption service would wait for a step that a stalled process never begins.
        with contextlib.suppress(RuntimeError):  # a peer was lost; the watchdog ends this process
            while not self._asked.wait(self._poll):
                if why := self._peers.read_post(_NOTICE, 0):
                    self.why = self.why or why
                    self._asked.set()

    def _follow(self) -> None:
        """Wait for a signal, and see the process to its end."""
        self._asked.wait()
        if self._closed:
            return
        if _listens:
            # jax aborts the processes that process 0 leaves behind, so they leave first.
            sooner = COMES + self._poll if self._peers.number else 0.0
            late = threading.Timer(max(self._grace - sooner, 0.0), self._end, ["the signal"])
            late.daemon = True
            late.start()
        if self._peers.count == 1:
            if not self._wait_for_main() and _listens:
                self._take()
            return
        with contextlib.suppress(RuntimeError):  # a peer was lost; the watchdog ends this process
            # The place to leave at is agreed on once and never changes; what follows only asks
            # whether all got there.
            at = self._agree(first=True)
            while not all(leaves for _, leaves, _ in at):
                self._wait_for_main()
                at = self._agree()
                if self._stays:
                    self._take()

    def _wait_for_main(self) -> bool:
        """Wait a while for the main thread to leave by itself; return whether it did."""
        with self._turn:
            return self._turn.wait_for(lambda: self._leaves or self._closed, COMES)

    def _agree(self, first: bool = False) -> list[tuple[list[int], bool, bool]]:
        """Exchange where each process is, whether it has left the loop, and whether its state is
        whole. At `first` agree to leave after the furthest; later, where all wait at one place, to
        stay there."""
        with self._turn:
            # No step may begin between telling the place and hearing of the others': a process
            # would pass the step that all agree on.
            self._held = True
            own = self._reached, self._leaves or self._closed, self._whole
        at = self._peers.exchange("leaving at", own)
        with self._turn:
            if first:
                step, pieces = max(tuple(place) for place, *_ in at)
                # The furthest process may be within that piece already, so all leave at the next.
                self._last = step, pieces + 1
            one = [at[0][0], False, True]
            # All wait at one place with a whole state: only then can all threads save the same
            # step.
            self._stays = _listens and not first and all(each == one for each in at)
            self._held = False
            self._turn.notify_all()
        return at

    def _take(self) -> None:
        """Save and leave for the main thread, once it waits with a whole state."""
        with self._turn:
            self._turn.wait_for(lambda: self._whole or self._closed)
            self._taken = not self._closed
        if self._taken:
            try:
                self._leave(self._reached[0])
                self._peers.barrier("left")
                # jax aborts the processes that lose process 0.
                if self._peers.count > 1 and self._peers.number == 0:
                    time.sleep(POLL)
            except Exception as error:  # printed, since the process ends next
                tell(f"{type(error).__name__}: {error}\n")
            self._end()

    def _end(self, late: str = "") -> None:
        """End the process. An exception would wait for what the main thread is in."""
        if late:
            tell(
                f"\nstill here faults.grace={self._grace:g} s after {late}: leaving with what was "
                "saved before\n"
            )
        if watched:
            watched.done()
        os._exit(RETRY)


def _nothing(*_: object) -> None:
    """Do nothing: a handler, so that the system's default does not end the process."""
