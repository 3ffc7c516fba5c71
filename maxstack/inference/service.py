"""The engine in a thread of its own, for callers on an event loop.

The engine is not safe to call from several threads, so the event loop only queues commands (add,
abort), which the engine's thread runs between steps, in their order. After each step the thread
hands all progress to the event loop in one call, which puts it into the queues of the `Answers`.
What is open is counted on the event loop alone, and what runs in the engine's thread alone, so no
lock guards either; a request that ended on one side may get one more event from the other, which is
dropped. An engine that fails ends every request and takes no more.
"""

import asyncio
import collections
import dataclasses
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from maxstack.errors import ConfigError
from maxstack.inference.engine import Engine
from maxstack.inference.request import Output, Sampling
from maxstack.inference.server.metrics import Metrics

log = logging.getLogger(__name__)
STOP_SECONDS = 30
"""How long to wait for the engine's last step."""
AT_ONCE = 64
"""Events of one client's requests that are read before others' callbacks run."""


class Full(Exception):
    """The limit of waiting requests is reached."""


class Closed(Exception):
    """The service is shutting down."""


class Failed(Exception):
    """The engine failed for good."""


class EngineRequest(NamedTuple):
    """Arguments of `Engine.add`."""

    prompt: Sequence[int]
    sampling: Sampling
    priority: int = 0
    adapter: str | None = None


@dataclasses.dataclass(eq=False)
class _Pending:
    answers: "Answers"
    index: int
    request: EngineRequest
    client: str
    arrived: float
    ended: bool = False
    """True once nothing of it is awaited. Event loop only, like `latest`."""
    latest: float = 0.0
    """Time of its latest token."""
    number: int | None = None
    """Its number in the engine. Engine thread only, like `begun`."""
    begun: bool = False


class Answers:
    """Progress of requests that were submitted together. For the event loop; `close` it."""

    def __init__(self, service: "Service", requests: Sequence[EngineRequest], client: str):
        now = time.monotonic()
        self._service = service
        self.requests = [_Pending(self, i, each, client, now) for i, each in enumerate(requests)]
        self.events: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue()
        self._unread = {*range(len(requests))}

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        """Yield (index, progress) until each has finished or was stopped. Failed where the engine
        failed, ConfigError for a grammar that cannot continue."""
        taken = 0
        while self._unread:
            taken += 1
            if taken % AT_ONCE == 0:
                # `get` lets nothing else run while there are events: 700 answers that came with
                # one step held the event loop for 10 ms.
                await asyncio.sleep(0)
            # A request that was stopped may have events left.
            index, event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            if index in self._unread:
                if event.finish:
                    self._unread.discard(index)
                yield index, event

    def stop(self, index: int, reason: str = "stop") -> None:
        """End a request whose further tokens are not wanted; its pages are released."""
        self._unread.discard(index)
        self._service.end(self.requests[index : index + 1], reason)

    def close(self) -> None:
        """End all that still run, for a client that has left."""
        self._unread.clear()
        self._service.end(self.requests, "abort")


class Service:
    """Passes requests of an event loop to an engine in a thread."""

    def __init__(self, engine: Engine, waiting: int):
        """`waiting`: requests that may wait besides those that the engine runs at a time."""
        self.engine, self.metrics = engine, Metrics()
        running = engine.scheduler.limits.requests * len(engine.scheduler.pools)
        # serve.max_waiting counts those that wait, beside those that run.
        self.capacity = running + waiting
        self.failure: BaseException | None = None
        self._closed = False
        self._open: set[_Pending] = set()
        self._open_of: collections.Counter[str] = collections.Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        # Guards `_commands` and `_stopped`, which both threads use.
        self._changed = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._stopped = False
        self._requests: dict[int, _Pending] = {}
        # A daemon, because a step that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def warm(self) -> None:
        """Compile the programs that most requests need, so that the first one waits no longer than
        the second. Call it before `start`."""
        self.engine.try_sizes()
        # Each compiles another program: choices alone, log-probabilities, adjusted logits.
        greedy = Sampling(temperature=0)
        for sampling in (greedy, Sampling(), Sampling(logprobs=1), Sampling(presence_penalty=1)):
            self.engine.add([0], dataclasses.replace(sampling, max_tokens=2))
            while self.engine.busy:
                self.engine.step()
        self.engine.programs.compile_larger()

    def start(self) -> None:
        """Start the thread, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, requests: Sequence[EngineRequest], client: str = "") -> Answers:
        """Queue requests of a client, all or none. DataError for a prompt that cannot be answered,
        Full, Closed, Failed."""
        # Checking a long prompt takes a pass over its tokens, too long for the event loop.
        answers = await asyncio.to_thread(self._answers, requests, client)
        self.check(len(requests), client)
        # No await since `check`, so no other request takes the room in between.
        self._open.update(answers.requests)
        self._open_of[client] += len(requests)
        self._idle.clear()
        self.metrics.prompt_tokens += sum(len(each.prompt) for each in requests)
        self._command(lambda: self._add(answers.requests))
        return answers

    def _answers(self, requests: Sequence[EngineRequest], client: str) -> Answers:
        """Check the prompts, outside the event loop; n answers share one."""
        # By identity: comparing long prompts would cost as much as checking them again.
        for prompt in {id(each.prompt): each.prompt for each in requests}.values():
            self.engine.check(prompt)
        return Answers(self, requests, client)

    def check(self, count: int = 0, client: str | None = None) -> None:
        """Raise Closed or Failed where no request is taken, Full where `count` more of a client may
        not wait now, ConfigError where they never may. A client gets at most three quarters of what
        the others leave, so there is always room for the next one."""
        if self.failure is not None:
            raise Failed(f"the engine failed: {self.failure!r}")
        if self._closed:
            raise Closed("the server is shutting down")
        if count > (most := _share(self.capacity)):
            raise ConfigError(
                f"{count} answers are asked for at once, and serve.max_waiting lets {most} of one "
                "client run and wait; ask for fewer, or raise serve.max_waiting"
            )
        # Refuse at once rather than queue without bound: a client learns that it should wait.
        if len(self._open) + count > self.capacity:
            raise Full(
                f"{len(self._open)} requests run and wait, of {self.capacity} that may; try later"
            )
        if client is not None:
            own = self._open_of[client]
            most = _share(self.capacity - len(self._open) + own)
            if own + count > most:
                raise Full(f"{own} of your requests run and wait, of {most} that may; try later")

    def end(self, requests: Sequence[_Pending], reason: str) -> None:
        """Record the end of requests, and abort those that still run in the engine."""
        if going := [request for request in requests if not request.ended]:
            for request in going:
                self._end(request, reason)
            self._command(lambda: self._abort(going))

    async def drain(self) -> None:
        """Refuse new requests and wait until all have ended."""
        self._closed = True
        await self._idle.wait()

    async def stop(self) -> None:
        """End the thread after its current step."""
        self._closed = True
        with self._changed:
            self._stopped = True
            self._changed.notify()
        # Waiting for a thread would block the event loop, which must still deliver.
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        self.engine.programs.close()
        self._fail(Closed("the server is shutting down"))

    def _command(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _end(self, request: _Pending, reason: str) -> None:
        request.ended = True
        self.metrics.finished[reason] += 1
        if reason in ("stop", "length"):
            self.metrics.whole.observe(time.monotonic() - request.arrived)
        self._open.discard(request)
        self._open_of[request.client] -= 1
        if not self._open_of[request.client]:
            del self._open_of[request.client]
        if not self._open:
            self._idle.set()

    def _deliver(self, outputs: Sequence[tuple[_Pending, Output | Exception]]) -> None:
        now = time.monotonic()
        for request, output in outputs:
            # The engine may have computed a step before it ran the abort.
            if request.ended:
                continue
            request.answers.events.put_nowait((request.index, output))
            if isinstance(output, Exception):
                self._end(request, "error")
                continue
            self._observe(request, output, now)
            if output.finish:
                self._end(request, output.finish)

    def _observe(self, request: _Pending, output: Output, now: float) -> None:
        if not output.tokens:
            return
        self.metrics.generation_tokens += len(output.tokens)
        if request.latest:
            self.metrics.between.observe(now - request.latest)
        else:
            self.metrics.first.observe(now - request.arrived)
        request.latest = now

    def _fail(self, error: Exception) -> None:
        # A copy, because `_end` takes requests out of the set.
        self._deliver([(request, error) for request in [*self._open]])

    # The methods below run in the engine's thread.

    def _run(self) -> None:
        try:
            while self._wait():
                began = time.monotonic()
                outputs = self.engine.step()
                self._note_begun(began, outputs)
                delivered = [self._take(output) for output in outputs]
                # One call for a step, not one for a token: each wakes the event loop.
                self._loop.call_soon_threadsafe(self._deliver, delivered)
        # Whatever it was, the engine's state is unknown now, so every request ends with it.
        except BaseException as error:
            log.exception("the engine failed")
            self.failure = error
            self._loop.call_soon_threadsafe(self._fail, Failed(f"the engine failed: {error!r}"))

    def _wait(self) -> bool:
        """Run commands until the engine has work -> False where the thread is to end."""
        while not self._stopped:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._commands or self.engine.busy)
                commands, self._commands = self._commands, []
            # Without the lock, which the event loop takes to queue more.
            for command in commands:
                command()
            if self.engine.busy:
                return not self._stopped
        return False

    def _add(self, requests: Sequence[_Pending]) -> None:
        for request in requests:
            request.number = self.engine.add(*request.request, request.client)
            self._requests[request.number] = request

    def _abort(self, requests: Sequence[_Pending]) -> None:
        for request in requests:
            assert request.number is not None
            self.engine.abort(request.number)
            self._requests.pop(request.number, None)

    def _note_begun(self, began: float, outputs: Sequence[Output]) -> None:
        """Observe how long the requests waited that started with the last step."""
        # With those that ended in their first step, which run no more.
        running = {sequence.number for sequence in self.engine.scheduler.running}
        for number in running.union(output.request for output in outputs):
            request = self._requests[number]
            if not request.begun:
                request.begun = True
                self._loop.call_soon_threadsafe(
                    self.metrics.queued.observe, began - request.arrived
                )

    def _take(self, output: Output) -> tuple[_Pending, Output | Exception]:
        request = self._requests[output.request]
        if output.finish:
            del self._requests[output.request]
        grammar = request.request.sampling.grammar
        if output.finish and grammar is not None and grammar.error is not None:
            return request, grammar.error
        return request, output


def _share(count: int) -> int:
    """Return how many of `count` requests one client may have."""
    # Rounded up, so that the last free place can be had.
    return -(-3 * count // 4)
