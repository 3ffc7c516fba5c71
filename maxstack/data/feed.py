"""The feed: batches made ahead by a thread or by worker processes, neither of which changes their
order.

A feed keeps the positions of its lanes (lanes.py). Makers begin at these positions and make whole
batches ahead of their use. Each batch carries the positions after it, so a checkpoint does not
count batches that were made and not used. The feed cuts a batch to the shape of its stage, counts
documents that makers passed over, and raises a maker's error when its batch is due.
"""

import codecs
import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import grain
import numpy as np

from maxstack import strict_json
from maxstack.data.deal import EpochPlan
from maxstack.data.documents import Documents
from maxstack.data.examples import READ
from maxstack.data.lanes import FED, Batch, EvaluationRows, Rows, lane_class
from maxstack.data.mixture import Mixture
from maxstack.data.presets import keys_read
from maxstack.data.sources import open_sources
from maxstack.data.tokenizers import open_tokenizer
from maxstack.data.workers import Made, Workers, next_batch
from maxstack.errors import DataEnded, DataError, shortened
from maxstack.schema.data import DataConfig
from maxstack.schema.stages import Stages

if TYPE_CHECKING:
    from maxstack.data.batches import BatchMetrics
    from maxstack.schema.objective import RowField as Field

SAMPLED = 16
"""Most documents of a source that are looked at when a run begins."""
PATIENCE = 5.0
"""Seconds that closing a feed waits for the batch being made."""


class BatchFeed(Protocol):
    """The feed of a run's batches as the training loop uses it."""

    waited: float
    """Seconds that devices have waited for batches in all."""
    mixture: Mixture
    """The sources, whose positions a checkpoint keeps."""

    def __next__(self) -> Batch:
        """Return the next batch: arrays [lanes, ...]."""

    def state(self) -> np.ndarray:
        """Return the position after that batch: int64 [lanes, K]."""

    def restore(self, state: np.ndarray) -> None:
        """Continue after the batch that `state` was taken after."""

    def start(self) -> None:
        """Begin to make batches."""

    def refresh(self, state: Any, frozen: Any = ()) -> None:
        """Use the training state before the step of the next batch, and `frozen`, which the step
        takes beside state and batch."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of that batch beside those of the step."""

    def skipped(self) -> list[str]:
        """Return lines about what was passed over since the last call."""

    def describe(self) -> list[str]:
        """Return lines about the sources of batches."""

    def close(self) -> None:
        """Stop making batches. The feed may be used again."""


class Feed(BatchFeed):
    """Iterates over batches of the rows `lanes` of each global batch of `batch_size` rows, with at
    least the `fields` that an objective needs: arrays [lanes, ...].

    Training repeats forever. With `evaluation` the held-out documents pass once, in order, and
    batches carry `bytes`, how many bytes of text each target stands for (NaN: not known); rows past
    the end are padding. `whole` also evaluates all documents of sources that hold nothing out (for
    `eval.data`). DataError if a source or tokenizer cannot be used.

    `stages` are the shapes of batches by step: all rows of `lanes` are held, and a batch has those
    that its stage takes, [rows, its length, ...]. `metrics` computes metrics of counts.
    A batch without anything in it, since every source gave its epochs, is a DataError unless the
    data `may_end`. `plan`: that of train.epochs.

    `waited` is the seconds that next() has spent waiting in all. Order and state do not depend on
    `workers`, `prefetch` or which lanes are held.
    """

    def __init__(
        self,
        cfg: DataConfig,
        lanes: Sequence[int],
        batch_size: int,
        *,
        evaluation: bool = False,
        whole: bool = False,
        fields: Mapping[str, "Field"] | None = None,
        stages: Stages | None = None,
        metrics: "BatchMetrics | None" = None,
        plan: EpochPlan | None = None,
        may_end: bool = False,
    ):
        if not lanes or min(lanes) < 0 or max(lanes) >= batch_size:
            raise ValueError(f"lanes {list(lanes)} are not rows of a batch of {batch_size}")
        self._cfg = cfg
        self._lanes = list(lanes)
        section = "eval.data" if whole else "data"
        self.mixture = Mixture(
            cfg,
            # An evaluation is a single lane, whose rows spread over the batch
            # (lanes.EvaluationRows).
            open_sources(cfg, evaluation, whole),
            1 if evaluation else batch_size,
            evaluation,
            section,
            fields or {},
            stages,
            plan,
        )
        # For its ConfigError, before anything is compiled.
        lane_class(self.mixture.fields, cfg)
        self._quarantine = self.mixture.quarantine()
        self._notices = self.mixture.notices()
        self._may_end = may_end
        self._batch_size = batch_size
        self._metrics = metrics
        self._counts = np.zeros((0, 0))
        self._state = self.mixture.start(len(self._lanes))
        self._batches: Any = None
        self._closing: threading.Thread | None = None
        self.waited = 0.0

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> Batch:
        """Return the next batch. DataError, with file and record, if a document cannot be read and
        may not be passed over; RuntimeError if a worker process died."""
        start = time.perf_counter()
        self.start()
        batch, news, error = next(self._batches)
        self.waited += time.perf_counter() - start
        # Errors come when the batch that they prevented is due, so all batches before it are
        # trained on.
        try:
            if error is not None:
                raise error
            # Counted here once more: each maker knows its own rows alone, and data.quarantine
            # bounds those of the process.
            for source, document in news.empty.items():
                self._quarantine.empty(source, document)
            for source, (record, count) in news.long.items():
                self._quarantine.long(source, record, count)
            for record, reason in news.damaged.items():
                self._quarantine.add(record, reason)
        except DataError:
            self.close()
            raise
        state = batch.pop("state")
        if self.mixture.evaluation:
            self._state = state
            return batch
        # The last two counts are numbers of documents, not of tokens.
        if not self._may_end and not batch[FED][:, :-2].any():
            self.close()
            raise DataEnded(
                f"{self.mixture.section}.sources: the data ended before batch "
                f"{int(state[0, -1])}: every source has given its epochs; set train.epochs, "
                "from which train.steps follows, or raise the epochs of a source"
            )
        self._state = state
        return self._cut(batch)

    def _cut(self, batch: Batch) -> Batch:
        """Cut a batch that was just made to the rows and length of its stage."""
        stages = self.mixture.stages
        step = int(self._state[0, -1])
        taken = [i for i, lane in enumerate(self._lanes) if stages.takes(step, lane)]
        length = stages.at(step).length
        whole = stages.length
        # Makers write whole rows of every lane, since slots of shared memory have one shape.
        self._counts = batch.pop(FED)[taken]
        if len(taken) == len(self._lanes) and length == whole:
            return batch
        return {
            # An array without positions, such as a label, is cut in rows alone.
            name: array[taken] if array.shape[1:2] != (whole,) else array[taken, :length]
            for name, array in batch.items()
        }

    def state(self) -> np.ndarray:
        """Return the lanes' positions after the batch that next() returned last: int64
        [lanes, K]."""
        return self._state.copy()

    def skipped(self) -> list[str]:
        """Return lines about documents that were passed over since the last call, each once in the
        life of this feed: every record that cannot be read, each source's first document without
        anything to predict, and its 1st, 10th, 100th, ... that is too long for a row."""
        return self._notices.lines(self._quarantine.news())

    def restore(self, state: np.ndarray) -> None:
        """Continue after the batch that `state`, a row for each of this feed's lanes, was taken
        after."""
        if state.shape != (wanted := self.mixture.start(len(self._lanes)).shape):
            # Another shape would be lanes of other batches or sources, whose positions mean
            # something else.
            raise DataError(
                f"the saved position has shape {state.shape}, this feed's is {wanted}: "
                "the batch size or the number of data.sources changed since the checkpoint; "
                "restore them, or start a new run"
            )
        # Batches made ahead follow the old position.
        self.close()
        self._state = np.array(state, np.int64)

    def start(self) -> None:
        """Begin to make batches in the background, as next() does too. Waits for a thread that
        close() left behind, since two must not read the same files."""
        if self._batches is not None:
            return
        if self._closing:
            self._closing.join()
        workers = min(self._cfg.workers, len(self._lanes))
        ahead = self._cfg.prefetch
        if workers:
            # Interleaved: Workers puts row i of a batch together from row i // n of worker i % n.
            parts = [slice(worker, None, workers) for worker in range(workers)]
            self._batches = Workers([self._maker(part) for part in parts], ahead)
        else:
            batches = _Batches(self._maker(slice(None)))
            prefetched = grain.experimental.ThreadPrefetchIterDataset
            self._batches = iter(prefetched(batches, prefetch_buffer_size=ahead))

    def refresh(self, state: Any, frozen: Any = ()) -> None:
        """Do nothing: rows of documents do not depend on the state."""

    def metrics(self) -> dict[str, Any]:
        """Return metrics of that batch, unless they are the same in every batch."""
        if self._metrics is None or not self._metrics.varies:
            return {}
        _, rows, length = self.mixture.stages.at(int(self._state[0, -1]))
        return self._metrics(self._counts, rows, length)

    def close(self) -> None:
        """Stop the thread or the workers. The feed may be used again.

        Workers are killed at once. A thread whose source does not answer in PATIENCE seconds is
        left behind, and a line says so.
        """
        batches, self._batches = self._batches, None
        if batches is None:
            return
        if isinstance(batches, Workers):
            batches.close()
            return
        # In a thread, since Grain joins its own without a limit and a source may never answer.
        self._closing = threading.Thread(target=batches.close, name="closing feed", daemon=True)
        self._closing.start()
        self._closing.join(PATIENCE)
        if self._closing.is_alive():
            names = " or ".join(source.name for source in self.mixture.sources)
            print(
                f"{self.mixture.section}.sources: {names} does not answer: no batch came in "
                f"{PATIENCE:.0f} s; going on without it",
                file=sys.stderr,
                flush=True,
            )

    def describe(self) -> list[str]:
        """Return a line for each source: its name, number of documents, share of the next step,
        byte order marks and CRLF in them, their classes, and keys of records that nothing reads;
        and a warning if documents run together."""
        mixture = self.mixture
        shares = [""]
        if len(mixture.sources) > 1 and not mixture.evaluation:
            step = int(self._state[0, -1]) + 1
            by = mixture.cfg.mixture.by
            shares = [f", {share:.2%} of step {step}'s {by}" for share in mixture.shares(step)]
        lines = [
            f"{source.name}: {len(source)} documents{share}{_describe_marks(source)}"
            f"{_describe_classes(source)}{_describe_unread_keys(source)}"
            for source, share in zip(mixture.sources, itertools.cycle(shares), strict=False)
        ]
        if mixture.cfg.across_documents:
            tokenizer = open_tokenizer(mixture.cfg.tokenizer)
            if not tokenizer.bos and not tokenizer.eos:
                lines.append(
                    "documents run together: data.across_documents, and a tokenizer without BOS "
                    "and EOS; give data.tokenizer.eos"
                )
        return lines

    @property
    def sources(self) -> Sequence[Documents]:
        """The sources that are read."""
        return self.mixture.sources

    def _maker(self, part: slice) -> Rows:
        """Return the rows of some of the lanes, from the feed's position on."""
        lanes = self._lanes[part]
        state = self._state[part]
        if self.mixture.evaluation:
            return EvaluationRows(self.mixture, lanes, self._batch_size, state)
        return Rows(self.mixture, lanes, state)


def _describe_classes(source: Documents) -> str:
    """Describe the first classes and their numbers."""
    shown = [f"{i} {name}" for i, name in enumerate(source.classes[:10])]
    more = ", ..." if len(source.classes) > len(shown) else ""
    return f"; {len(source.classes)} classes: {', '.join(shown)}{more}" if shown else ""


def _describe_unread_keys(source: Documents) -> str:
    """Describe keys that nothing reads, in a few records spread over a source."""
    if not source.record or source.record.kind not in READ:
        return ""
    keys: dict[str, None] = {}
    for _, document in _sample_texts(source):
        with contextlib.suppress(ValueError):  # reported when the record is due
            record = strict_json.parse(document, strict=False)
            keys |= dict.fromkeys(record if isinstance(record, dict) else ())
    read = READ[source.record.kind] | keys_read(source.record)
    unread = [key for key in keys if key not in read]
    return f"; not read: {shortened(', '.join(unread), 200)}" if unread else ""


def _describe_marks(source: Documents) -> str:
    """Describe byte order marks and CRLF in a few documents spread over a source, with advice."""
    marks: dict[str, str] = {}
    for index, document in _sample_texts(source):
        if document.startswith(codecs.BOM_UTF8):
            marks.setdefault(
                "a byte order mark", f"{source.where(index)} (normalize: [bom] drops it)"
            )
        if b"\r\n" in document:
            marks.setdefault("CRLF", f"{source.where(index)} (normalize: [newlines] makes it LF)")
    return "".join(f"; {mark} is kept, as in {where}" for mark, where in marks.items())


def _sample_texts(source: Documents) -> Iterator[tuple[int, bytes]]:
    """Yield a few documents spread over a source, with their numbers; none if they are no texts."""
    # Rounded up, since rounding down would look at up to twice as many.
    for index in range(0, len(source), max(1, -(-len(source) // SAMPLED))):
        try:
            document = source[index]
        except DataError:  # reported when the document is due
            continue
        # Ids and pictures have no byte order marks, line ends or keys.
        if not isinstance(document, bytes):
            return
        yield index, document


class _Batches(grain.IterDataset):
    """A maker's batches as a grain dataset."""

    def __init__(self, maker: Rows):
        super().__init__()
        self._maker = maker

    def __iter__(self) -> "_BatchIterator":
        return _BatchIterator(self._maker)


class _BatchIterator(grain.DatasetIterator):
    def __init__(self, maker: Rows):
        super().__init__()
        self._maker = maker

    def __next__(self) -> Made:
        return next_batch(self._maker)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("a feed restores by a new iterator")
