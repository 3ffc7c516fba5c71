"""Reads traces of jax's profiler: what ran on the devices of a process, and what its host did.

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
"""Prefixes of names in a host's threads that are skipped: thread pools, and Python calls."""
HIDDEN = (
    "on a GPU, XLA's command buffers hide them; disable these with "
    "xla.flags={xla_gpu_enable_command_buffer: ''}"
)
_SUCCESSORS = "ThunkExecutor::Execute"
"""Runs what waited for an operation, in the thread that did its last part."""
_SLACK = 20_000
"""ns from the end of these to the event that marks the end of the operation."""
STEP = "train step"
"""Name of a step's annotation, whose `step_num` is the step."""


class Program(NamedTuple):
    """A program: XLA's name of its module, and a number that distinguishes programs of one name."""

    module: str
    number: int | None


@dataclasses.dataclass(slots=True)
class Event:
    """An operation that ran on a device, from `begin` to `end` in ns."""

    device: int
    program: Program
    name: str
    """Name of the instruction, or of the event itself if it belongs to no program, as a copy."""
    begin: float
    end: float
    run: int | None
    """Number of the program's run; None if the trace does not say."""
    shown: float
    """ns that a trace viewer shows for it. On a CPU that is only the call, even if the operation
    continues in other threads."""
    beside: bool = False
    """True for what overlaps with a device's operations: copies, and a TPU's asynchronous
    operations."""


class Span(NamedTuple):
    """A span of the loop's thread, in ns, and the number of a step."""

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
    """Read the trace in an xplane.pb file. DataError for another file, or one without operations of
    a device."""
    from jax.profiler import ProfileData

    try:
        # jax's own reader, so that tensorflow is not needed.
        planes = [*ProfileData.from_file(str(path)).planes]
    except Exception as error:  # jaxlib has no class of its own for this
        raise DataError(f"{path}: is not a trace of jax's profiler: {error}") from error
    events: list[Event] = []
    spans: list[Span] = []
    platform = "cpu"
    # Accelerators first: whether the host's operations count depends on whether there are any.
    for plane in planes:
        if device := _DEVICE.fullmatch(plane.name):
            platform = device[1].lower()
            events += (_of_gpu if platform == "gpu" else _of_tpu)(plane, int(device[2]))
    for plane in planes:
        if plane.name == "/host:CPU":
            of_host = [*_of_host(plane, spans)]
            events += of_host if platform == "cpu" else []
    if not events:
        raise DataError(f"{path}: this trace holds no operations of a device; {HIDDEN}")
    return Trace(platform, events, sorted(spans, key=lambda span: span.begin))


def _of_host(plane: Any, spans: list[Span]) -> Iterator[Event]:
    """Yield operations of CPU devices; add the spans of the loop's thread to `spans`.

    An operation that continues in other threads after its call returned ends with an `end:` event
    of the same context, which _p and _c number. The thread that does its last part first runs what
    waited for it and only then writes that event, so the operation ended when these began."""
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
                # Calls without a context get negative keys, so that none replaces another.
                calls[stats.get("_p", -len(calls) - 1)] = Event(
                    device, program, stats["hlo_op"], begin, end, run, end - begin
                )
            # A stack of those that enclose the present moment: events of a line come in the order
            # of their starts.
            elif event.name == _SUCCESSORS:
                while around and around[-1][1] <= event.start_ns - _SLACK:
                    around.pop()
                around.append((event.start_ns, event.end_ns))
            elif event.name.startswith("end: "):
                at = event.start_ns
                # Taken at the `end:` event itself, small operations got the time of the large
                # products that waited for them: norms 8 % of a step instead of 2 %.
                ran = [begin for begin, end in around if at - _SLACK <= end <= at]
                ends[stats.get("_c", 0)] = [*ran, at]
            else:
                own.append(Span(event.name, event.start_ns, event.end_ns, stats.get("step_num")))
        # The loop's thread is the one with annotations of steps; other threads' spans would overlap
        # with it.
        if any(span.name == STEP for span in own):
            spans += own
    for context, call in calls.items():
        ended = (at for at in ends.get(context, ()) if at >= call.begin)
        # Without its `end:` event an operation ended with its call. Calls alone miss what goes on
        # in other threads: 284 of 455 ms of quickstart's step.
        call.end = max(call.end, next(ended, 0.0))
        yield call


def _of_gpu(plane: Any, device: int) -> Iterator[Event]:
    """Yield kernels and copies on the streams of a GPU."""
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                stats = dict(event.stats)
                program = Program(stats.get("hlo_module", ""), stats.get("program_id"))
                name = stats.get("hlo_op", event.name)
                # Copies between host and device, which no instruction of the program names.
                beside = "hlo_op" not in stats and event.name.startswith("Mem")
                yield _event(device, program, name, event, stats.get("run_id"), beside)


def _of_tpu(plane: Any, device: int) -> Iterator[Event]:
    """Yield operations on a TPU's core, and asynchronous ones; their program and its run are those
    of the module that runs at the time."""
    lines = {line.name: line for line in plane.lines}
    modules = sorted(
        (event.start_ns, event.end_ns, event.name, dict(event.stats))
        for event in (lines["XLA Modules"].events if "XLA Modules" in lines else ())
    )
    begins = [begin for begin, *_ in modules]
    for name in ("XLA Ops", "Async XLA Ops"):
        for event in lines[name].events if name in lines else ():
            # A TPU's operations do not say which program they belong to; the module that runs at
            # the time does.
            at = bisect.bisect(begins, event.start_ns) - 1
            program = Program("", None)
            run = None
            if at >= 0 and event.start_ns < modules[at][1]:
                _, _, title, stats = modules[at]
                # The title is NAME(FINGERPRINT); programs of one name differ in the fingerprint.
                module, _, fingerprint = title.rstrip(")").partition("(")
                program = Program(module, int(fingerprint) if fingerprint.isdecimal() else None)
                run = stats.get("run_id", at)
            found = _TPU_OP.match(event.name)
            instruction = found[1] if found else event.name
            yield _event(device, program, instruction, event, run, beside=name != "XLA Ops")


def _event(
    device: int, program: Program, name: str, event: Any, run: int | None, beside: bool
) -> Event:
    begin, end = event.start_ns, event.end_ns
    return Event(device, program, name, begin, end, run, end - begin, beside)
