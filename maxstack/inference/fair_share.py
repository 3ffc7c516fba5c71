"""Turns of clients, by which the scheduler begins requests and takes them back.

The next request to begin is of the client that has fewest running; of several such clients, of the
one for which fewest tokens were computed since it came, as in Sheng et al. 2024 (arXiv:2401.00588).
Priority and arrival order the requests of one client alone.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar


class Task(Protocol):
    """A request of a client."""

    client: str

    @property
    def order(self) -> Any:
        """Its place among those of the client."""


AnyTask = TypeVar("AnyTask", bound=Task)


class FairShare:
    """The clients that have tasks, and how many tokens were computed for each."""

    def __init__(self) -> None:
        self._tasks: Counter[str] = Counter()
        self.served: dict[str, int] = {}

    def come(self, client: str) -> None:
        """One more task of a client, which begins even with the one that was served least."""
        if client not in self._tasks:
            self.served[client] = min(self.served.values(), default=0)
        self._tasks[client] += 1

    def leave(self, client: str) -> None:
        """One task less."""
        self._tasks[client] -= 1
        if not self._tasks[client]:
            del self._tasks[client], self.served[client]

    def someone_waits(self, running: Iterable[Task]) -> bool:
        """True while a client has tasks and none of them runs."""
        return len({task.client for task in running}) < len(self._tasks)

    def order(self, waiting: Iterable[AnyTask], running: Iterable[Task]) -> Iterator[AnyTask]:
        """Waiting tasks, which are sorted, in the order in which they may begin."""
        queues: dict[str, deque[AnyTask]] = {}
        for task in waiting:
            queues.setdefault(task.client, deque()).append(task)
        counts = Counter(task.client for task in running)
        heads = [
            (counts[client], self.served[client], queue[0].order, client)
            for client, queue in queues.items()
        ]
        heapq.heapify(heads)
        while heads:
            count, served, _, client = heapq.heappop(heads)
            yield queues[client].popleft()
            if queue := queues[client]:
                heapq.heappush(heads, (count + 1, served, queue[0].order, client))


def pick_victim(running: Sequence[AnyTask]) -> AnyTask:
    """The last task of the client that has most running: the one to give its place back."""
    counts = Counter(task.client for task in running)
    return max(running, key=lambda task: (counts[task.client], task.order))
