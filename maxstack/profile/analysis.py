"""Computes the profile of a run from a trace.

The trace says which instruction ran when on which device (planes.py); the program's text says what
an instruction is and which source line it comes from (origins.py). Whole steps are cut out of the
trace (timeline.py). At every moment of a step, the time goes in equal parts to the operations that
run then, matrix products before collectives and copies, and these before the loops around them; so
the tables add up to the busy time, and a collective's share is its exposed time."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxstack import strict_json
from maxstack.hardware.chips import Chip, by_kind
from maxstack.plan.buffers import Buffer, largest
from maxstack.plan.program import parse
from maxstack.profile import planes, trace_files
from maxstack.profile.origins import Origin, Origins
from maxstack.profile.timeline import (
    BESIDE,
    OUTER,
    OWN,
    Run,
    Timeline,
    exclusive_times,
    timeline,
    total_and_exposed,
)
from maxstack.regular_file import open_regular

BUFFERS = 8
SMALL = 0.01
"""Share of the host's time below which an activity counts as `other`."""
NONE = "(no layer)"


@dataclasses.dataclass(frozen=True)
class Layer:
    """Seconds of a layer by direction."""

    name: str
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds in all directions."""
        return sum(self.seconds.values())


@dataclasses.dataclass(frozen=True)
class Line:
    """Seconds of the operations that come from a source line, called from another."""

    source: str
    caller: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction of the program, run `times` per step. FLOPs and bytes are those of plan."""

    name: str
    opcode: str
    layer: str
    direction: str
    source: str
    times: float
    seconds: float
    elapsed: float
    """Seconds between its starts and ends, including those shared with others."""
    shown: float
    """Seconds that a trace viewer shows for it."""
    flops: float
    bytes: float
    bound: float | None
    """Minimum seconds on this chip; None if chips.yml does not have it."""
    limit: str
    """The resource behind that bound: compute or memory."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind over the same axes: runs per step, bytes that a device sends,
    seconds, and exposed seconds, in which the device does nothing else."""

    kind: str
    axes: tuple[str, ...]
    times: float
    bytes: float
    seconds: float
    exposed: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """A profile. Seconds are per step, averaged over the devices of the trace."""

    run: str
    steps: tuple[int, ...]
    dropped: int
    """Steps that the trace holds in part, or that were not requested."""
    platform: str
    device_kind: str
    devices: int
    """Devices in this trace, which are those of one process."""
    process: int
    processes: int
    unproven: bool
    """True if reading traces of this platform has not been checked on hardware."""
    step_seconds: float
    busy: float
    waiting: float | None
    """Idle seconds spent waiting for a batch; None if metrics.jsonl does not say."""
    attributed: float
    """Share of the busy time whose origin the program's text tells."""
    layers: tuple[Layer, ...]
    lines: tuple[Line, ...]
    operations: tuple[Operation, ...]
    collectives: tuple[Collective, ...]
    host: dict[str, float]
    """Seconds per step of the training loop's thread, by activity."""
    tokens: int
    flops: float
    """FLOPs of a step on all devices, as MFU counts them."""
    mfu: float | None
    bound: float | None
    """Sum of the operations' bounds."""
    memory: dict[str, int]
    usable: int | None
    peak: int | None
    buffers: tuple[Buffer, ...]
    remarks: tuple[str, ...]

    @property
    def idle(self) -> float:
        """Seconds in which the device is idle."""
        return max(0.0, self.step_seconds - self.busy)

    @property
    def directions(self) -> dict[str, float]:
        """Direction -> seconds of all layers."""
        sums: dict[str, float] = collections.defaultdict(float)
        for layer in self.layers:
            for direction, seconds in layer.seconds.items():
                sums[direction] += seconds
        return dict(sums)

    def json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return dataclasses.asdict(self) | {"idle": self.idle, "directions": self.directions}


def summary(run: Path, trace: int | None = None, process: int = 0) -> Summary:
    """Compute the profile of a run from the trace that starts at step `trace`, or from its newest.
    ConfigError if there is none, DataError if it is damaged or holds no whole step."""
    folder = trace_files.choose(run, trace)
    text, facts = trace_files.read(folder)
    # Only files are read here, so that a profile needs neither the model nor a compiler.
    program = parse(text)
    recorded = planes.read(trace_files.planes(folder, process))
    origins = Origins(program, facts.mesh)
    steps = timeline(recorded, [*program.entry.instructions], origins.names, facts.steps)
    spent = _Spent(steps, origins)
    chip = by_kind(facts.device_kind)
    operations = tuple(_operations(spent, chip))
    bounds = [row.bound for row in operations if row.bound is not None]
    # From the end of the step before to the end of this one, so idle time before a step belongs to
    # it.
    seconds = spent.mean(run.end - run.begin for run in steps.runs)
    # All devices of the mesh, though the trace holds those of one process: facts.flops are of all.
    peak = chip.peak_flops * facts.devices * seconds if chip else None
    waiting = _waiting(run, steps)
    remarks = [*_remarks(facts, spent, chip)]
    if waiting is None:
        remarks.append("metrics.jsonl has no rows of these steps, so waiting for input is unknown")
    return Summary(
        run=str(run),
        steps=tuple(steps.steps),
        dropped=steps.dropped,
        platform=recorded.platform,
        device_kind=facts.device_kind,
        devices=len({run.device for run in steps.runs}),
        process=process,
        processes=facts.processes,
        # Readers of GPU and TPU traces are tested on planes made by hand, not on traces of
        # hardware.
        unproven=recorded.platform != "cpu",
        step_seconds=seconds,
        busy=spent.busy,
        waiting=waiting,
        attributed=spent.known / spent.busy,
        layers=tuple(_layers(spent)),
        lines=tuple(_lines(spent)),
        operations=operations,
        collectives=tuple(_collectives(spent)),
        host=_host(recorded.spans, steps.steps),
        tokens=facts.tokens,
        flops=facts.flops,
        mfu=facts.flops / peak if peak else None,
        bound=sum(bounds) if bounds else None,
        memory=facts.memory,
        usable=facts.usable,
        peak=facts.peak,
        buffers=tuple(largest(program, BUFFERS, facts.allocations)),
        remarks=tuple(remarks),
    )


@dataclasses.dataclass
class _Row:
    """Sums over all events of one instruction, in ns."""

    origin: Origin
    times: int = 0
    own: float = 0.0
    elapsed: float = 0.0
    shown: float = 0.0


class _Spent:
    """The time of whole steps by instruction."""

    def __init__(self, steps: Timeline, origins: Origins):
        self.runs = steps.runs
        self.program = steps.program
        self.origins = origins
        sums: dict[str, _Row] = {}
        for _, runs in self.by_device():
            events = [event for run in runs for event in run.events]
            begins = np.array([event.begin for event in events])
            ends = np.array([event.end for event in events])
            # By device, since only operations of one device compete for its time.
            own = exclusive_times(begins, ends, np.array([self.level(event) for event in events]))
            for event, mine in zip(events, own.tolist(), strict=True):
                origin = self.origin(event)
                row = sums.setdefault(origin.name, _Row(origin))
                row.times += 1
                row.own += mine
                row.elapsed += event.end - event.begin
                row.shown += event.shown
        self.rows = [*sums.values()]
        self.busy = self.mean(row.own for row in self.rows)
        self.known = self.mean(row.own for row in self.rows if row.origin.known)

    @functools.cached_property
    def _others(self) -> dict[planes.Program, Origin]:
        """Origins of the events of other programs, one each."""
        # Programs beside the step (evaluation, a save's copies) have no text here; each becomes one
        # row.
        found = {event.program for run in self.runs for event in run.events} - {self.program}
        return {
            program: Origin(
                f"other program: {program.module or 'none'}", "", "", "other", (), OWN, ""
            )
            for program in found
        }

    def by_device(self) -> Iterator[tuple[int, list[Run]]]:
        """Yield devices and their runs."""
        for device in sorted({run.device for run in self.runs}):
            yield device, [run for run in self.runs if run.device == device]

    def origin(self, event: planes.Event) -> Origin:
        """Return the origin of an event."""
        if event.program != self.program:
            return self._others[event.program]
        return self.origins.of(event.name)

    def level(self, event: planes.Event) -> int:
        """Return the level of an event, as in timeline.py."""
        # What a trace marks as overlapping never counts as work, whatever the text says of it.
        return min(self.origin(event).level, BESIDE if event.beside else OWN)

    def mean(self, ns: Iterable[float]) -> float:
        """Return seconds per step and device, from the ns of all."""
        # self.runs holds a row for each step and device, so this is a mean over both.
        return float(sum(ns)) * 1e-9 / len(self.runs)


def _layers(spent: _Spent) -> list[Layer]:
    sums: dict[str, dict[str, float]] = collections.defaultdict(
        lambda: collections.defaultdict(float)
    )
    for row in spent.rows:
        # What the program's text does not hold keeps its own name; what it holds without a scope is
        # NONE.
        name = row.origin.layer or (row.origin.name if not row.origin.opcode else NONE)
        sums[name][row.origin.direction] += spent.mean([row.own])
    rows = [Layer(name, dict(seconds)) for name, seconds in sums.items()]
    return sorted(rows, key=lambda row: -row.total)


def _lines(spent: _Spent) -> list[Line]:
    sums: dict[tuple[str, str], float] = collections.defaultdict(float)
    for row in spent.rows:
        # Padded, as an origin has no, one or two lines.
        sources = (*row.origin.sources, "", "")
        sums[sources[0], sources[1]] += spent.mean([row.own])
    return sorted((Line(*key, seconds) for key, seconds in sums.items()), key=lambda x: -x.seconds)


def _operations(spent: _Spent, chip: Chip | None) -> list[Operation]:
    rows = []
    for row in spent.rows:
        origin = row.origin
        done = origin.cost
        flops = done.flops if done else 0.0
        moved = done.bytes if done else 0.0
        bound = None
        limit = ""
        if chip and done:
            by_flops = flops / chip.flops(done.dtype)
            by_bytes = moved / chip.memory_bandwidth_per_device
            # Products and traffic overlap within an operation, so the longer of both bounds it.
            bound, limit = max((by_flops, "compute"), (by_bytes, "memory"))
        rows.append(
            Operation(
                name=origin.name,
                opcode=origin.opcode,
                layer=origin.layer,
                direction=origin.direction,
                source=next(iter(origin.sources), ""),
                times=row.times / len(spent.runs),
                seconds=spent.mean([row.own]),
                elapsed=spent.mean([row.elapsed]),
                shown=spent.mean([row.shown]),
                flops=flops,
                bytes=moved,
                bound=bound,
                limit=limit,
            )
        )
    return sorted(rows, key=lambda row: -row.seconds)


def _collectives(spent: _Spent) -> list[Collective]:
    """Sum collectives by kind and axes, the longest first."""
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = collections.defaultdict(lambda: [0, 0])
    parts: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = collections.defaultdict(dict)
    for _, runs in spent.by_device():
        intervals: dict[Any, list[tuple[float, float]]] = collections.defaultdict(list)
        works = np.array(
            [(e.begin, e.end) for run in runs for e in run.events if spent.level(e) == OWN]
        )
        for run in runs:
            for name, events in _by_collective(spent, run.events).items():
                sent = spent.origins.of(name).collective
                assert sent
                # By instruction: its many events must not multiply the bytes that it sends per
                # step.
                parts[sent.kind, sent.axes][sent.instruction] = sent
                intervals[sent.kind, sent.axes] += [*_stretches(spent, events)]
        for key, stretches in intervals.items():
            for i, ns in enumerate(total_and_exposed(stretches, works)):
                sums[key][i] += ns
    rows = []
    for key, (whole, exposed) in sums.items():
        times = sum(each.times for each in parts[key].values())
        sent = sum(each.sent for each in parts[key].values())
        seconds = spent.mean([whole])
        rows.append(Collective(*key, times, sent, seconds, spent.mean([exposed])))
    return sorted(rows, key=lambda row: -row.seconds)


def _by_collective(spent: _Spent, events: Iterable[planes.Event]) -> dict[str, list[planes.Event]]:
    """Group the events of collectives by the instruction that starts each."""
    found = collections.defaultdict(list)
    for event in events:
        # The -start, -done and update of a collective are events of their own, which belong
        # together.
        if sent := spent.origin(event).collective:
            found[sent.instruction].append(event)
    return found


def _stretches(spent: _Spent, events: list[planes.Event]) -> Iterator[tuple[float, float]]:
    """Yield the intervals of a collective: its events, and the time between the -start and -done of
    an asynchronous one."""
    started = None
    for event in sorted(events, key=lambda event: event.begin):
        yield event.begin, event.end
        opcode = spent.origin(event).opcode
        if opcode.endswith("-start"):
            started = event.begin if started is None else started
        # Between -start and -done the collective runs in the background, though no event says so.
        elif opcode.endswith("-done") and started is not None:
            yield started, event.end
            started = None


def _host(spans: list[planes.Span], steps: list[int]) -> dict[str, float]:
    """Sum the seconds per step of the loop's thread by outermost named span, and the rest."""
    sums: dict[str, float] = collections.defaultdict(float)
    # Host spans are cut at steps too, so that they are of the same steps as the device's times.
    whole = [span for span in spans if span.name == planes.STEP and span.step in steps]
    for step in whole:
        until = step.begin
        for span in spans:
            # Spans nest; only the outermost counts, or time would count twice.
            if step.begin <= span.begin < step.end and span is not step and span.begin >= until:
                sums[span.name] += span.end - span.begin
                until = span.end
    if not whole:
        return {}
    every = sum(step.end - step.begin for step in whole)
    large = {name: ns for name, ns in sums.items() if ns >= SMALL * every}
    large = dict(sorted(large.items(), key=lambda item: -item[1]))
    rest = every - sum(large.values())
    return {name: ns * 1e-9 / len(whole) for name, ns in {**large, "other": rest}.items()}


def _waiting(run: Path, steps: Timeline) -> float | None:
    """Return the idle seconds per step spent waiting for a batch: what metrics.jsonl says, but no
    more than the device was idle before the step."""
    starved = {
        row["step"]: row["data_wait"] * row["step_seconds"]
        for row in _metrics(run / "metrics.jsonl")
        if row.get("step") in steps.steps and "data_wait" in row
    }
    # Told for all steps or not at all: a mean over some would be of other steps than the rest of
    # the page.
    if not starved.keys() >= {*steps.steps}:
        return None
    # data_wait is measured by the host; the device cannot have waited longer than it was idle.
    waits = [min(starved[each.step], (each.started - each.begin) * 1e-9) for each in steps.runs]
    return sum(waits) / len(waits)


def _metrics(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of metrics.jsonl, without an unfinished last one."""
    if path.is_file():
        with open_regular(path) as file:
            yield from filter(None, map(strict_json.read, strict_json.lines(file, str(path))))


def _remarks(facts: trace_files.Facts, spent: _Spent, chip: Chip | None) -> Iterator[str]:
    if chip is None:
        yield f"chips.yml has no {facts.device_kind}, so there are no bounds and no MFU"
    if facts.device_kind == "cpu" and facts.devices > 1:
        yield (
            "CPU devices share the machine's cores: the time of an operation includes waiting for "
            "a "
            "core"
        )
    named = spent.mean(row.own for row in spent.rows if row.origin.layer)
    # Scopes name the layers of 99.99 % of the busy time, so less than half means that they are
    # missing.
    if named < spent.busy / 2:
        yield (
            "the program's text names few layers: it was compiled by an older maxstack, or its "
            "metadata is stripped"
        )
    if facts.kept:
        yield (
            "the step may come from a file or cache of compiled programs (run.executable, "
            "run.compilation_cache), with the names and lines of the source at that time; "
            "train.profile recompiles if they changed"
        )
    outer = spent.mean(row.own for row in spent.rows if row.origin.level == OUTER)
    # Loops count only where nothing inside them runs, so much of it means that the trace lacks
    # operations.
    if outer > 0.1 * spent.busy:
        yield f"{outer / spent.busy:.0%} of the busy time belongs to loops and calls themselves"
