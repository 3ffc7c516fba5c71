"""Best-fit packing: each document goes to the row that it fills best (Ding et al. 2024,
arXiv:2404.10830).

A lane draws documents until they fill `data.window` rows. Documents longer than a row are cut into
pieces of a row's length; records are never cut. Pieces are placed from the longest to the shortest,
each into the row with the least room that still holds it (best-fit decreasing), so most rows are
full and few documents are cut. Rows are then given in the order of their first documents, which
keeps the order of the data.

A window would be a large state, so a position inside of one is the position before it and how many
of its rows were given; restoring draws and packs the window again and leaves these out. Where the
length of rows changes inside of a window, the pieces that are left are joined and packed anew.
"""

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxstack.data.examples import Unit
from maxstack.data.lanes import Batch, Lane, RowWriter
from maxstack.data.mixture import Mixture
from maxstack.data.position import WINDOW, Position
from maxstack.data.quarantine import Quarantine


class Piece(NamedTuple):
    """A part of a document that stands in one row."""

    unit: Unit
    start: int
    length: int
    """Tokens."""
    source: int
    place: int
    """The document's place in the window."""


class BestFitLane(Lane):
    """A lane whose rows are packed by window."""

    def __init__(self, mixture: Mixture, lane: int, quarantine: Quarantine):
        super().__init__(mixture, lane, quarantine)
        self._rows: list[list[Piece]] = []
        """The rows that are left of the window, in reverse, so that pop() takes the next one."""
        self._packed = 0
        """The row length by which they were packed."""
        self._before = self._at.copy()
        """The position before the window."""
        self._given = 0
        """How many rows of the window were given."""
        self._resumes = 0
        """How many rows of the window to leave out after restoring, until it is packed again."""

    def state(self) -> np.ndarray:
        """Return the position before the window with the number of rows given, or after the last
        row of a window the position after it: int64 [K]."""
        if self._resumes or self._rows:
            before = self._before.copy()
            # A window is marked by values of `current` that no source has, so positions of every
            # packing have the same shape.
            before.current = WINDOW - before.step
            before.offset = self._resumes or self._given
            before.step = self._at.step
            return before.packed()
        return self._at.packed()

    def restore(self, state: np.ndarray) -> None:
        self._at = Position.unpacked(state)
        self._units = []
        self._rows = []
        self._resumes = 0
        begun = self._at.current
        given = self._at.offset
        self._at.current = -1
        self._at.offset = 0
        if begun >= 0 and given:  # another packing began the document: its rest is passed over
            self._at.finished[begun] += 1
        self._before = self._at.copy()
        # The window may have been packed at an earlier step, with another row length.
        if begun <= WINDOW:
            self._before.step = WINDOW - begun
            self._resumes = given

    def fill(self, row: Batch) -> None:
        """Write the next row of the window into zeroed arrays of shape [seq_len, ...]."""
        if self._resumes:
            self._replay()
        if not self._next_row():
            return
        writer = RowWriter(self._mixture, row)
        for piece in self._rows.pop():
            for segment in piece.unit.segments:
                count = len(segment.ids) - 1 if piece.unit.whole else piece.length
                # A whole unit may have several segments, of which `length` is the sum.
                writer.write(segment, piece.start, count, piece.source)
        self._given += 1

    def _next_row(self) -> bool:
        """Make the last of `_rows` the next one, of the length of its step. Return False at the
        end of the data."""
        if not self._rows:
            self._draw()
        elif self._packed != self.length:
            # Rows of the old length would not fit, or would waste a longer row.
            self._pack(_join_parts([*itertools.chain(*self._rows)]))
        return bool(self._rows)

    def _replay(self) -> None:
        """Draw and pack the window again, and leave out the rows that were given. Each row is
        replayed at its own step, since stages change the length by which a window is packed."""
        now = self._at.step
        self._at.step = self._before.step
        for _ in range(self._resumes):
            # Batches that left this lane out took none of the window's rows.
            while not self._mixture.stages.takes(self._at.step + 1, self._lane):
                self._at.step += 1
            if self._next_row():
                self._rows.pop()
            self._at.step += 1
        self._at.step = now
        self._given = self._resumes
        self._resumes = 0

    def _draw(self) -> None:
        """Draw the documents of the next window, and pack them."""
        self._before = self._at.copy()
        self._given = 0
        pieces = list[Piece]()
        tokens = 0
        # Documents are counted as finished when they are drawn; a position inside of the window is
        # the one before it, so none of them is lost.
        while tokens < self._mixture.cfg.window * self.length and self._current():
            source = self._at.current
            for unit in self._units:
                pieces.append(Piece(unit, 0, unit.length, source, len(pieces)))
                tokens += unit.length
            self._finish()
        self._pack(pieces)

    def _pack(self, pieces: Sequence[Piece]) -> None:
        """Cut pieces that are longer than a row, and pack all into rows."""
        length = self.length
        cut = list[Piece]()
        for piece in pieces:
            end = piece.start + piece.length
            step = piece.length if piece.unit.whole else length
            cut += [
                piece._replace(start=start, length=min(step, end - start))
                for start in range(piece.start, end, step)
            ]
        self._rows = pack_rows(cut, length)[::-1]
        self._packed = length


def _join_parts(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces in the order of their documents, joining neighbours of the same document."""
    joined = list[Piece]()
    for piece in sorted(pieces, key=lambda piece: (piece.place, piece.start)):
        last = joined[-1] if joined else None
        if last and last.place == piece.place and last.start + last.length == piece.start:
            joined[-1] = last._replace(length=last.length + piece.length)
        else:
            joined.append(piece)
    return joined


def pack_rows(pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
    """Return rows of at most `length` tokens. Rows, and pieces in a row, are in the order of the
    documents."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    # A stable sort: pieces of equal length stay in the order of documents, in every process.
    for i in sorted(range(len(pieces)), key=lambda i: -pieces[i].length):
        # Row numbers begin at 0, so -1 finds the first row with at least this room.
        at = bisect.bisect_left(room, (pieces[i].length, -1))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        bisect.insort(room, (left - pieces[i].length, row))
    packed = []
    for numbers in sorted(map(sorted, rows)):
        packed.append([pieces[i] for i in numbers])
    return packed
