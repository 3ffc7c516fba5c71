"""The grammars of requests, compiled beside the event loop by threads of their own."""

import asyncio
import collections
import contextlib
import functools
import json
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
KEPT, KEPT_BYTES = 64, 4 << 20
"""Grammars that are kept compiled, and bytes of the largest of them."""
LIVE = 1 << 30
"""Bytes of all grammars that are kept or followed."""
FREED = 8 << 20
"""Bytes of a grammar whose memory goes back to the system when it is gone."""


class Rule(NamedTuple):
    """A grammar as a request has it: `Compiler.compile` takes the last two."""

    field: str
    kind: str
    value: Any


class _Held:
    """Stands for the memory of a grammar, which its answers share."""


class Grammars:
    """Compiles grammars for an event loop. One client has one at a time, so that others get theirs
    meanwhile."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]):
        self._vocabulary = functools.cache(vocabulary)
        self._kept: collections.OrderedDict[str, Answer] = collections.OrderedDict()
        self._turns = Queues(1)
        self._threads = ThreadPoolExecutor(PROCESSES, "grammar")
        self._trials: list[GrammarSandbox] = []
        self._free = asyncio.Semaphore(PROCESSES)
        self._live = 0

    async def answers(self, rule: Rule, count: int, client: str) -> list[Answer]:
        """So many answers that follow a rule. Refusal for one that cannot be followed, Full where
        the client waits for as many as it may. Cancelled, it ends the process that compiles."""
        if self._turns.present[client] == WAITING:
            raise Full(f"{WAITING} requests of this client wait for their grammars; try later")
        try:
            async with self._turns.turn(client), self._free:
                return await self._compiled(rule, count)
        except ConfigError as error:
            raise Refusal(400, f"{rule.field}: {error}", param=rule.field) from None

    def close(self) -> None:
        """End the processes, and what is compiled there."""
        for trial in self._trials:
            trial.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _compiled(self, rule: Rule, count: int) -> list[Answer]:
        run = functools.partial(asyncio.get_running_loop().run_in_executor, self._threads)
        trial = self._trials.pop() if self._trials else GrammarSandbox(await run(self._vocabulary))
        try:
            answers = await run(self._made, trial, rule, count)
        except asyncio.CancelledError:
            trial.end()
            raise
        except BaseException:
            self._trials.append(trial)
            raise
        self._trials.append(trial)
        return answers

    def _made(self, trial: GrammarSandbox, rule: Rule, count: int) -> list[Answer]:
        check_size(rule.value)
        key = json.dumps(rule[1:])
        answer = self._kept.pop(key, None)
        if answer is None:
            compiled, copied = trial.check(rule.kind, rule.value)
            held = self._hold(compiled + count * copied)
            answer = Answer(self._compiler.compile(rule.kind, rule.value), held)
            if compiled + len(key) > KEPT_BYTES:
                return [answer.copy() for _ in range(count)]
        self._kept[key] = answer
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return [answer.copy() for _ in range(count)]

    def _hold(self, size: int) -> _Held:
        """Count bytes until what it gives is gone. Full where there are too many."""
        if self._live + size > LIVE:
            raise Full(f"grammars have {self._live + size >> 20} MiB of {LIVE >> 20}; try later")
        self._live += size
        held = _Held()
        weakref.finalize(held, self._gone, size)
        return held

    def _gone(self, size: int) -> None:
        self._live -= size
        if size > FREED:
            with contextlib.suppress(RuntimeError):  # the server ends
                self._threads.submit(give_back)

    @functools.cached_property
    def _compiler(self) -> Compiler:
        return Compiler(self._vocabulary())
