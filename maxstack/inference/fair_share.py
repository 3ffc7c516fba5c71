"""Fair shares of clients, by which the scheduler admits and preempts requests.

The next request to start is of the client with fewest running; of several such clients, of the one
for which fewest tokens were computed since it came, as in Sheng et al. 2024 (arXiv:2401.00588).
Priority and arrival order the requests of one client alone.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from maxstack.inference.request import TokenSequence


class FairShare:
    """The clients that have requests, and how many tokens were computed for each."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self.served: dict[str, int] = {}

    def join(self, client: str) -> None:
        """Count a request; a new client starts level with the one that was served least."""
        if client not in self._requests:
            # From 0 a new client would have all turns until it had caught up with those who came
            # before it.
            self.served[client] = min(self.served.values(), default=0)
        self._requests[client] += 1

    def leave(self, client: str) -> None:
        """Count a request less."""
        self._requests[client] -= 1
        if not self._requests[client]:
            # Forget who has left: else an idle client would save up turns, and the tables grow with
            # every address that ever asked.
            del self._requests[client], self.served[client]

    def someone_waits(self, running: Iterable[TokenSequence]) -> bool:
        """Return True while a client has requests and none of them runs."""
        return len({sequence.client for sequence in running}) < len(self._requests)

    def order(
        self, waiting: Iterable[TokenSequence], running: Iterable[TokenSequence]
    ) -> Iterator[TokenSequence]:
        """Yield waiting sequences, which are sorted, in the order in which they may start."""
        queues: dict[str, deque[TokenSequence]] = {}
        for sequence in waiting:
            queues.setdefault(sequence.client, deque()).append(sequence)
        counts = Counter(sequence.client for sequence in running)
        heads = [
            # Running requests before served tokens: places are what clients hold. `order` breaks
            # ties, and the name makes the order total.
            (counts[client], self.served[client], queue[0].order, client)
            for client, queue in queues.items()
        ]
        heapq.heapify(heads)
        while heads:
            count, served, _, client = heapq.heappop(heads)
            yield queues[client].popleft()
            if queue := queues[client]:
                # Assume that the yielded sequence starts; the scheduler stops iterating where one
                # does not.
                heapq.heappush(heads, (count + 1, served, queue[0].order, client))


def pick_victim(running: Sequence[TokenSequence]) -> TokenSequence:
    """Return the sequence to preempt: the last one of the client that has most running."""
    counts = Counter(sequence.client for sequence in running)
    # The youngest has the fewest tokens to compute again as a rule, and the oldest of a client
    # keeps its place.
    return max(running, key=lambda sequence: (counts[sequence.client], sequence.order))
