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
        self._turns: dict[str, asyncio.Lock] = {}
        self._trim: asyncio.TimerHandle | None = None

    async def run(
        self, size: int, client: str, function: Callable[..., Result], *args: object
    ) -> Result:
        """What a function makes of a client's body of so many bytes. Full where too many wait."""
        if size < LONG:
            return await asyncio.to_thread(function, *args)
        if self._bytes.total() + size > WAITING or self._bytes[client] + size > WAITING // 2:
            raise Full(f"long requests of {self._bytes.total()} bytes wait; try later")
        loop = asyncio.get_running_loop()
        self._bytes[client] += size
        try:
            async with self._turns.setdefault(client, asyncio.Lock()):
                return await loop.run_in_executor(self._long, function, *args)
        finally:
            self._bytes[client] -= size
            if not self._bytes[client]:
                del self._bytes[client], self._turns[client]
            if self._trim:
                self._trim.cancel()
            self._trim = loop.call_later(AFTER, self._long.submit, give_back)
