"""Lanes: row i of every global batch is a deterministic stream of its own.

Lane i of B draws, from each source's global order (order.py), the documents at positions i, B + i,
2B + i, ... (or those that deal.py exchanges), chooses among sources by what each is owed
(mixture.py), and packs them into its rows. It reads nothing of other lanes, so any process, worker
or restart makes the same rows, whatever the number of hosts and devices: a process makes the lanes
whose rows its devices hold. A lane's state is a few integers (position.py): the documents finished
of each source and how far the current one is read. Each row carries the state after it, so rows
that were made ahead and not used do not count. A smaller batch of a stage takes every k-th lane.
"""

import pkgutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maxstack.data.examples import EXTRAS, Segment, Unit
from maxstack.data.mixture import Mixture
from maxstack.data.position import Position
from maxstack.data.quarantine import Quarantine
from maxstack.data.sources import Synthetic
from maxstack.errors import ConfigError, DataError
from maxstack.schema.data import DataConfig

if TYPE_CHECKING:
    from maxstack.schema.objective import RowField as Field

Batch = dict[str, np.ndarray]
TOKENS = "tokens", "targets", "positions", "segments"
FED = "fed"
"""Name of the array with counts of a row, int32 [sources + 2]: tokens of each source, documents
that begin in the row, and those of them that its end cuts."""


class RowWriter:
    """Writes segments into a row one after the other."""

    def __init__(self, mixture: Mixture, row: Batch):
        self._row = row
        self._across = mixture.cfg.across_documents
        self._source_of = mixture.source_of
        self._segments = 0
        self.at = 0
        """Tokens written."""

    def write(self, segment: Segment, start: int, count: int, source: int) -> None:
        """Write `count` pairs of an input and its target of a segment of a source."""
        row = self._row
        span = slice(self.at, self.at + count)
        first = self.at if self._across else 0  # positions count on, or restart with a segment
        self._segments += 1
        row["tokens"][span] = segment.ids[start : start + count]
        # Targets come from the document, not from the row: the last input of a row has its target
        # although that token is an input only in the next row.
        row["targets"][span] = segment.ids[start + 1 : start + count + 1]
        row["positions"][span] = np.arange(first, first + count)
        row["segments"][span] = 1 if self._across else self._segments
        row["mask"][span] = 1
        # After the ones, so that a record's own mask replaces them. Values belong to predicted
        # tokens, hence the shift by one.
        for name in segment.values.keys() & row.keys():
            row[name][span] = segment.values[name][start + 1 : start + count + 1]
        if FED in row:
            row[FED][self._source_of[source]] += count
            # Only the row in which a document begins counts it, however many rows it goes over.
            if start == 0:
                row[FED][-2] += 1
                if count < len(segment.ids) - 1:
                    row[FED][-1] += 1
        self.at += count


class Lane:
    """One row of the global batch: draws documents and packs them. Other kinds of rows derive from
    it and are listed in LANE_CLASSES."""

    packs = True
    """A row has as many documents as there is room for."""

    @classmethod
    def arrays(cls, cfg: DataConfig, fields: Mapping[str, "Field"]) -> dict[str, np.dtype]:
        """Return the arrays of a row by name, with their shapes."""
        kinds: dict[str, Any] = dict.fromkeys(TOKENS, np.int32) | {"mask": np.float32}
        arrays = {name: np.dtype((kind, (cfg.seq_len,))) for name, kind in kinds.items()}
        for name in EXTRAS:
            if field := fields.get(name):
                arrays[name] = np.dtype((field.dtype, (cfg.seq_len, *field.size)))
        return arrays

    def __init__(self, mixture: Mixture, lane: int, quarantine: Quarantine):
        self._mixture = mixture
        self._lane = lane
        self._quarantine = quarantine
        self._packing = mixture.cfg.packing
        self._phase = mixture.phase(lane)
        self._at = Position.start(mixture.counters)
        self._units: list[Unit] = []

    # The tokens of the current document are no part of the state: it is read again after a restore.
    def state(self) -> np.ndarray:
        """Return the position after the last row: int64 [K]."""
        return self._at.packed()

    def restore(self, state: np.ndarray) -> None:
        """Continue after the row that `state` was taken after; the current document is read again
        when needed."""
        self._at = Position.unpacked(state)
        self._units = []

    def begin(self, step: int) -> None:
        """Set the number of batches before that of the next row."""
        self._at.step = step

    @property
    def length(self) -> int:
        """The length of the next row in tokens."""
        return self._mixture.stages.at(self._at.step + 1).length

    def fill(self, row: Batch) -> None:
        """Write the next row into zeroed arrays of shape [seq_len, ...].

        A document of n tokens is n - 1 pairs of an input and its target, so each target counts
        once, in this row or the next. A record's units are written whole.
        """
        writer = RowWriter(self._mixture, row)
        place = self._at
        length = self.length
        while writer.at < length and (unit := self._current()):
            start = 0 if unit.whole else place.offset
            left, room = unit.length - start, length - writer.at
            # An empty row takes the document even if it is longer; it would otherwise never find a
            # row.
            if (unit.whole or self._packing == "fit") and writer.at and left > room:
                return
            for segment in unit.segments:
                writer.write(segment, start, min(len(segment.ids) - 1 - start, room), place.current)
            place.offset += 1 if unit.whole else min(left, room)
            ended = place.offset == (len(self._units) if unit.whole else unit.length)
            if ended or (self._packing == "none" and not unit.whole):
                self._finish()
            if self._packing == "none":
                return

    def _finish(self) -> None:
        """Count the current document as finished."""
        place = self._at
        units = self._units
        used = sum(unit.length for unit in units)
        # Tokens that packing=none cuts off are not read, so the source does not pay for them.
        if self._packing == "none" and units and not units[0].whole:
            used = place.offset
        self._mixture.count(place, place.current, used, self._lane)
        self._leave()

    def _leave(self) -> None:
        """Leave the current document."""
        self._at.offset = 0
        self._at.current = -1
        self._units = []

    def _current(self) -> Unit | None:
        """Return the unit to read on in, or None at the end of an evaluation or of all sources.
        Documents without a target, or that cannot be read, are passed over."""
        mixture = self._mixture
        place = self._at
        passed = 0
        # At weight 0 a source gives nothing, not even the rest of a document. The rest is not
        # counted in the debts, since nobody reads it.
        if place.current >= 0 and not mixture.gives(place.current, place.step + 1):
            place.finished[place.current] += 1
            self._leave()
        # Choose first, read afterwards: the length of a document is not known before it is
        # tokenized, so the choice can only depend on what was counted so far.
        while not self._units:
            if place.current < 0:
                picked = mixture.pick(place, self._phase, self._lane)
                if picked is None:
                    return None
                place.current = picked
            counted = mixture.place(place, place.current, self._lane)
            location = mixture.locate(place.current, counted)
            if location is None:
                place.current = -1
                return None
            number, index = location
            source = mixture.sources[number]
            units = mixture.units(number, index, counted, self._quarantine)
            if units and _size(units) > place.offset:
                self._units = units
                break
            if units and place.offset:
                raise DataError(
                    f"the data changed since the checkpoint: document {counted} of source "
                    f"{source.name} is shorter than what was already read"
                )
            if units and not isinstance(source, Synthetic):
                self._quarantine.empty(source.name, source.where(index))
            self._finish()
            passed += 1
            # Sources repeat without end, so data without any target would be searched for ever.
            if passed > 2 * mixture.documents + 100:
                raise DataError(nothing_to_predict(mixture))
        return self._units[place.offset if self._units[0].whole else 0]


def nothing_to_predict(mixture: Mixture) -> str:
    """Return the message for sources of which no document has a target."""
    names = "; ".join(f"{source.name} (such as {source.where(0)})" for source in mixture.sources)
    long = "" if mixture.cfg.overlong == "error" else f" or longer than {mixture.room_of}"
    return (
        "nothing to predict: every document that was drawn is shorter than 2 tokens"
        f"{long}, from {names}"
    )


def _size(units: list[Unit]) -> int:
    """Return the units of a record, or the pairs of input and target of a document that may be
    split."""
    return len(units) if units[0].whole else units[0].length


class Rows:
    """The rows of some lanes, batch after batch, each with its lane's state after it. Rows of lanes
    that a stage's batch does not take, and positions beyond its length, are zero."""

    def __init__(self, mixture: Mixture, lanes: list[int], state: np.ndarray):
        self.quarantine = mixture.quarantine()
        self._stages = mixture.stages
        kind = lane_class(mixture.fields, mixture.cfg)
        self.arrays = kind.arrays(mixture.cfg, mixture.fields)
        self._numbers, self._state_size = lanes, state.shape[1]
        self._lanes = [kind(mixture, lane, self.quarantine) for lane in lanes]
        self._step = int(state[0, -1])
        for lane, after in zip(self._lanes, state, strict=True):
            lane.restore(after)
        if not mixture.evaluation:
            self.arrays[FED] = np.dtype((np.int32, (len(mixture.cfg.sources) + 2,)))

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def row_type(self) -> np.dtype:
        """The record type of a row with the state after it."""
        return np.dtype([*self.arrays.items(), ("state", np.int64, (self._state_size,))])

    def next(self) -> Batch:
        """Return arrays [lanes, ...] by name, and `state` int64 [lanes, K]."""
        # Also lanes that this batch leaves out: weights and lengths follow the run's step, not the
        # number of rows that a lane gave.
        for lane in self._lanes:
            lane.begin(self._step)
        self._step += 1
        taken = [
            lane if self._stages.takes(self._step, number) else None
            for number, lane in zip(self._numbers, self._lanes, strict=True)
        ]
        batch = self._fill(taken)
        for lane in self._lanes:
            lane.begin(self._step)
        return batch | {"state": np.stack([lane.state() for lane in self._lanes])}

    def _fill(self, lanes: Sequence[Lane | None]) -> Batch:
        """Return arrays with the next row of each lane; zero for None."""
        # Zeros are padding: mask 0 counts nothing, and segment 0 is no document.
        batch = {name: np.zeros(len(lanes), kind) for name, kind in self.arrays.items()}
        for i, lane in enumerate(lanes):
            if lane is not None:
                # The ellipsis keeps a view where a row has a single number; array[i] would be a
                # copy.
                lane.fill({name: array[i, ...] for name, array in batch.items()})
        return batch


class EvaluationRows(Rows):
    """A single pass over the documents by one lane. A batch is the lane's next rows, so that a long
    document spreads over all rows instead of filling one lane while the others are padding.

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
        """Return arrays as Rows.next does, and `bytes` float32: the bytes of text that each target
        stands for."""
        # One lane cannot be entered in the middle, so each process packs every row of the batch.
        batch = self._fill(self._lanes * self._batch_size)
        state = np.tile(self._lanes[0].state(), (len(self), 1))
        return {name: array[self._rows] for name, array in batch.items()} | {"state": state}


LANE_CLASSES = ["maxstack.data.lanes:Lane", "maxstack.data.images:ImageLane"]
"""Kinds of lanes as module:class."""


def lane_class(fields: Mapping[str, "Field"], cfg: DataConfig) -> type[Lane]:
    """Return the first kind of lane that gives all fields of an objective. ConfigError if none
    does."""
    # In front of Lane, which gives the same fields and would be taken first.
    own = [field.lane for field in fields.values() if field.lane]
    best = ["maxstack.data.best_fit:BestFitLane"] if cfg.packing == "best" else []
    for kind in map(pkgutil.resolve_name, [*own, *best, *LANE_CLASSES]):
        arrays = kind.arrays(cfg, fields)
        if {*fields} <= {*arrays, "real"}:
            for name in fields.keys() & arrays.keys():
                made = np.dtype(arrays[name]).base
                wanted = fields[name].dtype
                assert made == wanted, f"field {name}: {wanted}, but {kind.__name__} gives {made}"
            return kind
    missing = sorted({*fields} - {*Lane.arrays(cfg, fields), "real"})
    raise ConfigError(
        f"objective.kind: a batch must hold {', '.join(missing)}, which no kind of data gives"
    )
