"""Worker processes that make a feed's batches.

A worker writes its rows into shared memory without a name that it gets as it starts, so closing a
feed is SIGKILL, at once, whatever a source does. Grain's mp_prefetch hands each batch over as named
shared memory: a worker that ended between making a batch and handing it over left the memory
behind, and closing waited for the batch being made.
"""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context, parent_process, util
from typing import Any

import numpy as np

from maxstack.data.lanes import Batch, Rows
from maxstack.data.quarantine import News, empty_news
from maxstack.errors import DataError
from maxstack.report import stacks

_GRACE_SECONDS = 30

Made = tuple[Batch, News, DataError | None]
"""A batch, documents passed over for it, and the error that prevented it."""


class Workers:
    """Iterates over batches whose rows several `Rows` make, each in a process of its own, `ahead`
    batches before they are used. With n processes, row i of the whole batch is row i // n of
    process i % n."""

    def __init__(self, makers: Sequence[Rows], ahead: int):
        # Not fork: a forked child would inherit locks that threads of jax hold.
        context = get_context("spawn")
        sizes = [len(maker) * maker.row_type.itemsize for maker in makers]
        # Memory without a name, so SIGKILL leaves nothing in /dev/shm. Batches pickled through a
        # pipe took 168 ms for 10.5 MB, copying out of this 8.4 ms.
        memories = [context.RawArray("b", size * ahead) for size in sizes]
        pipes = [context.Pipe() for _ in makers]
        self._slots = [
            _slots(maker, memory) for maker, memory in zip(makers, memories, strict=True)
        ]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(theirs, memory, maker), daemon=True)
            for (_, theirs), memory, maker in zip(pipes, memories, makers, strict=True)
        ]
        # Before multiprocessing's own handler at exit, which sends SIGTERM and then waits, even for
        # a process that is stopped.
        self._end = util.Finalize(self, _kill, (self._processes,), exitpriority=10)
        with ThreadPoolExecutor(len(makers)) as pool:  # each waits for its process to read
            list(pool.map(lambda process: process.start(), self._processes))
        # With our copy closed, the pipe ends when the worker does, and recv raises EOFError.
        for _, theirs in pipes:
            theirs.close()
        self._made = 0

    def __next__(self) -> Made:
        """Return the next batch. RuntimeError if a process died."""
        # All notes first: an error of any worker ends the batch before its parts are copied.
        notes = [self._note(worker) for worker in range(len(self._processes))]
        for _, error in notes:
            if error is not None:
                return {}, empty_news(), error
        row_type, rows = self._slots[0].dtype, sum(slots.shape[1] for slots in self._slots)
        batch = {
            key: np.empty((rows, *row_type[key].shape), row_type[key].base)
            for key in row_type.names or ()
        }
        for worker, slots in enumerate(self._slots):
            made = slots[self._made % len(slots)]
            for key, array in batch.items():
                array[worker :: len(self._slots)] = made[key]
        # Only after the copy: the worker overwrites this slot when it hears of it.
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a process that died, which the next batch reports
                connection.send_bytes(b"read")
        self._made += 1
        together = empty_news()
        for news, _ in notes:
            together.damaged.update(news.damaged)
            together.empty.update(news.empty)
            for source, (record, count) in news.long.items():
                first, before = together.long.get(source, (record, 0))
                together.long[source] = first, before + count
        return batch, together, None

    def close(self) -> None:
        """Kill the processes, without waiting for the batches being made."""
        self._end()

    def _note(self, worker: int) -> tuple[News, DataError | None]:
        try:
            return self._connections[worker].recv()
        except (EOFError, OSError) as error:
            process = self._processes[worker]
            process.join()
            raise RuntimeError(
                f"data worker {worker} of {len(self._processes)} (process {process.pid}) "
                f"terminated unexpectedly with exit code {process.exitcode}"
            ) from error


def next_batch(rows: Rows) -> Made:
    """Make the next batch. A DataError is returned, so that it is raised where the batch is used,
    in whatever thread or process it was made."""
    try:
        batch = rows.next()
    except DataError as error:
        return {}, empty_news(), type(error)(str(error))
    return batch, rows.quarantine.news(), None


def _serve(connection: Any, memory: Any, maker: Rows) -> None:
    """Run a worker process: fill the slots in turn, each after it was read, and send a note for
    each."""
    set_worker_signals()
    slots = _slots(maker, memory)
    try:
        for n in itertools.count():
            if n >= len(slots):
                connection.recv_bytes()
            batch, news, error = next_batch(maker)
            for key, array in batch.items():
                slots[n % len(slots)][key] = array
            connection.send((news, error))
    except (EOFError, ConnectionError):  # the main process has ended
        return


def _slots(maker: Rows, memory: Any) -> np.ndarray:
    """Return the batches in shared memory: records of row_type, [slots, rows]."""
    return np.frombuffer(memory, maker.row_type).reshape(-1, len(maker))


def _kill(processes: list[Any]) -> None:
    """Send SIGKILL, which ends stopped processes too."""
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()


def set_worker_signals() -> None:
    """Set the signals of a worker process of any kind as it starts.

    A terminal or a scheduler signals the whole process group; the main process may still want
    batches while it saves, so a worker ignores an interrupt and ends 30 seconds after a request to
    end. If the main process is killed, the worker ends at once.
    """
    stacks.show()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGALRM's default action ends the process whatever Python does by then.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_SECONDS))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        # sys.exit would end this thread alone.
        os._exit(1)
