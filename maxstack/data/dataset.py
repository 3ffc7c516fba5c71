"""The batches of a configuration as a grain.IterDataset, for notebooks and other trainers."""

from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from maxstack.data.feed import Feed
from maxstack.data.lanes import Batch

if TYPE_CHECKING:
    from maxstack.schema.config import Config


class Batches(grain.IterDataset):
    """The batches that a run of a configuration (maxstack.load.load) trains on, without end: arrays
    [rows, seq_len] `tokens`, `targets`, `positions`, `segments` and `mask`. With `evaluation` the
    held-out documents, once.

    Number `process` of `processes` gets its share of the rows of each batch of train.batch_size.
    The iterator's state is the positions of its rows, from which any process can continue;
    `data.workers` processes make the rows. Raises the DataErrors of `maxstack train`.
    """

    def __init__(
        self,
        cfg: "Config",
        *,
        process: int = 0,
        processes: int = 1,
        evaluation: bool = False,
    ):
        super().__init__()
        self._cfg, self._evaluation = cfg, evaluation
        size = cfg.train.batch_size
        if size % processes or not 0 <= process < processes:
            raise ValueError(f"process {process} of {processes}: must divide {size} rows")
        share = size // processes
        self._rows = range(process * share, (process + 1) * share)

    def __iter__(self) -> "BatchIterator":
        cfg = self._cfg
        return BatchIterator(
            Feed(cfg.data, self._rows, cfg.train.batch_size, evaluation=self._evaluation),
            self._evaluation,
        )


class BatchIterator(grain.DatasetIterator):
    """Batches one after the other, with a state."""

    def __init__(self, feed: Feed, ends: bool):
        super().__init__()
        self._feed, self._ends = feed, ends

    def __next__(self) -> Batch:
        batch = next(self._feed)
        # Past its end an evaluation gives empty batches without end.
        if self._ends and not batch["segments"].any():
            raise StopIteration
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the positions after the last batch, as plain JSON."""
        return {"position": self._feed.state().tolist()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue after the batch that `state` was taken after."""
        self._feed.restore(np.array(state["position"], np.int64))

    def close(self) -> None:
        """Stop the thread or the workers that make batches."""
        self._feed.close()
