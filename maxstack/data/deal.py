"""How a source's documents are dealt to the lanes of a batch: in turn, but for those that make the
lanes equally long.

Lane i of B takes the places i, B + i, 2B + i, ... of a source's order. Documents differ in length,
so lanes that only take turns come to the end of a pass far apart, and a run of so many epochs would
spend its last steps on rows that are mostly padding (EXPERIMENTS.md). Where all lengths are known,
`level` therefore moves documents at the end of each pass: every lane gives its last ones to a pool,
and from there each, the longest first, goes to the lane that has the least so far (longest
processing time first; Graham 1969, doi:10.1137/0117039). A Deal keeps those moves alone, which are
a few documents a lane and pass; all else is arithmetic. The order of a lane's documents stays that
of their places.
"""

import bisect
import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

POOLED = 8
"""Documents of mean length that a lane of mean length gives to the pool."""


class Pass(NamedTuple):
    """A pass over a source, or the part of it that is read."""

    source: int
    first: int
    """Place of its first document in the order of all passes."""
    lengths: np.ndarray
    """float64 [documents], by place."""


def level(passes: Iterable[Pass], sources: int, lanes: int) -> list[np.ndarray]:
    """Moves of each source, int64 [moves, 2] of (place, lane that takes it), by which the lanes'
    totals are level after each of the passes, which follow each other."""
    moves: list[list[tuple[int, int]]] = [[] for _ in range(sources)]
    totals = np.zeros(lanes)
    for source, first, lengths in passes:
        lane_of = (first + np.arange(len(lengths))) % lanes
        totals += np.bincount(lane_of, lengths, lanes)
        floor, pool = totals.mean() - POOLED * lengths.mean(), list[int]()
        for lane in range(lanes):
            own = np.arange((lane - first) % lanes, len(lengths), lanes)[::-1]
            left = totals[lane] - np.cumsum(lengths[own]) + lengths[own]
            given = own[(left > floor) & (lengths[own] > 0)]
            totals[lane] -= lengths[given].sum()
            pool += given.tolist()
        shortest = [(total, lane) for lane, total in enumerate(totals.tolist())]
        heapq.heapify(shortest)
        for at in sorted(pool, key=lambda at: (-lengths[at], at)):
            total, lane = shortest[0]
            heapq.heapreplace(shortest, (total + float(lengths[at]), lane))
            if lane != lane_of[at]:
                moves[source].append((first + at, lane))
        for total, lane in shortest:
            totals[lane] = total
    return [np.array(pairs, np.int64).reshape(-1, 2) for pairs in moves]


class Deal:
    """The places of a source's order that each of `lanes` lanes takes, of `limit` in all."""

    def __init__(self, lanes: int, limit: float, moves: np.ndarray | None = None):
        self._lanes, self._limit, self._moves = lanes, limit, moves
        self._known: dict[int, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {}

    def count(self, lane: int) -> float:
        """Documents that a lane takes in all."""
        own = np.ceil((self._limit - lane) / self._lanes)
        if self._moves is None:
            return max(0.0, own)
        _, added, gone = self._exceptions(lane)
        return max(0.0, own) + len(added) - len(gone)

    def place(self, lane: int, number: int) -> int:
        """The place of a lane's document, which are numbered from 0."""
        if self._moves is not None:
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
        if lane not in self._known:
            assert self._moves is not None
            places, takers = self._moves.T
            gone, added = (
                np.sort(places[places % self._lanes == lane]),
                np.sort(places[takers == lane]),
            )
            own = -((lane - added) // self._lanes) - np.searchsorted(gone, added)
            self._known[lane] = (
                (own + np.arange(len(added))).tolist(),
                added.tolist(),
                (gone // self._lanes - np.arange(len(gone))).tolist(),
            )
        return self._known[lane]
