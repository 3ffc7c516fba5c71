"""Threads that read requests and write answers beside the event loop."""

import asyncio
import collections
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from maxstack.hardware.memory import give_back
from maxstack.inference.service import Full

LONG = 1 << 16
"""Bytes from which on a body is read in the thread for long ones."""
SHORT = 2
"""Threads that the short bodies of one client have at a time."""
WAITING = 1 << 26
"""Bytes of long bodies that may be there at a time, of one client half of them."""
AFTER = 1.0
"""Seconds after a long body in which its memory goes back to the system."""
Result = TypeVar("Result")


class Threads:
    """Threads of a server: short bodies have several, all long ones together one, so that reading
    them takes one processor's time, and clients take turns at it. For the event loop."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(1, "long")
        self._bytes: collections.Counter[str] = collections.Counter()
        self._users: collections.Counter[tuple[str, bool]] = collections.Counter()
        self._turns: dict[tuple[str, bool], asyncio.Semaphore] = {}
        self._trim: asyncio.TimerHandle | None = None

    async def run(
        self, size: int, client: str, function: Callable[..., Result], *args: object
    ) -> Result:
        """What a function makes of a client's body of so many bytes. Full where too many wait."""
        if size < LONG:
            return await self._run(None, (client, False), function, *args)
        if self._bytes.total() + size > WAITING or self._bytes[client] + size > WAITING // 2:
            raise Full(f"long requests of {self._bytes.total()} bytes wait; try later")
        self._bytes[client] += size
        try:
            return await self._run(self._long, (client, True), function, *args)
        finally:
            self._bytes[client] -= size
            if not self._bytes[client]:
                del self._bytes[client]
            if self._trim:
                self._trim.cancel()
            loop = asyncio.get_running_loop()
            self._trim = loop.call_later(AFTER, self._long.submit, give_back)

    async def _run(
        self,
        pool: ThreadPoolExecutor | None,
        who: tuple[str, bool],
        function: Callable[..., Result],
        *args: object,
    ) -> Result:
        """The same in a pool, once it is the turn of a client's short or long bodies."""
        self._users[who] += 1
        turns = self._turns.setdefault(who, asyncio.Semaphore(1 if pool else SHORT))
        try:
            async with turns:
                return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
        finally:
            self._users[who] -= 1
            if not self._users[who]:
                del self._users[who], self._turns[who]
