"""Finds whole steps in a trace, and the exclusive time of operations that overlap.

Events of the step's program are split into runs, by the trace's number of a run or at the first
instruction of the program. A run with every instruction that any run has is a whole step; runs get
the numbers of the steps from the end. For exclusive times, all starts and ends are sorted; between
two of them the set of running operations is constant, and that time goes in equal parts to those of
the highest level (own work, then what overlaps with it, then loops around)."""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from maxstack.errors import DataError
from maxstack.profile.planes import HIDDEN, Event, Program, Trace

OUTER, BESIDE, OWN = range(3)
"""Levels of operations: a loop or call around others; what overlaps with the device's work, such as
a collective or a copy; the work itself."""


@dataclasses.dataclass
class Run:
    """A whole step on one device: from the end of the previous step to the end of its last
    operation. Times in ns."""

    device: int
    step: int
    begin: float
    started: float
    """Start of its first operation."""
    end: float
    events: list[Event]
    """Those of the step's program, then those of other programs meanwhile."""


@dataclasses.dataclass
class Timeline:
    """Whole steps of a trace, by device and time. `dropped`: steps that the trace holds in part, or
    that were not requested."""

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
    """Find the whole steps among `steps`, the numbers of those that ran during the trace.

    `entry`: instructions of the program's entry computation in order; `known`: of all its
    computations. A step is whole if it has every instruction of the entry that any step has. The
    numbers are assigned from the end, since the trace ends after the last step. DataError if no
    step is whole."""
    program = _program(trace.events, known)
    own: dict[int, list[Event]] = collections.defaultdict(list)
    others: dict[int, list[Event]] = collections.defaultdict(list)
    for event in trace.events:
        # One trace holds evaluation and others beside the step.
        (own if event.program == program else others)[event.device].append(event)
    places = {name: place for place, name in enumerate(entry)}
    runs = {device: _runs(events, places) for device, events in own.items()}
    # Many instructions of the text leave no event, so a whole step is measured by what any step of
    # the trace has, not by the text.
    needed = {event.name for events in own.values() for event in events} & places.keys()
    broken = set()
    for by_number in runs.values():
        for number, events in by_number.items():
            if not needed.issubset(event.name for event in events):
                # A step that is cut on one device is left out on all, so that means are over the
                # same steps.
                broken.add(number)
    numbers = _by_time(runs)
    # From the end: the step before the first was often still under way when the trace began (4 runs
    # in a trace of 3 steps).
    asked = dict(zip(reversed(numbers), reversed(steps), strict=False))
    whole = [
        run
        for device, by_number in runs.items()
        for run in _of_device(device, by_number, others[device], asked, broken)
    ]
    if not whole:
        raise DataError(
            "this trace holds no whole step: trace more steps (train.profile.steps, --steps)"
        )
    return Timeline(program, whole, len({*numbers} - (asked.keys() - broken)))


def _program(events: Iterable[Event], known: Collection[str]) -> Program:
    """Return the program that spends most time in known instructions."""
    spent: dict[Program, float] = collections.defaultdict(float)
    for event in events:
        # By time: another program may share the names of a few small instructions.
        if event.name in known and event.program.module:
            spent[event.program] += event.end - event.begin
    if not spent:
        raise DataError(
            f"the trace holds no operation of the step whose text is saved with it; {HIDDEN}"
        )
    return max(spent, key=lambda program: spent[program])


def _runs(events: list[Event], places: dict[str, int]) -> dict[int, list[Event]]:
    """Split a program's events on one device into runs by number. If the trace has no numbers, a
    run starts with the first instruction of the entry that occurs; the last run is 0, the one
    before -1."""
    runs: dict[int, list[Event]] = collections.defaultdict(list)
    if all(event.run is not None for event in events):
        for event in events:
            runs[event.run or 0].append(event)
        return runs
    there = {event.name for event in events} & places.keys()
    first = min(there, key=places.__getitem__, default="")
    number = 0
    before = ""
    for event in sorted(events, key=lambda event: event.begin):
        # Several events of the first instruction in a row begin one run.
        if event.name == first and before not in ("", first):
            number += 1
        runs[number].append(event)
        before = event.name
    # Numbered from the end, so that devices agree even if one recorded an earlier run too.
    return {of - number: run for of, run in runs.items()}


def _by_time(runs: dict[int, dict[int, list[Event]]]) -> list[int]:
    """Return the numbers of all runs, in the order of their starts."""
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
        started = min(event.begin for event in events)
        end = max(event.end for event in events)
        # The first step has no step before it to wait for.
        begin = started if before is None else min(before, started)
        if number in asked and number not in broken:
            # An event of another program belongs to the step that holds its middle.
            between = [e for e in others if begin <= (e.begin + e.end) / 2 <= end]
            yield Run(device, asked[number], begin, started, end, events + between)
        before = end


def exclusive_times(begins: np.ndarray, ends: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return each interval's own time: every moment goes in equal parts to the running intervals of
    the highest level. The sum is the time in which anything runs."""
    # Between two neighbouring times nothing starts or ends. So one pass over intervals is enough,
    # where a comparison of all pairs would grow with the square of the events.
    times, running = _running(begins, ends, levels)
    # Intervals of higher levels that run at the same moment; they take all of it.
    above = running[::-1].cumsum(0)[::-1] - running
    rate = np.where((running > 0) & (above == 0), 1.0 / np.maximum(running, 1), 0.0)
    # Summed up once, the own time of any interval is a difference of two sums.
    done = np.concatenate([np.zeros((3, 1)), (rate * np.diff(times)).cumsum(1)], axis=1)
    first, last = np.searchsorted(times, begins), np.searchsorted(times, ends)
    return done[levels, last] - done[levels, first]


def total_and_exposed(
    intervals: Iterable[tuple[float, float]], work: np.ndarray
) -> tuple[float, float]:
    """Return the length of the union of intervals, and of the part in which no `work`, [n, 2],
    runs."""
    rows = np.array([*intervals]).reshape(-1, 2)
    both = np.concatenate([rows, work.reshape(-1, 2)])
    levels = np.repeat([BESIDE, OWN], [len(rows), len(both) - len(rows)])
    times, running = _running(both[:, 0], both[:, 1], levels)
    lengths = np.diff(times)
    inside = running[BESIDE] > 0
    return lengths[inside].sum(), lengths[inside & (running[OWN] == 0)].sum()


def _running(
    begins: np.ndarray, ends: np.ndarray, levels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return all start and end times, and how many intervals of each level run after each."""
    times = np.unique(np.concatenate([begins, ends]))
    change = np.zeros((3, len(times)))
    np.add.at(change, (levels, np.searchsorted(times, begins)), 1)
    np.add.at(change, (levels, np.searchsorted(times, ends)), -1)
    return times, change.cumsum(1)[:, :-1]
