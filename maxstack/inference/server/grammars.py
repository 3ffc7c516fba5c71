"""Grammars of requests, compiled outside the event loop, in threads of their own.

Two are compiled at a time, and of a client one, so that a client with many waits for itself. Each
is tried in a sandbox process first, which also measures its memory, and then compiled here. Small
ones are cached; the memory of all that are cached or in use is counted, by an object that dies with
the last answer, and more is refused.
"""

import asyncio
import collections
import contextlib
import functools
import json
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from maxstack.errors import ConfigError
from maxstack.hardware.memory import give_back
from maxstack.inference.grammar import Answer, Compiler, Vocabulary, check_size
from maxstack.inference.grammar_sandbox import GrammarSandbox
from maxstack.inference.server.refusal import Refusal
from maxstack.inference.server.threads import Queues
from maxstack.inference.service import Full

PROCESSES = 2
"""Grammars that are compiled at a time."""
WAITING = 64
"""Requests of a client that may wait for their grammars."""
KEPT = 64
"""Compiled grammars that are cached."""
# Without this limit 64 grammars of 50 MB each were kept.
KEPT_BYTES = 4 << 20
"""Bytes of the largest grammar that is cached."""
LIVE = 1 << 30
"""Bytes of all grammars that are cached or in use."""
FREED = 8 << 20
"""Bytes from which on a grammar's memory is given back to the system when it is dropped."""


class Rule(NamedTuple):
    """A grammar in a request's field; `Compiler.compile` takes kind and value."""

    field: str
    kind: str
    value: Any


class _Memory:
    """Stands for the memory of a grammar, which its answers share."""


class Grammars:
    """Compiles grammars for an event loop, one of a client at a time, so that others get theirs
    meanwhile. Each is first compiled in a sandbox (grammar_sandbox.py), then here."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]):
        self._vocabulary = functools.cache(vocabulary)
        self._kept: collections.OrderedDict[str, Answer] = collections.OrderedDict()
        self._turns = Queues(1)
        self._threads = ThreadPoolExecutor(PROCESSES, "grammar")
        self._sandboxes: list[GrammarSandbox] = []
        self._free = asyncio.Semaphore(PROCESSES)
        self._live = 0
        # Reentrant: collecting garbage may free a grammar in the thread that counts another.
        self._counting = threading.RLock()

    async def answers(self, rule: Rule, count: int, client: str) -> list[Answer]:
        """Return so many answers that follow a rule. Refusal for a rule that cannot be compiled,
        Full where the client waits for as many as it may. Cancelling it ends the sandbox."""
        # Waiting costs memory too, so it is bounded.
        if self._turns.present[client] == WAITING:
            raise Full(f"{WAITING} requests of this client wait for their grammars; try later")
        try:
            async with self._turns.turn(client), self._free:
                return await self._in_sandbox(rule, count)
        except ConfigError as error:
            raise Refusal(400, f"{rule.field}: {error}", param=rule.field) from None

    def close(self) -> None:
        """End the sandboxes."""
        for sandbox in self._sandboxes:
            sandbox.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_sandbox(self, rule: Rule, count: int) -> list[Answer]:
        run = functools.partial(asyncio.get_running_loop().run_in_executor, self._threads)
        sandbox = (
            self._sandboxes.pop()
            if self._sandboxes
            else GrammarSandbox(await run(self._vocabulary))
        )
        try:
            answers = await run(self._compile, sandbox, rule, count)
        # The client left: only ending the process ends the library's work.
        except asyncio.CancelledError:
            sandbox.end()
            raise
        except BaseException:
            self._sandboxes.append(sandbox)
            raise
        self._sandboxes.append(sandbox)
        return answers

    def _compile(self, sandbox: GrammarSandbox, rule: Rule, count: int) -> list[Answer]:
        check_size(rule.value)
        key = json.dumps(rule[1:])
        # Take it out and put it back at the end: the one used longest ago is dropped first.
        answer = self._kept.pop(key, None)
        if answer is None:
            compiled, copied = sandbox.check(rule.kind, rule.value)
            # Count before compiling here, where no limit of memory holds.
            memory = self._hold(compiled + count * copied)
            answer = Answer(self._compiler.compile(rule.kind, rule.value), memory)
            if compiled + len(key) > KEPT_BYTES:
                return [answer.copy() for _ in range(count)]
        self._kept[key] = answer
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return [answer.copy() for _ in range(count)]

    def _hold(self, size: int) -> _Memory:
        """Count bytes until the returned object is dropped. Full where there are too many."""
        with self._counting:
            if self._live + size > LIVE:
                raise Full(
                    f"grammars have {self._live + size >> 20} MiB of {LIVE >> 20}; try later"
                )
            self._live += size
        memory = _Memory()
        # Answers share the object and are dropped in the engine's thread or here, whenever they
        # end.
        weakref.finalize(memory, self._free_memory, size)
        return memory

    def _free_memory(self, size: int) -> None:
        with self._counting:
            self._live -= size
        if size > FREED:
            # The threads take no more work where the server ends.
            with contextlib.suppress(RuntimeError):
                self._threads.submit(give_back)

    @functools.cached_property
    def _compiler(self) -> Compiler:
        return Compiler(self._vocabulary())
