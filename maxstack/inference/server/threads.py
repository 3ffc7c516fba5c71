"""Threads that read requests and write answers outside the event loop.

Short bodies go to several threads, two of a client at a time. Long ones go to a single thread, at
which clients take turns, and only so many bytes of them may be in memory; more are refused. A
second after the last long body its memory is given back to the system.
"""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from maxstack.hardware.memory import give_back
from maxstack.inference.service import Full

LONG = 1 << 16
"""Bytes from which on a body is handled by the thread for long ones."""
# Without this limit, conversations that took their template's two seconds held all threads that
# read short requests.
SHORT = 2
"""Threads for the short bodies of one client at a time."""
WAITING = 1 << 26
"""Bytes of long bodies in memory at a time; one client may have half."""
AFTER = 1.0
"""Seconds after a long body until its memory is given back to the system."""
Result = TypeVar("Result")


class Queues:
    """A queue per client, `each` of which may be at work at a time. For the event loop."""

    def __init__(self, each: int):
        self._each = each
        self.present: collections.Counter[str] = collections.Counter()
        """How many of each client work or wait."""
        self._turns: dict[str, asyncio.Semaphore] = {}

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn of a client, and hold it."""
        self.present[client] += 1
        try:
            # A semaphore wakes waiters in their order.
            async with self._turns.setdefault(client, asyncio.Semaphore(self._each)):
                yield
        finally:
            self.present[client] -= 1
            if not self.present[client]:
                # Or the tables would grow with every address that ever asked.
                del self.present[client], self._turns[client]


class Threads:
    """Threads of a server: several for short bodies, one for all long ones, so that these take at
    most one processor, at which clients take turns. For the event loop."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(1, "long")
        self._bytes: collections.Counter[str] = collections.Counter()
        self._turns = Queues(SHORT)
        self._long_turns = Queues(1)
        self._trim: asyncio.TimerHandle | None = None

    async def run(
        self, size: int, client: str, function: Callable[..., Result], *args: object
    ) -> Result:
        """Call a function on a client's body of `size` bytes. Full where too many wait."""
        loop = asyncio.get_running_loop()
        if size < LONG:
            async with self._turns.turn(client):
                return await loop.run_in_executor(None, function, *args)
        # Count before waiting: a body is in memory while it waits.
        if self._bytes.total() + size > WAITING or self._bytes[client] + size > WAITING // 2:
            raise Full(f"long requests of {self._bytes.total()} bytes wait; try later")
        self._bytes[client] += size
        try:
            async with self._long_turns.turn(client):
                return await loop.run_in_executor(self._long, function, *args)
        finally:
            self._bytes[client] -= size
            if not self._bytes[client]:
                del self._bytes[client]
            if self._trim:
                # Not after each body: the next one would only take the memory again.
                self._trim.cancel()
            self._trim = loop.call_later(AFTER, self._long.submit, give_back)
