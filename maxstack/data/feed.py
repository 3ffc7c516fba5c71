"""The feed: batches made ahead by a thread or by worker processes, in an order that neither changes."""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from maxstack.data import DataError
from maxstack.data.config import DataConfig
from maxstack.data.lanes import Batch, EvaluationRows, Mixture, Rows
from maxstack.data.sources import open_sources
from maxstack.data.workers import settle

PATIENCE = 5.0
"""Seconds that a feed which is closed waits for the batch that is being made."""


class Feed:
    """Iterates over batches {tokens, targets, positions, segments, mask (and bytes in an evaluation)}, arrays [lanes, seq_len].

    `waited` is the seconds that next() has spent waiting in all. Order and state do not depend on `workers`, `prefetch` or which lanes are held.
    """

    def __init__(self, cfg: DataConfig, lanes: Sequence[int], batch_size: int, *, evaluation: bool = False, whole: bool = False):
        if not lanes or min(lanes) < 0 or max(lanes) >= batch_size:
            raise ValueError(f"lanes {list(lanes)} are not rows of a batch of {batch_size}")
        self._cfg, self._lanes = cfg, list(lanes)
        section = "eval.data" if whole else "data"
        self._mixture = Mixture(cfg, open_sources(cfg, evaluation, whole), 1 if evaluation else batch_size, evaluation, section)
        self._quarantine = self._mixture.quarantine()
        self._batch_size = batch_size
        self._state = np.zeros((len(self._lanes), self._mixture.counters + 1), np.int64)
        self._batches: Any = None
        self._closing: threading.Thread | None = None
        self._makers: set[int] = set()
        self.waited = 0.0

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> Batch:
        """The next batch. DataError, with file and record, if a document cannot be read and may not be passed over; RuntimeError if a worker
        process died."""
        start = time.perf_counter()
        self.start()
        batch = self._joined()
        self.waited += time.perf_counter() - start
        self._state = batch.pop("state")
        return batch

    def state(self) -> np.ndarray:
        """int64 [lanes, K]: where each lane stands after the batch that next() returned last."""
        return self._state.copy()

    def damaged(self) -> list[str]:
        """A line for each record that cannot be read and was passed over since the last call, each record once in the life of this feed."""
        lines = (f"{self._mixture.section}.quarantine: passed over {reason}" for reason in self._quarantine.news().values())
        return [line.encode(errors="backslashreplace").decode() for line in lines]

    def restore(self, state: np.ndarray) -> None:
        """Continue after the batch that `state` was taken after; its rows are this feed's lanes, from whatever split they come."""
        if state.shape != self._state.shape:
            raise DataError(f"the saved position has shape {state.shape}, this feed's is {self._state.shape}: the batch size or the number of "
                            "data.sources changed since the checkpoint; restore them, or start a new run")
        self.close()
        self._state = np.array(state, np.int64)

    def start(self) -> None:
        """Begin to make batches in the background; next() does it too. A thread that close() did not wait for is waited for now, since two must not
        read the same files."""
        if self._batches is None:
            if self._closing:
                self._closing.join()
            self._batches = iter(_background(_RowBatches(self._mixture, self._lanes, self._batch_size, self._state), self._cfg))

    def close(self) -> None:
        """Stop the thread or the workers. The feed may be used again. Where a source does not answer in PATIENCE seconds this says so and goes on:
        workers are killed, and a thread is left to itself."""
        if self._batches is None:
            return
        self._closing, self._batches = threading.Thread(target=self._batches.close, name="closing feed", daemon=True), None
        self._closing.start()
        self._closing.join(PATIENCE)
        if self._closing.is_alive():
            names = " or ".join(source.name for source in self._mixture.sources)
            print(f"{self._mixture.section}.sources: {names} does not answer: a batch was not made in {PATIENCE:.0f} s, and is not waited for",
                  file=sys.stderr, flush=True)
            workers = [process for process in multiprocessing.active_children() if process.pid in self._makers]
            for worker in workers:
                worker.kill()
            if workers:
                self._closing.join(PATIENCE)
        self._makers.clear()

    def describe(self) -> list[str]:
        """A line for each source: its name and number of documents."""
        return [f"{source.name}: {len(source)} documents" for source in self._mixture.sources]

    def identity(self) -> str:
        """Changes when the documents of a source are other ones than before, so that saved positions mean something else."""
        return " ".join(source.identity() for source in self._mixture.sources)

    def _groups(self) -> int:
        return max(1, min(self._cfg.workers, len(self._lanes)))

    def _joined(self) -> Batch:
        groups = self._groups()
        parts = [next(self._batches) for _ in range(groups)]
        self._makers |= {part.pop("maker") for part in parts}
        try:
            for part in parts:
                if "error" in part:
                    raise DataError(json.loads(bytes(part["error"])))
                for record, reason in json.loads(bytes(part.pop("damaged", b"{}"))).items():
                    self._quarantine.add(record, reason)
        except DataError:
            self.close()
            raise
        if groups == 1:
            return parts[0]
        batch = {key: np.empty((len(self._lanes), *parts[0][key].shape[1:]), parts[0][key].dtype) for key in parts[0]}
        for group, part in enumerate(parts):
            for key, array in batch.items():
                array[group::groups] = part[key]
        return batch


class _RowBatches(grain.IterDataset):
    """The lanes' batches as a grain dataset; a slice of it, which is what a worker gets, is the batches of some of the lanes."""

    def __init__(self, mixture: Mixture, lanes: list[int], batch_size: int, state: np.ndarray):
        super().__init__()
        self._mixture, self._lanes, self._batch_size, self._start = mixture, lanes, batch_size, state

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        self._lanes, self._start = self._lanes[sl], self._start[sl]

    def __iter__(self) -> "_RowIterator":
        if self._mixture.evaluation:
            return _RowIterator(EvaluationRows(self._mixture, self._lanes, self._batch_size, self._start))
        return _RowIterator(Rows(self._mixture, self._lanes, self._start))


class _RowIterator(grain.DatasetIterator):
    """An error travels as an element, since an exception's text would be lost between processes, and what was passed over beside its batch. `maker`
    is the process that made it."""

    def __init__(self, rows: Rows | EvaluationRows):
        super().__init__()
        self._rows = rows

    def __next__(self) -> dict[str, Any]:
        try:
            batch = self._rows.next()
            if damaged := self._rows.quarantine.news():
                batch["damaged"] = _packed(damaged)
        except DataError as error:
            batch = {"error": _packed(str(error))}
        return batch | {"maker": os.getpid()}

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("a feed restores by a new iterator")


def _packed(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _background(batches: _RowBatches, cfg: DataConfig) -> Any:
    workers = min(cfg.workers, len(batches._lanes))
    if not workers:
        return grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=cfg.prefetch)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    return batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=cfg.prefetch), worker_init_fn=settle)
