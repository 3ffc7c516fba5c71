"""What lies beside a trace: the text of the step's program and facts about the run, so that a
profile needs neither the model nor a compiler."""

import dataclasses
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from maxstack import strict_json
from maxstack.config import atomic
from maxstack.data import copies
from maxstack.data.files import File
from maxstack.errors import ConfigError, DataError
from maxstack.plan.buffers import Allocation
from maxstack.report.trace_requests import FOLDER

FACTS, TEXT = "trace.json", "step.hlo.txt.gz"
SESSIONS = "plugins/profile"
"""Folder of jax's profiler below a trace's; in it each process has a session of its own."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a trace and the run that it is of. Bytes are of one device."""

    steps: list[int]
    """Numbers of the steps that ran while the trace was taken."""
    device_kind: str
    devices: int
    """Devices of the whole mesh."""
    processes: int
    mesh: dict[str, int]
    tokens: int
    """Tokens of a step, on all devices."""
    flops: float
    """FLOPs of a step on all devices, as MFU counts them."""
    memory: dict[str, int]
    """Bytes by part, as the compiler counts them; `needed`: those of the whole step."""
    usable: int | None
    peak: int | None
    """The most that was in use at once, as the device says; None where it does not."""
    allocations: list[Allocation]
    """The compiler's assignment of memory, without registers."""
    kept: bool = False
    """True where the program may have come from a folder of compiled programs, whose names and
    lines are those of the source that it was first compiled from."""


def session(process: int) -> str:
    """Name of a process's session."""
    return f"process-{process}"


def write(folder: Path, text: str, facts: Facts) -> None:
    """Write text and facts into the folder of a trace; the facts come last."""
    with atomic.writing(folder / TEXT) as unfinished:
        unfinished.write_bytes(gzip.compress(text.encode(), 6, mtime=0))
    with atomic.writing(folder / FACTS) as unfinished:
        unfinished.write_text(json.dumps(dataclasses.asdict(facts)) + "\n")


def read(folder: Path) -> tuple[str, Facts]:
    """Text and facts of a trace. DataError where they are damaged."""
    if missing := [name for name in (TEXT, FACTS) if not (folder / name).is_file()]:
        raise DataError(f"{folder}: {', '.join(missing)} was not saved, or was deleted")
    try:
        text = copies.read_file(File(str(folder / TEXT), TEXT)).decode()
        row = strict_json.read_object(folder / FACTS)
        row["allocations"] = [Allocation(**each) for each in row["allocations"]]
        return text, Facts(**row)
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder}: its {TEXT} or {FACTS} cannot be read: {error}") from error


def traces(run: Path) -> dict[int, Path]:
    """Traces of a run by their first step, the newest last."""
    found = [path.parent for path in (run / FOLDER).glob(f"*/{FACTS}")]
    found.sort(key=lambda folder: (folder / FACTS).stat().st_mtime_ns)
    return {int(folder.name): folder for folder in found if folder.name.isdecimal()}


def choose(run: Path, step: int | None) -> Path:
    """The folder of the trace that begins at `step`, or of the newest. ConfigError where there is
    none, with those that there are."""
    found = traces(run)
    if not found:
        raise ConfigError(
            f"{run}: has no trace; train it with train.profile={{start: 10, steps: 3}}, or while "
            f"it runs: maxstack profile {run} --live"
        )
    if step is None:
        return [*found.values()][-1]
    if step not in found:
        raise ConfigError(
            f"--trace {step}: {run} has no trace that begins there; those of it begin at "
            f"{', '.join(map(str, sorted(found)))}"
        )
    return found[step]


def planes(folder: Path, process: int) -> Path:
    """The file that a process's profiler wrote. ConfigError where there is none."""
    found = sorted((folder / SESSIONS / session(process)).glob("*.xplane.pb"))
    if not found:
        others = sorted(path.name for path in (folder / SESSIONS).glob("*"))
        raise ConfigError(
            f"{folder}: holds no trace of process {process}; there is {', '.join(others) or 'none'}"
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def allocations(assignment: bytes, module: bytes) -> list[Allocation]:
    """The assignment of memory in XLA's BufferAssignmentProto, with the names of a HloModuleProto
    (xla/service/hlo.proto): as plan/buffers.allocations reads it from a dump."""
    names = {
        _number(instruction, 35): _text(instruction, 1)
        for computation in _messages(_fields(module), 3)
        for instruction in _messages(computation, 2)
    }
    fields = _fields(assignment)
    makers = {
        _number(buffer, 1): names.get(_number(next(_messages(buffer, 3), {}), 4), "")
        for buffer in _messages(fields, 1)
    }
    rows = []
    for block in _messages(fields, 3):
        if _number(block, 3):
            continue  # thread-local
        kinds = {5: "argument", 12: "constant", 7: "output"}
        kind = next((word for key, word in kinds.items() if _number(block, key)), "temporary")
        values = [
            (makers.get(_number(value, 1), ""), _number(value, 2), _number(value, 3))
            for value in _messages(block, 9)
        ]
        rows.append(Allocation(_number(block, 2), kind, _number(block, 8), values))
    return rows


Message = Mapping[int, Sequence[int | bytes]]


def _fields(data: bytes) -> Message:
    """Fields of a message in protobuf's wire format, by number."""
    fields: dict[int, list[int | bytes]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = data[at]
            at, number, shift = at + 1, number | (byte & 127) << shift, shift + 7
            if byte < 128:
                return number

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            value: int | bytes = varint()
        else:
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            value, at = data[at : at + size], at + size
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _messages(message: Message, number: int) -> Iterator[Message]:
    return (_fields(value) for value in message.get(number, ()) if isinstance(value, bytes))


def _number(message: Message, number: int) -> int:
    value = message.get(number, (0,))[-1]
    return value if isinstance(value, int) else 0


def _text(message: Message, number: int) -> str:
    value = message.get(number, (b"",))[-1]
    return value.decode() if isinstance(value, bytes) else ""
