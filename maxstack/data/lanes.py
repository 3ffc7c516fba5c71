"""Lanes: row i of every global batch is a deterministic stream of its own, the same in any process
or worker.

Lane i of B draws, from each source's global order, the documents at positions i, B + i, 2B + i, ...
and packs them into its rows. Its state is a few integers: documents finished per source, and the
tokens already used of the current document.
"""

import functools
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maxstack.data.documents import Documents, part_at, text_hash
from maxstack.data.examples import EXTRAS, Segment, Unit, units_of
from maxstack.data.order import Order
from maxstack.data.sources import Synthetic
from maxstack.data.tokenizers import open_tokenizer, sized_tokens_of, tokens_of
from maxstack.errors import ConfigError, DataError
from maxstack.schema.data import DataConfig

if TYPE_CHECKING:
    from maxstack.schema.objective import RowField as Field

Batch = dict[str, np.ndarray]
TOKENS = "tokens", "targets", "positions", "segments"
_NAMED = 5


class News(NamedTuple):
    """Documents that were passed over, each to be reported once."""

    damaged: dict[str, str]
    """Records that cannot be read, and why."""
    empty: dict[str, str]
    """Sources, and their first document without anything to predict."""
    long: dict[str, tuple[str, int]]
    """Sources, their first record that was too long, and how many of them there were."""


def no_news() -> News:
    """None so far."""
    return News({}, {}, {})


class Quarantine:
    """The records that a feed passes over. Those that cannot be read are counted and reported once
    each, and `key` allows at most `most` of them; of empty ones the first of a source is
    reported."""

    def __init__(self, most: int, key: str):
        self._most, self._key = most, key
        self._damaged: set[str] = set()
        self._empty: set[str] = set()
        self._news = no_news()

    def add(self, record: str, reason: str) -> None:
        """Pass over a record; `reason` names its file and number. DataError if there are too
        many."""
        if record not in self._damaged:
            self._damaged.add(record)
            self._news.damaged[record] = reason
        if len(self._damaged) <= self._most:
            return
        reasons = "; ".join([*self._news.damaged.values()][-_NAMED:])
        advice = f"{reasons}. Repair the file, leave it out with `exclude`, or "
        if not self._most:
            raise DataError(
                f"{advice}set {self._key} to the number of such records that may be passed over"
            )
        raise DataError(
            f"{len(self._damaged)} records cannot be read, but {self._key}={self._most} passes "
            f"over at most that many; the last: {advice}raise {self._key}"
        )

    def empty(self, source: str, document: str) -> None:
        """Pass over a document without anything to predict, by its file and number."""
        if source not in self._empty:
            self._empty.add(source)
            self._news.empty[source] = document

    def long(self, source: str, record: str, count: int = 1) -> None:
        """Count records of a source that were dropped or cut."""
        first, before = self._news.long.get(source, (record, 0))
        self._news.long[source] = first, before + count

    def news(self) -> News:
        """Documents passed over since the last call."""
        news, self._news = self._news, no_news()
        return news


class Notices:
    """Lines for the log about documents that a quarantine passed over, each once."""

    def __init__(self, mixture: "Mixture"):
        self._mixture = mixture
        self._long: dict[str, int] = {}

    def lines(self, news: News) -> list[str]:
        """A line for every record that cannot be read, for each source's first document without
        anything to predict, and its 1st, 10th, 100th, ... that is too long."""
        mixture, section = self._mixture, self._mixture.section
        lines = [f"{section}.quarantine: passed over {reason}" for reason in news.damaged.values()]
        lines += [
            f"{section}.sources: {document} is empty: it has nothing to predict and is "
            f"passed over, as all such documents of {source} are"
            for source, document in news.empty.items()
        ]
        for source, (record, count) in news.long.items():
            before = self._long.get(source, 0)
            self._long[source] = before + count
            if not before or len(str(before + count)) > len(str(before)):
                lines.append(
                    f"{section}.overlong={mixture.cfg.overlong}: {before + count} records of "
                    f"{source} so far are longer than {mixture.room_of}, such as {record}"
                )
        return [line.encode(errors="backslashreplace").decode() for line in lines]


class Mixture:
    """The choice of a lane's next document, a function of the configuration, the lane and the
    documents it has finished.

    `section`: the configuration's key of `cfg`, for messages.
    """

    def __init__(
        self,
        cfg: DataConfig,
        sources: list[Documents],
        batch_size: int,
        evaluation: bool,
        section: str,
        fields: Mapping[str, "Field"],
    ):
        self.maker, self.fields = maker_of(fields, cfg), fields
        self.cfg, self.sources, self.batch_size = cfg, sources, batch_size
        self.evaluation, self.section = evaluation, section
        self.counters = 1 if evaluation else len(sources)
        weights = np.array([source.weight for source in cfg.sources], np.float64)
        self._shares = weights / weights.sum()
        self.room, self.room_of = cfg.seq_len, f"data.seq_len={cfg.seq_len}"
        self._ends = np.cumsum([len(source) for source in sources])
        self.documents = int(self._ends[-1])
        """Number of documents in all sources."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_orders"}

    def phase(self, lane: int) -> np.ndarray:
        """float64 per source in [0, 1): a lane's start in the mixture's cycle, so that lanes do not
        all draw from the same source at once."""
        seeds = [f"{self.cfg.seed} mixture {lane} {source}" for source in range(self.counters)]
        return np.array([text_hash(seed) * 2.0**-64 for seed in seeds])

    def pick(self, finished: np.ndarray, phase: np.ndarray) -> int:
        """The counter of the next document: the source that is furthest behind its share of the
        lane's documents."""
        if self.counters == 1:
            return 0
        return int(np.argmax(self._shares * (finished.sum() + 1) - finished + phase))

    def quarantine(self) -> Quarantine:
        """A new, empty quarantine."""
        return Quarantine(self.cfg.quarantine, f"{self.section}.quarantine")

    def locate(self, counter: int, position: int) -> tuple[int, int] | None:
        """(source, index) of the document at a position of a source's global order; None past the
        end of an evaluation's only pass."""
        if self.evaluation:
            if position >= self.documents:
                return None
            return part_at(self._ends, position)
        if self.cfg.shuffle:
            return counter, self._orders[counter][position]
        return counter, position % len(self.sources[counter])

    def units(self, source: int, index: int, quarantine: Quarantine) -> list[Unit]:
        """A document as units of rows; in an evaluation with `bytes`, of text, that each token
        stands for.

        Empty if it cannot be read and is passed over. DataError if it may not be passed over.
        """
        documents = self.sources[source]
        try:
            if documents.record:
                units = units_of(documents, index, self.cfg, self.fields)
                return self._fitting(units, documents, index, quarantine)
            tokenizer = open_tokenizer(self.cfg.tokenizer)
            limit = self.cfg.longest, self.cfg.beyond
            if not self.evaluation:
                ids = tokens_of(documents, index, tokenizer, *limit)
                return [Unit([Segment(ids, {})], whole=False)]
            ids, sizes = sized_tokens_of(documents, index, tokenizer, *limit)
            return [Unit([Segment(ids, {"bytes": sizes})], whole=False)]
        except TooLong:
            raise
        except DataError as error:
            quarantine.add(f"{source} {index}", str(error))
            return []

    def _fitting(
        self, units: list[Unit], documents: Documents, index: int, quarantine: Quarantine
    ) -> list[Unit]:
        """The units that fit in a row, the others dropped or cut."""
        fitting, most = [], self.room
        for unit in units:
            if unit.length <= most:
                fitting.append(unit)
                continue
            where = documents.where(index)
            text = f"{where}: {unit.length + len(unit.segments)} tokens"
            if self.cfg.overlong == "error":
                raise TooLong(
                    f"{text}, but {self.room_of}; raise it, or set {self.section}.overlong to "
                    "drop or cut"
                )
            quarantine.long(documents.name, text)
            if self.cfg.overlong == "cut" and (short := unit.cut(most)):
                fitting.append(short)
        return fitting

    @functools.cached_property
    def _orders(self) -> list[Order]:
        """The global order of each source, which no pickle holds."""
        return [
            Order(f"{self.cfg.seed} shuffle {index}", len(source))
            for index, source in enumerate(self.sources)
        ]


class TooLong(DataError):
    """A record does not fit in a row, and data.overlong is error."""


class Lane:
    """One row of the global batch: draws documents and packs them. Other row makers derive from
    it and stand in MAKERS."""

    @classmethod
    def arrays(cls, cfg: DataConfig, fields: Mapping[str, "Field"]) -> dict[str, np.dtype]:
        """Arrays of a row, by name, with their shapes."""
        kinds: dict[str, Any] = dict.fromkeys(TOKENS, np.int32) | {"mask": np.float32}
        own = {name: fields[name] for name in EXTRAS if name in fields}
        return {name: np.dtype((kind, (cfg.seq_len,))) for name, kind in kinds.items()} | {
            name: np.dtype((field.dtype, (cfg.seq_len, *field.size))) for name, field in own.items()
        }

    def __init__(self, mixture: Mixture, lane: int, quarantine: Quarantine):
        self._mixture, self._lane, self._quarantine = mixture, lane, quarantine
        self._seq_len, self._packing = mixture.cfg.seq_len, mixture.cfg.packing
        self._phase = mixture.phase(lane)
        self._finished = np.zeros(mixture.counters, np.int64)
        self._offset = 0
        self._units: list[Unit] = []
        self._counter = 0

    def state(self) -> np.ndarray:
        """int64 [K]: documents finished of each source, then tokens used of the current one, or
        units of the current record."""
        return np.append(self._finished, self._offset)

    def restore(self, state: np.ndarray) -> None:
        """Continue after the row that `state` was taken after; the current document is read again
        when needed."""
        self._finished, self._offset = state[:-1].astype(np.int64), int(state[-1])
        self._units = []

    def fill(self, row: Batch) -> None:
        """Write the next row into zeroed arrays of shape [seq_len, ...].

        A document of n tokens is n - 1 pairs of an input and its target, so each target counts
        once, in this row or the next. A record's units are written whole.
        """
        at, segments = 0, 0
        while at < self._seq_len and (unit := self._current()):
            start = 0 if unit.whole else self._offset
            left, room = unit.length - start, self._seq_len - at
            if (unit.whole or self._packing == "fit") and at and left > room:
                return
            for segment in unit.segments:
                segments += 1
                count = min(len(segment.ids) - 1 - start, self._seq_len - at)
                span = slice(at, at + count)
                row["tokens"][span] = segment.ids[start : start + count]
                row["targets"][span] = segment.ids[start + 1 : start + count + 1]
                row["positions"][span] = np.arange(count)
                row["segments"][span] = segments
                row["mask"][span] = 1
                for name in segment.values.keys() & row.keys():
                    row[name][span] = segment.values[name][start + 1 : start + count + 1]
                at += count
            self._offset += 1 if unit.whole else min(left, room)
            ended = self._offset == (len(self._units) if unit.whole else unit.length)
            if ended or (self._packing == "none" and not unit.whole):
                self._finish()
            if self._packing == "none":
                return

    def _finish(self) -> None:
        self._finished[self._counter] += 1
        self._offset, self._units = 0, []

    def _current(self) -> Unit | None:
        """The unit to read on in; documents without a target, or that cannot be read, are passed
        over. None at the end of an evaluation."""
        mixture, passed = self._mixture, 0
        while not self._units:
            self._counter = mixture.pick(self._finished, self._phase)
            position = int(self._finished[self._counter]) * mixture.batch_size + self._lane
            location = mixture.locate(self._counter, position)
            if location is None:
                break
            number, index = location
            source = mixture.sources[number]
            units = mixture.units(number, index, self._quarantine)
            if units and _size(units) > self._offset:
                self._units = units
                break
            if units and self._offset:
                raise DataError(
                    f"the data changed since the checkpoint: document {position} of source "
                    f"{mixture.sources[self._counter].name} is shorter than what was already read"
                )
            if units and not isinstance(source, Synthetic):
                self._quarantine.empty(source.name, source.where(index))
            self._finish()
            passed += 1
            if passed > 2 * mixture.documents + 100:
                names = "; ".join(f"{s.name} (such as {s.where(0)})" for s in mixture.sources)
                long = (
                    "" if mixture.cfg.overlong == "error" else f" or longer than {mixture.room_of}"
                )
                raise DataError(
                    "nothing to predict: every document that was drawn is shorter than 2 tokens"
                    f"{long}, from {names}"
                )
        if not self._units:
            return None
        return self._units[self._offset if self._units[0].whole else 0]


def _size(units: list[Unit]) -> int:
    """Units of a record, or pairs of input and target in a document that may be split; 0 where
    there is nothing to predict."""
    return len(units) if units[0].whole else units[0].length


class Rows:
    """The rows of some lanes, batch after batch, each with its lane's state after it."""

    def __init__(self, mixture: Mixture, lanes: list[int], state: np.ndarray):
        self.quarantine = mixture.quarantine()
        self.arrays = mixture.maker.arrays(mixture.cfg, mixture.fields)
        self._state_size = state.shape[1]
        self._lanes = [mixture.maker(mixture, lane, self.quarantine) for lane in lanes]
        for lane, after in zip(self._lanes, state, strict=True):
            lane.restore(after)

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def row_type(self) -> np.dtype:
        """A row and the state after it, as one record."""
        return np.dtype([*self.arrays.items(), ("state", np.int64, (self._state_size,))])

    def next(self) -> Batch:
        """Arrays [lanes, ...] by name, and `state` int64 [lanes, K]."""
        batch = self._filled(self._lanes)
        return batch | {"state": np.stack([lane.state() for lane in self._lanes])}

    def _filled(self, lanes: list[Lane]) -> Batch:
        """Arrays with the next row of each of `lanes`."""
        batch = {name: np.zeros(len(lanes), kind) for name, kind in self.arrays.items()}
        for i, lane in enumerate(lanes):
            lane.fill({name: array[i, ...] for name, array in batch.items()})
        return batch


class EvaluationRows(Rows):
    """A single pass over the documents by one lane; a batch is the lane's next rows, so that long
    documents spread over all rows.

    Every process packs all rows and keeps those numbered `rows`. The state is that of the pass, the
    same for each row.
    """

    def __init__(self, mixture: Mixture, rows: list[int], batch_size: int, state: np.ndarray):
        super().__init__(mixture, [0], state[:1])
        self._rows, self._batch_size = rows, batch_size
        self.arrays = self.arrays | {"bytes": np.dtype((np.float32, (mixture.cfg.seq_len,)))}

    def __len__(self) -> int:
        return len(self._rows)

    def next(self) -> Batch:
        """Arrays as of Rows.next, and `bytes` float32: bytes of text that each target stands
        for."""
        batch = self._filled(self._lanes * self._batch_size)
        state = np.tile(self._lanes[0].state(), (len(self), 1))
        return {name: array[self._rows] for name, array in batch.items()} | {"state": state}


MAKERS = ["maxstack.data.lanes:Lane", "maxstack.data.images:ImageLane"]
"""module:class of the row makers that there are."""


def maker_of(fields: Mapping[str, "Field"], cfg: DataConfig) -> type[Lane]:
    """The first row maker that gives all fields of an objective; ConfigError where none does."""
    for maker in map(pkgutil.resolve_name, MAKERS):
        arrays = maker.arrays(cfg, fields)
        if {*fields} <= {*arrays, "real"}:
            for name in fields.keys() & arrays.keys():
                made = np.dtype(arrays[name]).base
                wanted = fields[name].dtype
                assert made == wanted, f"field {name}: {wanted}, but {maker.__name__} gives {made}"
            return maker
    missing = sorted({*fields} - {*Lane.arrays(cfg, fields), "real"})
    raise ConfigError(
        f"objective.kind: a batch must hold {', '.join(missing)}, which no kind of data gives"
    )
