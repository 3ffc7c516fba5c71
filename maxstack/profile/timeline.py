"""Whole steps of a trace, and the time of each operation in them, where several run at once."""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from maxstack.errors import DataError
from maxstack.profile.planes import HIDDEN, Event, Program, Trace

OUTER, BESIDE, OWN = range(3)
"""Levels of operations: a loop or call around others; what runs beside the device's work, such as a
collective or a copy; that work."""


@dataclasses.dataclass
class Run:
    """A whole step on one device: it begins where the run before ended, and ends with its last
    operation. Times in ns."""

    device: int
    step: int
    begin: float
    started: float
    """Begin of its first operation."""
    end: float
    events: list[Event]
    """Those of the step's program, then those of other programs at the time."""


@dataclasses.dataclass
class Timeline:
    """Whole steps of a trace, by device and time; `dropped`: runs of the program that the trace
    holds in part, or that belong to no step that was asked for."""

    program: Program
    runs: list[Run]
    dropped: int

    @property
    def steps(self) -> list[int]:
        """Numbers of the whole steps."""
        return sorted({run.step for run in self.runs})


def timeline(
    trace: Trace, entry: Sequence[str], known: Collection[str], steps: Sequence[int]
) -> Timeline:
    """The whole steps among `steps`, the numbers of those that ran while the trace was taken, the
    last of which ended before it did.

    `entry`: instructions of the program's entry computation in their order, `known`: of all its
    computations. A run is whole where it has every instruction of the entry that any run has.
    DataError where none is.
    """
    program = _program(trace.events, known)
    own: dict[int, list[Event]] = collections.defaultdict(list)
    others: dict[int, list[Event]] = collections.defaultdict(list)
    for event in trace.events:
        (own if event.program == program else others)[event.device].append(event)
    places = {name: place for place, name in enumerate(entry)}
    runs = {device: _runs(events, places) for device, events in own.items()}
    needed = {event.name for events in own.values() for event in events} & places.keys()
    broken = {
        number
        for by_number in runs.values()
        for number, events in by_number.items()
        if not needed <= {event.name for event in events}
    }
    numbers = _by_time(runs)
    asked = dict(zip(reversed(numbers), reversed(steps), strict=False))
    whole = [
        run
        for device, by_number in runs.items()
        for run in _of_device(device, by_number, others[device], asked, broken)
    ]
    if not whole:
        raise DataError(
            "no whole step is in this trace: take it over more steps (train.profile.steps, --steps)"
        )
    return Timeline(program, whole, len({*numbers} - (asked.keys() - broken)))


def _program(events: Iterable[Event], known: Collection[str]) -> Program:
    """The program that spends most time in instructions that are known."""
    spent: dict[Program, float] = collections.defaultdict(float)
    for event in events:
        if event.name in known and event.program.module:
            spent[event.program] += event.end - event.begin
    if not spent:
        raise DataError(
            f"the trace holds no operation of the step whose text lies beside it; {HIDDEN}"
        )
    return max(spent, key=lambda program: spent[program])


def _runs(events: list[Event], places: dict[str, int]) -> dict[int, list[Event]]:
    """Runs of a program on one device by number. Where the trace does not number them, a run begins
    with the first instruction of the entry that is in the trace, and the last is 0, the one before
    it -1."""
    runs: dict[int, list[Event]] = collections.defaultdict(list)
    if all(event.run is not None for event in events):
        for event in events:
            runs[event.run or 0].append(event)
        return runs
    there = {event.name for event in events} & places.keys()
    first, number, before = min(there, key=places.__getitem__, default=""), 0, ""
    for event in sorted(events, key=lambda event: event.begin):
        if event.name == first and before not in ("", first):
            number += 1
        runs[number].append(event)
        before = event.name
    return {of - number: run for of, run in runs.items()}


def _by_time(runs: dict[int, dict[int, list[Event]]]) -> list[int]:
    """Numbers of all runs, in the order in which they began."""
    begins: dict[int, float] = {}
    for by_number in runs.values():
        for number, events in by_number.items():
            begin = min(event.begin for event in events)
            begins[number] = min(begin, begins.get(number, begin))
    return sorted(begins, key=lambda number: begins[number])


def _of_device(
    device: int,
    runs: dict[int, list[Event]],
    others: list[Event],
    asked: dict[int, int],
    broken: Collection[int],
) -> Iterable[Run]:
    before = None
    for number in sorted(runs, key=lambda number: min(event.begin for event in runs[number])):
        events = runs[number]
        started, end = min(e.begin for e in events), max(e.end for e in events)
        begin = started if before is None else min(before, started)
        if number in asked and number not in broken:
            between = [e for e in others if begin <= (e.begin + e.end) / 2 <= end]
            yield Run(device, asked[number], begin, started, end, events + between)
        before = end


def shared(begins: np.ndarray, ends: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Time that each interval has to itself: at any moment the highest level that runs has all of
    it, in equal parts. They add up to the time in which anything runs."""
    times, running = _running(begins, ends, levels)
    above = running[::-1].cumsum(0)[::-1] - running
    rate = np.where((running > 0) & (above == 0), 1.0 / np.maximum(running, 1), 0.0)
    done = np.concatenate([np.zeros((3, 1)), (rate * np.diff(times)).cumsum(1)], axis=1)
    first, last = np.searchsorted(times, begins), np.searchsorted(times, ends)
    return done[levels, last] - done[levels, first]


def covered(intervals: Iterable[tuple[float, float]], by: np.ndarray) -> tuple[float, float]:
    """(length of the union of intervals, the part of it in which none of `by`, [n, 2], runs)."""
    rows = np.array([*intervals]).reshape(-1, 2)
    both = np.concatenate([rows, by.reshape(-1, 2)])
    levels = np.repeat([BESIDE, OWN], [len(rows), len(both) - len(rows)])
    times, running = _running(both[:, 0], both[:, 1], levels)
    lengths, inside = np.diff(times), running[BESIDE] > 0
    return lengths[inside].sum(), lengths[inside & (running[OWN] == 0)].sum()


def _running(
    begins: np.ndarray, ends: np.ndarray, levels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """All moments at which anything begins or ends, and how many of each level run after each."""
    times = np.unique(np.concatenate([begins, ends]))
    change = np.zeros((3, len(times)))
    np.add.at(change, (levels, np.searchsorted(times, begins)), 1)
    np.add.at(change, (levels, np.searchsorted(times, ends)), -1)
    return times, change.cumsum(1)[:, :-1]
