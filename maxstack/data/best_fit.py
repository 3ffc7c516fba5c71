"""Best-fit packing: of some rows' worth of documents each goes to the row that it fills best (Ding
et al. 2024, arXiv:2404.10830)."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxstack.data.examples import Unit
from maxstack.data.lanes import Batch, Lane, RowWriter
from maxstack.data.mixture import Mixture
from maxstack.data.position import WINDOW, Position
from maxstack.data.quarantine import Quarantine


class Piece(NamedTuple):
    """What stands in one row of a document."""

    unit: Unit
    start: int
    length: int
    """Tokens."""
    source: int


class BestFitLane(Lane):
    """Rows of a window of documents, packed together. A position inside of a window is that before
    it and the number of rows that were given, so restoring reads the window again."""

    def __init__(self, mixture: Mixture, lane: int, quarantine: Quarantine):
        super().__init__(mixture, lane, quarantine)
        self._rows: list[list[Piece]] = []
        self._before, self._given = self._at.copy(), 0
        """The position before the window, and how many of its rows were given."""
        self._resumes = 0

    def state(self) -> np.ndarray:
        """int64 [K]: the packed position before the window and the rows given, or after its last
        row that after it."""
        if self._resumes or self._given < len(self._rows):
            before = self._before.copy()
            before.current = WINDOW - before.step
            before.offset = self._resumes or self._given
            before.step = self._at.step
            return before.packed()
        return self._at.packed()

    def restore(self, state: np.ndarray) -> None:
        self._at, self._units, self._rows, self._given = Position.unpacked(state), [], [], 0
        self._resumes, self._at.offset = self._at.offset, 0
        self._before, self._at.current = self._at.copy(), -1
        self._before.step, self._before.current = WINDOW - self._before.current, -1

    def fill(self, row: Batch) -> None:
        """Write the next row of the window into zeroed arrays of shape [seq_len, ...]."""
        if self._resumes:
            now, self._at.step = self._at.step, self._before.step
            self._pack()
            self._at.step, self._given, self._resumes = now, self._resumes, 0
        if self._given == len(self._rows):
            self._pack()
        if self._given == len(self._rows):
            return
        writer = RowWriter(self._mixture, row)
        for piece in self._rows[self._given]:
            for segment in piece.unit.segments:
                count = len(segment.ids) - 1 if piece.unit.whole else piece.length
                writer.write(segment, piece.start, count, piece.source)
        self._given += 1

    def _pack(self) -> None:
        """Draw the documents of the next window, and pack them."""
        self._before, pieces, tokens, length = self._at.copy(), list[Piece](), 0, self.length
        while tokens < self._mixture.cfg.window * length and self._current():
            source = self._at.current
            for unit in self._units:
                step = unit.length if unit.whole else length
                pieces += [
                    Piece(unit, start, min(step, unit.length - start), source)
                    for start in range(0, unit.length, step)
                ]
                tokens += unit.length
            self._finish()
        self._rows, self._given = packed(pieces, length), 0


def packed(pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
    """Rows of at most `length` tokens: the pieces from the longest to the shortest, each in the row
    that has the least room for it; rows and what is in them in the order of the documents."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for i in sorted(range(len(pieces)), key=lambda i: -pieces[i].length):
        at = bisect.bisect_left(room, (pieces[i].length, -1))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        bisect.insort(room, (left - pieces[i].length, row))
    return [[pieces[i] for i in row] for row in sorted(map(sorted, rows))]
