"""Traces of jax's profiler: what ran on the devices of a process, and what its host did.

Planes, lines and statistics are named as XLA's xplane_schema.cc names them. A CPU's operations run
in threads of the plane /host:CPU; a GPU's plane has a line for each of its streams, a TPU's the
lines XLA Ops, Async XLA Ops and XLA Modules.
"""

import bisect
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from maxstack.errors import DataError

_DEVICE = re.compile(r"/device:(GPU|TPU):(\d+)")
_TPU_OP = re.compile(r"%?([\w.-]+)")
_SKIPPED = ("ThreadpoolListener::", "$")
"""Beginnings of names in a host's threads: of its pools, and calls of Python."""
HIDDEN = (
    "on a GPU, XLA's command buffers hide them: xla.flags={xla_gpu_enable_command_buffer: ''} runs "
    "without"
)
_SUCCESSORS = "ThunkExecutor::Execute"
"""What waited for an operation, run by the thread that did its last part."""
_SLACK = 20_000
"""ns from the end of those to the event that says that the operation ended."""
STEP = "train step"
"""Name of the annotation of a step, whose number is its `step_num`."""


class Program(NamedTuple):
    """A program that ran: XLA's name of its module, and the number that tells programs of one name
    apart."""

    module: str
    number: int | None


@dataclasses.dataclass(slots=True)
class Event:
    """An operation that ran on a device, from `begin` to `end` in ns."""

    device: int
    program: Program
    name: str
    """That of its instruction; of what belongs to no program, such as a copy, the event's own."""
    begin: float
    end: float
    run: int | None
    """Number of its run of the program; None where the trace does not say."""
    shown: float
    """ns that a viewer of the trace shows for it. On a CPU that is the call alone, of an operation
    that goes on in other threads after it."""
    beside: bool = False
    """True of what runs beside a device's operations: copies, and a TPU's asynchronous
    operations."""


class Span(NamedTuple):
    """A stretch of the thread of the loop, in ns, and the number of a step."""

    name: str
    begin: float
    end: float
    step: int | None


@dataclasses.dataclass
class Trace:
    """What one process recorded. `platform`: cpu, gpu or tpu."""

    platform: str
    events: list[Event]
    spans: list[Span]


def read(path: Path) -> Trace:
    """The trace in an xplane.pb file. DataError where it is none, or holds no operation of a
    device."""
    from jax.profiler import ProfileData

    try:
        planes = [*ProfileData.from_file(str(path)).planes]
    except Exception as error:  # jaxlib has no class of its own for this
        raise DataError(f"{path}: is no trace that jax's profiler wrote: {error}") from error
    events: list[Event] = []
    spans: list[Span] = []
    platform = "cpu"
    for plane in planes:
        if device := _DEVICE.fullmatch(plane.name):
            platform = device[1].lower()
            events += (_of_gpu if platform == "gpu" else _of_tpu)(plane, int(device[2]))
    for plane in planes:
        if plane.name == "/host:CPU":
            of_host = [*_of_host(plane, spans)]
            events += of_host if platform == "cpu" else []
    if not events:
        raise DataError(f"{path}: no operation of a device is in this trace; {HIDDEN}")
    return Trace(platform, events, sorted(spans, key=lambda span: span.begin))


def _of_host(plane: Any, spans: list[Span]) -> Iterator[Event]:
    """Operations of CPU devices; adds the spans of the loop's thread to `spans`.

    An operation that goes on in other threads after its call has returned ends with an event of the
    same context, which the pair _p and _c numbers. The thread that does its last part first runs
    what waited for it, and then writes that event: so it ended where those began.
    """
    calls: dict[int, Event] = {}
    ends: dict[int, list[float]] = {}
    for line in plane.lines:
        own: list[Span] = []
        around: list[tuple[float, float]] = []
        for event in line.events:
            if event.name.startswith(_SKIPPED):
                continue
            stats = dict(event.stats)
            if "hlo_op" in stats:
                program = Program(stats["hlo_module"], stats.get("program_id"))
                device, run = stats.get("device_ordinal", 0), stats.get("run_id")
                begin, end = event.start_ns, event.end_ns
                calls[stats.get("_p", -len(calls) - 1)] = Event(
                    device, program, stats["hlo_op"], begin, end, run, end - begin
                )
            elif event.name == _SUCCESSORS:
                while around and around[-1][1] <= event.start_ns - _SLACK:
                    around.pop()
                around.append((event.start_ns, event.end_ns))
            elif event.name.startswith("end: "):
                at = event.start_ns
                ran = [begin for begin, end in around if at - _SLACK <= end <= at]
                ends[stats.get("_c", 0)] = [*ran, at]
            else:
                own.append(Span(event.name, event.start_ns, event.end_ns, stats.get("step_num")))
        if any(span.name == STEP for span in own):
            spans += own
    for context, call in calls.items():
        ended = (at for at in ends.get(context, ()) if at >= call.begin)
        call.end = max(call.end, next(ended, 0.0))
        yield call


def _of_gpu(plane: Any, device: int) -> Iterator[Event]:
    """Kernels and copies on the streams of a GPU."""
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                stats = dict(event.stats)
                program = Program(stats.get("hlo_module", ""), stats.get("program_id"))
                name = stats.get("hlo_op", event.name)
                beside = "hlo_op" not in stats and event.name.startswith("Mem")
                yield _event(device, program, name, event, stats.get("run_id"), beside)


def _of_tpu(plane: Any, device: int) -> Iterator[Event]:
    """Operations on a TPU's core, and those that run beside it; their program and its run are those
    of the module that runs at the time."""
    lines = {line.name: line for line in plane.lines}
    modules = sorted(
        (event.start_ns, event.end_ns, event.name, dict(event.stats))
        for event in (lines["XLA Modules"].events if "XLA Modules" in lines else ())
    )
    begins = [begin for begin, *_ in modules]
    for name in ("XLA Ops", "Async XLA Ops"):
        for event in lines[name].events if name in lines else ():
            at = bisect.bisect(begins, event.start_ns) - 1
            program, run = Program("", None), None
            if at >= 0 and event.start_ns < modules[at][1]:
                _, _, title, stats = modules[at]
                module, _, fingerprint = title.rstrip(")").partition("(")
                program = Program(module, int(fingerprint) if fingerprint.isdecimal() else None)
                run = stats.get("run_id", at)
            found = _TPU_OP.match(event.name)
            instruction, beside = found[1] if found else event.name, name != "XLA Ops"
            yield _event(device, program, instruction, event, run, beside)


def _event(
    device: int, program: Program, name: str, event: Any, run: int | None, beside: bool
) -> Event:
    begin, end = event.start_ns, event.end_ns
    return Event(device, program, name, begin, end, run, end - begin, beside)
