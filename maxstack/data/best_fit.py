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
    place: int
    """The document's place in the window."""


class BestFitLane(Lane):
    """Rows of a window of documents, packed together. A position inside of a window is that before
    it and the number of rows that were given, so restoring reads the window again, and packs what
    is left anew wherever rows became longer or shorter."""

    def __init__(self, mixture: Mixture, lane: int, quarantine: Quarantine):
        super().__init__(mixture, lane, quarantine)
        self._rows: list[list[Piece]] = []
        """Those that are left of the window, the next one last."""
        self._packed = 0
        """The length by which they were packed."""
        self._before, self._given = self._at.copy(), 0
        """The position before the window, and how many of its rows were given."""
        self._resumes = 0

    def state(self) -> np.ndarray:
        """int64 [K]: the packed position before the window and the rows given, or after its last
        row that after it."""
        if self._resumes or self._rows:
            before = self._before.copy()
            before.current = WINDOW - before.step
            before.offset = self._resumes or self._given
            before.step = self._at.step
            return before.packed()
        return self._at.packed()

    def restore(self, state: np.ndarray) -> None:
        self._at, self._units, self._rows = Position.unpacked(state), [], []
        begun, given = self._at.current, self._at.offset
        self._at.current, self._at.offset, self._resumes = -1, 0, 0
        if begun >= 0 and given:  # packed otherwise before: the rest of the document is passed over
            self._at.finished[begun] += 1
        self._before = self._at.copy()
        if begun <= WINDOW:
            self._before.step, self._resumes = WINDOW - begun, given

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
                writer.write(segment, piece.start, count, piece.source)
        self._given += 1

    def _next_row(self) -> bool:
        """True with the next row, of the length of its step, at the end of `_rows`; False where the
        data ended."""
        if not self._rows:
            self._draw()
        elif self._packed != self.length:
            left = [piece for row in self._rows for piece in row]
            self._pack(_join_parts(left))
        return bool(self._rows)

    def _replay(self) -> None:
        """Come to where the window stood: it is drawn again, and the rows that were given left
        out."""
        now, self._at.step, stages = self._at.step, self._before.step, self._mixture.stages
        for _ in range(self._resumes):
            while not stages.takes(self._at.step + 1, self._lane):
                self._at.step += 1
            if self._next_row():
                self._rows.pop()
            self._at.step += 1
        self._at.step, self._given, self._resumes = now, self._resumes, 0

    def _draw(self) -> None:
        """Draw the documents of the next window, and pack them."""
        self._before, self._given = self._at.copy(), 0
        pieces, tokens = list[Piece](), 0
        while tokens < self._mixture.cfg.window * self.length and self._current():
            source = self._at.current
            for unit in self._units:
                pieces.append(Piece(unit, 0, unit.length, source, len(pieces)))
                tokens += unit.length
            self._finish()
        self._pack(pieces)

    def _pack(self, pieces: Sequence[Piece]) -> None:
        """Cut and pack what is left of documents into rows."""
        length, cut = self.length, list[Piece]()
        for piece in pieces:
            end = piece.start + piece.length
            step = piece.length if piece.unit.whole else length
            cut += [
                piece._replace(start=start, length=min(step, end - start))
                for start in range(piece.start, end, step)
            ]
        self._rows, self._packed = pack_rows(cut, length)[::-1], length


def _join_parts(pieces: Sequence[Piece]) -> list[Piece]:
    """In the order of their documents, with the parts of a document that follow each other as
    one."""
    joined = list[Piece]()
    for piece in sorted(pieces, key=lambda piece: (piece.place, piece.start)):
        last = joined[-1] if joined else None
        if last and last.place == piece.place and last.start + last.length == piece.start:
            joined[-1] = last._replace(length=last.length + piece.length)
        else:
            joined.append(piece)
    return joined


def pack_rows(pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
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
