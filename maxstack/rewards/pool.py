"""Rewards of completions, and turns of environments, computed in worker processes that cannot harm
the run.

A `Pool` has threads that each own one worker. Three processes form a chain, so that a limit can be
enforced from outside of the code that it limits:

    this one    (`_Child`) starts a worker, gives it up after 30 s of silence, starts it again
    worker.py   runs no user code: keeps the clock, counts memory and processes, kills
    runner.py   a fork of the worker, which imports and calls the user's function

With a sandbox, worker and runner are in it. A request goes down the chain as JSON and the answer
comes back up. Where a signal that is not ours ends a process (the kernel's, when memory runs out),
the request is made once more on a new worker; an exit code, exception or timeout is the reward's
own. pebble's ProcessPool enforces time limits too, but it unpickles what the worker sends, which
would run code of the sandbox in the trainer, and it neither finds the processes that a call leaves
behind nor keeps an environment in one worker from turn to turn."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from maxstack.errors import ConfigError, shortened
from maxstack.rewards import sandbox
from maxstack.rewards.built_in import exact, soft_overlong
from maxstack.rewards.channel import Channel
from maxstack.rewards.worker import KILL_SECONDS, LOAD_SECONDS, SILENCE, pid_namespace
from maxstack.schema.rewards import ExactReward, LengthReward, RewardPart, TextReward, WorkerReward

_LONGEST = 600
"""Characters of a message."""
_START_SECONDS = 120.0
_GRACE_SECONDS = 30.0
"""Seconds beyond all limits of the worker after which it is given up."""
Job = tuple[Future[Any], Callable[["_Child"], Any]]


class Closed(RuntimeError):
    """The pool is closed."""

    def __init__(self) -> None:
        super().__init__("the pool of rewards is closed")


class Case(NamedTuple):
    """A completion to be rewarded."""

    prompt: str
    completion: str
    spelt: str
    """The completion with its special tokens spelled out, where a reward asks for it."""
    row: Mapping[str, Any]
    """The row of data that the prompt is from."""
    tokens: int
    """Tokens of the completion."""
    truncated: bool
    where: str
    """The row's name for messages."""

    def read_by(self, part: TextReward) -> str:
        """Return the completion as a reward asks for it."""
        return self.spelt if part.special_tokens else self.completion


class Outcome(NamedTuple):
    """The result of a reward, without its weight."""

    value: float
    components: Mapping[str, float]
    failure: str | None
    """A sentence that names reward, row and reason; the value is then 0."""


class Turn(NamedTuple):
    """A request to an environment: the answer to the last text, or to a reset if there is none."""

    call: str
    """module:class, with reset(row, seed) -> observation and step(text, tool_calls) ->
    (observation, reward, done)."""
    session: str
    """A unique name of this environment."""
    row: Mapping[str, Any]
    seed: int
    texts: tuple[str, ...]
    """All completions so far."""
    timeout: float
    """Seconds of each call of reset or step."""
    memory: float
    """GiB of address space that a call may add."""
    where: str
    """The row's name for messages."""
    tools: tuple[Any, ...]
    """The tool calls of each text, as JSON has them."""


class Observation(NamedTuple):
    """The answer of an environment."""

    messages: Any
    """Text, a list of chat messages, or None: nothing new, or after a reset the row's own
    prompt."""
    reward: float
    done: bool
    components: Mapping[str, float]
    failure: str | None
    """A sentence that names environment, row and reason; the session is then done."""


class Pool:
    """Threads that each own a worker process. Nothing is started before the first request."""

    def __init__(self, rewards: Sequence[RewardPart], workers: int, prefix: Sequence[str] = ()):
        """`prefix`: a command prefix that runs a command in a sandbox (sandbox.prefix)."""
        assert workers > 0
        self._rewards = [*rewards]
        self._children = [_Child(prefix) for _ in range(workers)]
        self._shared: deque[Job] = deque()
        # An environment's turns go to the worker that has it; all else to whichever is free.
        self._pinned: list[deque[Job]] = [deque() for _ in range(workers)]
        self._change = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def check(self, environment: str | None = None) -> None:
        """Import the functions of the rewards and the class of an environment in a worker.
        ConfigError for one that cannot be."""
        calls: dict[str, dict[str, Any]] = {
            f"rewards.{index}": {
                "do": "load",
                "call": part.function,
                "settings": part.settings,
            }
            for index, part in enumerate(self._rewards)
            if isinstance(part, WorkerReward)
        }
        if environment:
            methods = ["reset", "step"]
            calls["rollout.environment"] = {"do": "load", "call": environment, "methods": methods}
        for where, request in calls.items():
            # Imported in a worker, not here: an import runs code of the user.
            answer = self._put(partial(_Child.ask, request=request, seconds=0)).result()
            if "failure" in answer:
                raise ConfigError(f"{where}: {shortened(answer['failure'], _LONGEST)}")

    def submit(self, case: Case) -> Future[list[Outcome | None]]:
        """Compute the outcome of each reward, in order; None for kind model, computed elsewhere."""
        if any(isinstance(part, WorkerReward) for part in self._rewards):
            return self._put(lambda child: [_compute(child, part, case) for part in self._rewards])
        done: Future[list[Outcome | None]] = Future()
        # In a worker, 512 calls of kind exact took 0.23 s at the end of a rollout; here 1 ms.
        done.set_result([_compute_here(part, case) for part in self._rewards])
        return done

    def turn(self, turn: Turn) -> Future[Observation]:
        """Ask an environment, which lives in one worker from turn to turn."""
        return self._put(lambda child: _observe(child, turn), turn.session)

    def forget(self, session: str) -> None:
        """Give up a session that is not done."""
        request = {"do": "forget", "session": session}
        with contextlib.suppress(Closed):
            # A worker that died took the session with it: none is started to forget it.
            self._put(lambda child: child.alive and child.ask(request, 0), session)

    def news(self) -> list[str]:
        """Return a line about processes that a signal killed since the last call, if any were."""
        killed: list[str] = []
        for child in self._children:
            while child.killed:
                killed.append(child.killed.popleft())
        if not killed:
            return []
        return [
            "rewards: requests repeated because a process of their worker was killed: "
            f"{len(killed)}; the last of these {killed[-1]}"
        ]

    def close(self) -> None:
        """Kill the workers and all that descends from them. Requests under way end with
        RuntimeError, those that wait are cancelled."""
        with self._change:
            self._closed = True
            for jobs in (self._shared, *self._pinned):
                for future, _ in jobs:
                    future.cancel()
            self._change.notify_all()
        for child in self._children:
            # All are told before any thread is waited for.
            child.hang_up()
        for thread in self._threads:
            thread.join()
        for child in self._children:
            child.close()

    def _put(self, work: Callable[["_Child"], Any], session: str | None = None) -> Future[Any]:
        """Queue work for any worker, or for the one that has a session."""
        future: Future[Any] = Future()
        number = None if session is None else zlib.crc32(session.encode()) % len(self._pinned)
        with self._change:
            if self._closed:
                raise Closed
            # Begun with the first request, so runs without such rewards start no processes.
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._work, args=pair, daemon=True, name="rewards")
                    for pair in zip(self._children, self._pinned, strict=True)
                ]
                for thread in self._threads:
                    thread.start()
            (self._shared if number is None else self._pinned[number]).append((future, work))
            self._change.notify_all()
        return future

    def _work(self, child: "_Child", pinned: deque[Job]) -> None:
        """Run in a thread: do the jobs of one worker."""
        while True:
            with self._change:
                while not (self._closed or pinned or self._shared):
                    self._change.wait()
                if self._closed:
                    return
                # Its own first: nobody else can do them.
                future, work = (pinned or self._shared).popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work(child))
            except BaseException as error:
                future.set_exception(error)


def _compute_here(part: RewardPart, case: Case) -> Outcome | None:
    """Compute a reward that needs no limits; None for one that is computed elsewhere."""
    if isinstance(part, LengthReward):
        return Outcome(soft_overlong(case.tokens, part.most, part.buffer), {}, None)
    if not isinstance(part, ExactReward):
        return None
    try:
        equal = exact(case.prompt, case.read_by(part), case.row, field=part.field)
    except KeyError as error:
        return Outcome(0.0, {}, _sentence(f"reward {part.label}", case.where, error.args[0]))
    return Outcome(equal, {}, None)


def _compute(child: "_Child", part: RewardPart, case: Case) -> Outcome | None:
    if not isinstance(part, WorkerReward):
        return _compute_here(part, case)
    request = {
        "do": "reward",
        "call": part.function,
        "settings": part.settings,
        "prompt": case.prompt,
        "completion": case.read_by(part),
        "row": dict(case.row),
        "timeout": part.timeout,
        "memory": part.memory,
    }
    answer = _ask(child, request, part.timeout)
    if "failure" in answer:
        return Outcome(0.0, {}, _sentence(f"reward {part.label}", case.where, answer["failure"]))
    return Outcome(answer["value"], answer["components"], None)


def _observe(child: "_Child", turn: Turn) -> Observation:
    assert len(turn.texts) == len(turn.tools)
    # All texts so far: a worker that has lost the environment replays them.
    request = turn._asdict() | {"do": "turn", "row": dict(turn.row)}
    # Time for the replay of all turns, should the worker be new.
    answer = _ask(child, request, turn.timeout * (len(turn.texts) + 1))
    if "failure" in answer:
        who = f"environment {turn.call}, turn {len(turn.texts)}"
        return Observation(None, 0.0, True, {}, _sentence(who, turn.where, answer["failure"]))
    return Observation(
        answer["messages"],
        answer.get("value", 0.0),
        answer.get("over", False),
        answer.get("components", {}),
        None,
    )


def _ask(child: "_Child", request: dict[str, Any], seconds: float) -> dict[str, Any]:
    try:
        return child.ask(request, seconds)
    except TypeError as error:
        return {"failure": f"the row holds a value that JSON cannot: {error}"}


def _sentence(who: str, where: str, reason: str) -> str:
    return shortened(f"{who}, {where}: {reason}", _LONGEST)


class _Child:
    """A worker process, started at the first request and again after it died."""

    def __init__(self, prefix: Sequence[str]) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._closed = False
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.killed: deque[str] = deque()
        """Descriptions of processes that a signal killed and whose request was repeated."""

    @property
    def alive(self) -> bool:
        """True between the first request and its death."""
        return self._channel is not None

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a request whose calls may take so many seconds, or {"failure":
        reason}. Call it from one thread. RuntimeError if no worker can be started, Closed if the
        pool is.

        A process that a signal ended need not have caused that itself, so its request is repeated
        once on a new worker.
        """
        # It died between requests, so this request did not cause it and is not counted as repeated.
        if self._process and self._channel and self._process.poll() is not None:
            self._end()
        answer = self._try(request, seconds)
        if not answer.pop("killed", False):
            return answer
        self.killed.append(answer["failure"])
        if self._channel:
            self._end()
        again = self._try(request, seconds)
        if again.pop("killed", False):
            again["failure"] += ", and once more on a new worker"
        return again

    def _try(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Ask once; `killed` is true in a failure by a signal that nobody here sent."""
        channel = self._start()
        # An answer bears the request's random name: a call could write one of its own beside it.
        name = secrets.token_hex(16)
        # The worker keeps the limits; this one only has to find out that it no longer does.
        deadline = time.monotonic() + LOAD_SECONDS + seconds + KILL_SECONDS + _GRACE_SECONDS
        try:
            channel.send({**request, "id": name}, SILENCE)
            while time.monotonic() < deadline:
                answer = channel.receive(SILENCE)
                if answer.pop("id", "") != name:
                    raise ValueError("an answer to another request")
                if not answer.pop("busy", False):
                    return answer
            raise TimeoutError
        except (EOFError, TimeoutError, ValueError) as error:
            if self._closed:
                raise Closed from None
            code = self._end()
            return {
                "failure": f"its worker did not answer ({type(error).__name__}, exit code {code})",
                "killed": isinstance(error, EOFError) and code < 0,
            }

    def hang_up(self) -> None:
        """Ask the worker to end, from any thread."""
        with self._lock:
            self._closed = True
            if self._channel:
                self._channel.hang_up()

    def close(self) -> None:
        """Wait until the worker has ended after `hang_up`."""
        if self._channel:
            self._end()

    def _start(self, again: bool = True) -> Channel:
        """Return the channel to the worker, and start one if there is none; `again`: start a second
        one where a signal kills the first before it is ready."""
        with self._lock:
            if self._closed:
                raise Closed
            if self._channel:
                return self._channel
            ours, theirs = socket.socketpair()
            own = sandbox.environment() if self._prefix else os.environ
            command = [*self._prefix, sys.executable, "-m", "maxstack.rewards.worker"]
            with theirs:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), pid_namespace()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # What a sandbox inherits can be opened in it, as /proc/PID/fd/2.
                    stderr=subprocess.DEVNULL if self._prefix else None,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    # Sets of strings then have one order in all workers; and a reward that imports
                    # jax must not take the devices of the run.
                    env={"PYTHONHASHSEED": "0", **own, "JAX_PLATFORMS": "cpu"},
                )
            channel = self._channel = Channel(ours)
        try:
            channel.send({"path": [os.getcwd(), *sys.path]}, _START_SECONDS)
            channel.receive(_START_SECONDS)
        except (EOFError, TimeoutError, ValueError) as error:
            if self._closed:
                raise Closed from None
            code = self._end()
            if again and isinstance(error, EOFError) and code < 0:
                return self._start(again=False)
            raise RuntimeError(f"a worker for rewards did not start (exit code {code})") from error
        return channel

    def _end(self) -> int:
        """End the worker, which kills its descendants; return its exit code."""
        with self._lock:
            assert self._channel and self._process
            self._channel.hang_up()
            try:
                # It kills its descendants first, which it alone can find.
                code = self._process.wait(2 * KILL_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                code = self._process.wait()
            self._channel.close()
            self._channel = None
            # bubblewrap exits with 128 plus the signal that ended its command.
            return 128 - code if self._prefix and code > 128 else code
