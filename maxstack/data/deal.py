"""How a source's documents are dealt to the lanes of a batch: in turn, but for those that make the
lanes equally long.

Lane i of B takes the places i, B + i, 2B + i, ... of a source's order. Documents differ in length,
so lanes that only take turns come to the end of a pass far apart, and a run of so many epochs would
spend its last steps on rows that are mostly padding (EXPERIMENTS.md). Where all lengths are known,
`level` therefore moves documents at the end of each pass: every lane gives its last ones to a pool,
and from there each, the longest first, goes to the lane that has the least so far (longest
processing time first; Graham 1969, doi:10.1137/0117039). A Deal keeps those moves alone; all else
is arithmetic. The order of a lane's documents stays that of their places.
"""

import bisect
import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from maxstack.data.files import digest

POOLED = 8
"""Documents of mean length that a lane of mean length gives to the pool at first."""
LEVEL = 0.01
"""What a lane may have more than the mean; where one has, the pool is doubled."""


class EpochPlan(NamedTuple):
    """What is known of a run by train.epochs before its first batch."""

    steps: int
    """Batches until no lane has anything left."""
    moves: list[np.ndarray]
    """By source, as of `level`."""

    def mark(self, source: int) -> str:
        """What tells how a source's documents are dealt from any other way."""
        return f"{self.steps} {digest(self.moves[source].tobytes())}"


class Pass(NamedTuple):
    """A pass over a source, or the part of it that is read."""

    source: int
    first: int
    """Place of its first document in the order of all passes."""
    lengths: np.ndarray
    """float64 [documents], by place."""


def level_lanes(passes: Iterable[Pass], sources: int, lanes: int) -> list[np.ndarray]:
    """Moves of each source, int64 [moves, 2] of (place, lane that takes it), by which the lanes'
    totals are level after each of the passes, which follow each other."""
    moves: list[list[np.ndarray]] = [[np.zeros((0, 2), np.int64)] for _ in range(sources)]
    totals = np.zeros(lanes)
    for source, first, lengths in passes:
        in_turn = (first + np.arange(len(lengths))) % lanes
        taker, pooled = in_turn, 0
        levelled = before = totals + np.bincount(in_turn, lengths, lanes)
        while levelled.max() > (1 + LEVEL) * levelled.mean() and pooled * lanes < len(lengths):
            pooled = 2 * pooled or POOLED
            taker, levelled = _exchange(before, lengths, in_turn, pooled)
        totals, moved = levelled, np.flatnonzero(taker != in_turn)
        moves[source].append(np.stack([first + moved, taker[moved]], 1))
    return [np.concatenate(pairs) for pairs in moves]


def _exchange(
    totals: np.ndarray, lengths: np.ndarray, in_turn: np.ndarray, pooled: int
) -> tuple[np.ndarray, np.ndarray]:
    """The lane that takes each document of a pass, and the lanes' totals after it; `totals`: those
    where lanes take turns."""
    taker, totals = in_turn.copy(), totals.copy()
    floor, pool = totals.mean() - pooled * lengths.mean(), list[int]()
    for lane in range(len(totals)):
        own = np.arange((lane - in_turn[0]) % len(totals), len(lengths), len(totals))[::-1]
        left = totals[lane] - np.cumsum(lengths[own]) + lengths[own]
        given = own[(left > floor) & (lengths[own] > 0)]
        totals[lane] -= lengths[given].sum()
        pool += given.tolist()
    shortest = [(total, lane) for lane, total in enumerate(totals.tolist())]
    heapq.heapify(shortest)
    for at in sorted(pool, key=lambda at: (-lengths[at], at)):
        total, taker[at] = shortest[0]
        heapq.heapreplace(shortest, (total + float(lengths[at]), int(taker[at])))
    for total, lane in shortest:
        totals[lane] = total
    return taker, totals


class Deal:
    """The places of a source's order that each of `lanes` lanes takes, of `limit` in all."""

    def __init__(self, lanes: int, limit: float, moves: np.ndarray | None = None):
        self._lanes, self._limit, self._moves = lanes, limit, moves
        self._known: dict[int, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {}

    def count(self, lane: int) -> float:
        """Documents that a lane takes in all."""
        in_turn = max(0.0, np.ceil((self._limit - lane) / self._lanes))
        _, added, gone = self._exceptions(lane)
        return in_turn + len(added) - len(gone)

    def place(self, lane: int, number: int) -> int:
        """The place of a lane's document, which are numbered from 0."""
        numbers, added, gone = self._exceptions(lane)
        before = bisect.bisect_left(numbers, number)
        if before < len(numbers) and numbers[before] == number:
            return added[before]
        number -= before
        number += bisect.bisect_right(gone, number)
        return number * self._lanes + lane

    def _exceptions(self, lane: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """(Numbers that documents from other lanes have, their places; of each that another lane
        took, how many of its turn that nobody took come before it)."""
        if self._moves is None:
            return (), (), ()
        if lane not in self._known:
            places, takers = self._moves.T
            gone = np.sort(places[places % self._lanes == lane])
            added = np.sort(places[takers == lane])
            own = -((lane - added) // self._lanes) - np.searchsorted(gone, added)
            self._known[lane] = (
                (own + np.arange(len(added))).tolist(),
                added.tolist(),
                (gone // self._lanes - np.arange(len(gone))).tolist(),
            )
        return self._known[lane]
