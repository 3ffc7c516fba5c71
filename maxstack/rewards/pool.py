"""Rewards of completions, and turns of environments, computed in worker processes that cannot harm
the run."""

import contextlib
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from maxstack.errors import ConfigError, shortened
from maxstack.rewards.built_in import exact, soft_overlong
from maxstack.rewards.child import Child, Closed
from maxstack.schema.rewards import ExactReward, LengthReward, RewardPart, TextReward, WorkerReward

_LONGEST = 600
"""Characters of a message."""
Job = tuple[Future[Any], Callable[[Child], Any]]


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
    """Names the row in messages."""

    def read_by(self, part: TextReward) -> str:
        """The completion as a reward asks for it."""
        return self.spelt if part.special_tokens else self.completion


class Outcome(NamedTuple):
    """What a reward gave, without its weight."""

    value: float
    components: Mapping[str, float]
    failure: str | None
    """A sentence with the reward, the row and the reason; the value is then 0."""


class Turn(NamedTuple):
    """A request to an environment: the answer to the last text, or to a reset if there is none."""

    call: str
    """module:class, with reset(row, seed) -> observation and step(text, tool_calls) ->
    (observation, reward, done)."""
    session: str
    """Names this environment among all."""
    row: Mapping[str, Any]
    seed: int
    texts: tuple[str, ...]
    """All completions so far."""
    timeout: float
    """Seconds of each call of reset or step."""
    memory: float
    """GiB of address space that a call may add."""
    where: str
    """Names the row in messages."""
    tools: tuple[Any, ...]
    """The tool calls of each text, as JSON has them."""


class Observation(NamedTuple):
    """What an environment answers."""

    messages: Any
    """Text, a list of chat messages, or None: no more than there is, or of a reset the row's own
    prompt."""
    reward: float
    done: bool
    components: Mapping[str, float]
    failure: str | None
    """A sentence with the environment, the row and the reason; the session is then done."""


class Pool:
    """Threads that each own a worker process. Nothing is started before the first request."""

    def __init__(self, rewards: Sequence[RewardPart], workers: int, sandbox: Sequence[str] = ()):
        """`sandbox`: the words before a command that run it in one (sandbox.prefix)."""
        assert workers > 0
        self._rewards = [*rewards]
        self._children = [Child(sandbox) for _ in range(workers)]
        self._shared: deque[Job] = deque()
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
            answer = self._put(partial(Child.ask, request=request, seconds=0)).result()
            if "failure" in answer:
                raise ConfigError(f"{where}: {shortened(answer['failure'], _LONGEST)}")

    def submit(self, case: Case) -> Future[list[Outcome | None]]:
        """What each reward gives for a completion, in order; None for those of kind model, which
        are computed elsewhere."""
        if any(isinstance(part, WorkerReward) for part in self._rewards):
            return self._put(lambda child: [_outcome(child, part, case) for part in self._rewards])
        done: Future[list[Outcome | None]] = Future()
        done.set_result([_at_once(part, case) for part in self._rewards])
        return done

    def turn(self, turn: Turn) -> Future[Observation]:
        """The answer of an environment, which lives in one worker from turn to turn."""
        return self._put(lambda child: _observation(child, turn), turn.session)

    def forget(self, session: str) -> None:
        """Give up a session that is not done."""
        request = {"do": "forget", "session": session}
        with contextlib.suppress(Closed):
            self._put(lambda child: child.alive and child.ask(request, 0), session)

    def news(self) -> list[str]:
        """A line about processes that a signal killed since the last call, if there were any."""
        killed = [child.killed.popleft() for child in self._children for _ in [*child.killed]]
        if not killed:
            return []
        return [
            "rewards: requests that were made once more, because a process of their worker was "
            f"killed: {len(killed)}; the last of these {killed[-1]}"
        ]

    def close(self) -> None:
        """Kill the workers and all that descends from them. Requests under way end with
        RuntimeError, those that wait are cancelled."""
        with self._change:
            self._closed = True
            waiting = [job for jobs in (self._shared, *self._pinned) for job in jobs]
            for jobs in (self._shared, *self._pinned):
                jobs.clear()
            self._change.notify_all()
        for future, _ in waiting:
            future.cancel()
        for child in self._children:
            child.hang_up()
        for thread in self._threads:
            thread.join()
        for child in self._children:
            child.close()

    def _put(self, work: Callable[[Child], Any], session: str | None = None) -> Future[Any]:
        """Have work done by any worker, or by the one of a session."""
        future: Future[Any] = Future()
        number = None if session is None else zlib.crc32(session.encode()) % len(self._pinned)
        with self._change:
            if self._closed:
                raise Closed
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

    def _work(self, child: Child, pinned: deque[Job]) -> None:
        """Main function of a thread."""
        while True:
            with self._change:
                while not (self._closed or pinned or self._shared):
                    self._change.wait()
                if self._closed:
                    return
                future, work = (pinned or self._shared).popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work(child))
            except BaseException as error:
                future.set_exception(error)


def _at_once(part: RewardPart, case: Case) -> Outcome | None:
    """The outcome of a reward that needs no limits; None of one that is computed elsewhere."""
    if isinstance(part, LengthReward):
        return Outcome(soft_overlong(case.tokens, part.most, part.buffer), {}, None)
    if not isinstance(part, ExactReward):
        return None
    try:
        equal = exact(case.prompt, case.read_by(part), case.row, field=part.field)
    except KeyError as error:
        return Outcome(0.0, {}, _sentence(f"reward {part.label}", case.where, error.args[0]))
    return Outcome(equal, {}, None)


def _outcome(child: Child, part: RewardPart, case: Case) -> Outcome | None:
    if not isinstance(part, WorkerReward):
        return _at_once(part, case)
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
    answer = _asked(child, request, part.timeout)
    if "failure" in answer:
        return Outcome(0.0, {}, _sentence(f"reward {part.label}", case.where, answer["failure"]))
    return Outcome(answer["value"], answer["components"], None)


def _observation(child: Child, turn: Turn) -> Observation:
    assert len(turn.texts) == len(turn.tools)
    request = turn._asdict() | {"do": "turn", "row": dict(turn.row)}
    answer = _asked(child, request, turn.timeout * (len(turn.texts) + 1))
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


def _asked(child: Child, request: dict[str, Any], seconds: float) -> dict[str, Any]:
    try:
        return child.ask(request, seconds)
    except TypeError as error:
        return {"failure": f"the row is not of JSON's types: {error}"}


def _sentence(who: str, where: str, reason: str) -> str:
    return shortened(f"{who}, {where}: {reason}", _LONGEST)
