"""The thread that runs the programs of all packages, a batch at a time.

Every package runs on the first devices of the process, so there is one thread: programs of several
devices that are started in another order on each would wait for one another for ever.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

from maxstack.inference.packages.batching import Answer, Pending, Queue
from maxstack.inference.server.refusal import Refusal

log = logging.getLogger(__name__)
STOP_SECONDS = 30


class Worker:
    """The thread, and the queues with work for it."""

    def __init__(self) -> None:
        self.running = threading.Lock()
        """Held while a program runs."""
        self.stopped = False
        self._changed = threading.Condition()
        # So that the worker need not look at every queue.
        self._busy: set[Queue] = set()
        """Queues that are not empty."""
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current batch, unless that takes too long."""
        with self._changed:
            self.stopped = True
            self._changed.notify()
        self._thread.join(STOP_SECONDS)

    def submit(self, queue: Queue, request: Pending) -> "asyncio.Future[Answer]":
        """Queue a request -> its future answer. Refusal for a full queue. For the event loop."""
        with self._changed:
            if queue.submit(request):
                self._busy.add(queue)
                self._changed.notify()
        assert request.answer is not None
        return request.answer

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            queue, batch = taken
            assert batch[0].answer is not None
            loop = batch[0].answer.get_loop()
            outcome: Sequence[Answer] | Refusal
            try:
                # `Version.warm` holds it for packages of several devices.
                with self.running:
                    outcome = queue.run(batch)
            # The thread serves all packages, so a failure ends one batch alone.
            except Exception as error:
                name = f"{queue.metrics.model} version {queue.metrics.version}"
                log.error("%s failed", name, exc_info=error)
                outcome = Refusal(500, f"{name} failed; the server's log says why")
            loop.call_soon_threadsafe(_deliver, batch, outcome)

    def _next(self) -> tuple[Queue, list[Pending]] | None:
        """Wait for the next batch that is due -> it; None at the end."""
        with self._changed:
            while not self.stopped:
                if not self._busy:
                    self._changed.wait()
                    continue
                # The batch that is due first, of all packages: none can starve another.
                queue = min(self._busy, key=lambda queue: queue.due()[0])
                when, bucket = queue.due()
                if (left := when - time.perf_counter()) > 0:
                    # Wakes early where a request fills this batch or makes another due sooner.
                    self._changed.wait(left)
                    continue
                batch = queue.take(bucket)
                if not queue.length:
                    self._busy.discard(queue)
                return queue, batch
        return None


def _deliver(batch: Sequence[Pending], outcome: Sequence[Answer] | Refusal) -> None:
    """Give the requests of a batch their answers; on the event loop."""
    for i, request in enumerate(batch):
        assert request.answer is not None
        if request.answer.done():  # the client has left
            continue
        if isinstance(outcome, Refusal):
            request.answer.set_exception(outcome)
        else:
            request.answer.set_result(outcome[i])
