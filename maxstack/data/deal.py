"""The deal: which documents of a source each lane of a batch takes.

Lane i of B takes the places i, B + i, 2B + i, ... of a source's order. Documents differ in length,
so lanes that only take turns come to the end of a pass far apart, and a run of so many epochs would
spend its last steps on rows that are mostly padding (EXPERIMENTS.md). Where all lengths are known,
`level_lanes` therefore moves documents at the end of each pass: every lane gives its last ones to a
pool, and from there each, the longest first, goes to the lane that has the least so far (longest
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
"""Documents of mean length that a lane gives to the pool at first."""
LEVEL = 0.01
"""The share by which a lane may exceed the mean; if one does, the pool is doubled."""


class EpochPlan(NamedTuple):
    """The plan of a run by train.epochs, made before its first batch."""

    steps: int
    """Batches until no lane has anything left."""
    moves: list[np.ndarray]
    """By source, as `level_lanes` returns them."""

    def mark(self, source: int) -> str:
        """Return what tells this deal of a source's documents from any other."""
        return f"{self.steps} {digest(self.moves[source].tobytes())}"


class Pass(NamedTuple):
    """A pass over a source, or the part of it that is read."""

    source: int
    first: int
    """Place of its first document in the order of all passes."""
    lengths: np.ndarray
    """float64 [documents], by place."""


def level_lanes(passes: Iterable[Pass], sources: int, lanes: int) -> list[np.ndarray]:
    """Return the moves of each source, int64 [moves, 2] of (place, lane that takes it), that make
    the lanes' totals level after each of the passes, which follow each other."""
    moves: list[list[np.ndarray]] = [[np.zeros((0, 2), np.int64)] for _ in range(sources)]
    totals = np.zeros(lanes)
    for source, first, lengths in passes:
        in_turn = (first + np.arange(len(lengths))) % lanes
        taker = in_turn
        pooled = 0
        # Totals carry over, so the next pass evens out what this one leaves.
        before = totals + np.bincount(in_turn, lengths, lanes)
        levelled = before
        # The smallest pool that levels: each document moved is one more entry for each process to
        # keep.
        while levelled.max() > (1 + LEVEL) * levelled.mean() and pooled * lanes < len(lengths):
            pooled = 2 * pooled or POOLED
            taker, levelled = _exchange(before, lengths, in_turn, pooled)
        totals = levelled
        moved = np.flatnonzero(taker != in_turn)
        moves[source].append(np.stack([first + moved, taker[moved]], 1))
    return [np.concatenate(pairs) for pairs in moves]


def _exchange(
    totals: np.ndarray, lengths: np.ndarray, in_turn: np.ndarray, pooled: int
) -> tuple[np.ndarray, np.ndarray]:
    """Move documents through the pool. Return the lane that takes each document of a pass, and the
    lanes' totals after it; `totals` are those of lanes that take turns."""
    taker = in_turn.copy()
    totals = totals.copy()
    floor = totals.mean() - pooled * lengths.mean()
    pool = list[int]()
    for lane in range(len(totals)):
        # From the last document backwards, so that the beginning of a pass keeps its order.
        own = np.arange((lane - in_turn[0]) % len(totals), len(lengths), len(totals))[::-1]
        left = totals[lane] - np.cumsum(lengths[own]) + lengths[own]
        # Documents without targets cost no room, so moving them levels nothing.
        given = own[(left > floor) & (lengths[own] > 0)]
        totals[lane] -= lengths[given].sum()
        pool += given.tolist()
    shortest = [(total, lane) for lane, total in enumerate(totals.tolist())]
    heapq.heapify(shortest)
    # Equal lengths by place, so that every process makes the same deal.
    for at in sorted(pool, key=lambda at: (-lengths[at], at)):
        total, taker[at] = shortest[0]
        heapq.heapreplace(shortest, (total + float(lengths[at]), int(taker[at])))
    for total, lane in shortest:
        totals[lane] = total
    return taker, totals


class Deal:
    """The places of a source's order that each of `lanes` lanes takes, of `limit` in all."""

    def __init__(self, lanes: int, limit: float, moves: np.ndarray | None = None):
        self._lanes = lanes
        self._limit = limit
        self._moves = moves
        self._known: dict[int, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {}

    def count(self, lane: int) -> float:
        """Return how many documents a lane takes in all."""
        in_turn = max(0.0, np.ceil((self._limit - lane) / self._lanes))
        _, added, gone = self._exceptions(lane)
        return in_turn + len(added) - len(gone)

    def place(self, lane: int, number: int) -> int:
        """Return the place of a lane's document; a lane's documents are numbered from 0."""
        numbers, added, gone = self._exceptions(lane)
        before = bisect.bisect_left(numbers, number)
        if before < len(numbers) and numbers[before] == number:
            return added[before]
        number -= before  # numbers of its own turns alone
        # Each document that was given away before this one moves it on by a turn.
        number += bisect.bisect_right(gone, number)
        return number * self._lanes + lane

    def _exceptions(self, lane: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return the numbers of the documents that a lane takes from others and their places, and
        for each document that another lane takes from it, how many that it keeps come before."""
        if self._moves is None:
            return (), (), ()
        if lane not in self._known:
            places, takers = self._moves.T
            gone = np.sort(places[places % self._lanes == lane])
            added = np.sort(places[takers == lane])
            # Own turns before the added place, rounded up, less those that were given away.
            own = -((lane - added) // self._lanes) - np.searchsorted(gone, added)
            self._known[lane] = (
                (own + np.arange(len(added))).tolist(),
                added.tolist(),
                (gone // self._lanes - np.arange(len(gone))).tolist(),
            )
        return self._known[lane]
