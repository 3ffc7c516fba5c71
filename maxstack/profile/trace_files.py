"""Files of a trace. Beside jax's own, each trace has the text of the step's program and facts about
the run, so that a profile needs neither the model nor a compiler."""

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

FACTS = "trace.json"
TEXT = "step.hlo.txt.gz"
SESSIONS = "plugins/profile"
"""Folder of jax's profiler in a trace's folder; each process has a session in it."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a trace and its run. Bytes are per device."""

    steps: list[int]
    """Steps that ran during the trace."""
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
    """Bytes by part, as the compiler counts them; `needed`: of the whole step."""
    usable: int | None
    peak: int | None
    """Peak memory in use, as the device reports it; None if it does not."""
    allocations: list[Allocation]
    """The compiler's buffer assignment, without registers."""
    kept: bool = False
    """True if the program may come from a cache, with the names and lines of an older source."""


def session(process: int) -> str:
    """Return the name of a process's session."""
    return f"process-{process}"


def write(folder: Path, text: str, facts: Facts) -> None:
    """Write text and facts to the folder of a trace, the facts last."""
    # mtime=0: the same text gives the same bytes.
    with atomic.writing(folder / TEXT) as unfinished:
        unfinished.write_bytes(gzip.compress(text.encode(), 6, mtime=0))
    # Last, since a folder counts as a trace once it has its facts.
    with atomic.writing(folder / FACTS) as unfinished:
        unfinished.write_text(json.dumps(dataclasses.asdict(facts)) + "\n")


def read(folder: Path) -> tuple[str, Facts]:
    """Read text and facts of a trace. DataError if they are damaged."""
    if missing := [name for name in (TEXT, FACTS) if not (folder / name).is_file()]:
        raise DataError(f"{folder}: {', '.join(missing)} is missing")
    try:
        text = copies.read_file(File(str(folder / TEXT), TEXT)).decode()
        row = strict_json.read_object(folder / FACTS)
        row["allocations"] = [Allocation(**each) for each in row["allocations"]]
        return text, Facts(**row)
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder}: its {TEXT} or {FACTS} cannot be read: {error}") from error


def traces(run: Path) -> dict[int, Path]:
    """Return the traces of a run by their first step, the newest last."""
    found = [path.parent for path in (run / FOLDER).glob(f"*/{FACTS}")]
    # By time, not by step: a run that was rewound traces earlier steps later.
    found.sort(key=lambda folder: (folder / FACTS).stat().st_mtime_ns)
    return {int(folder.name): folder for folder in found if folder.name.isdecimal()}


def choose(run: Path, step: int | None) -> Path:
    """Return the folder of the trace that starts at `step`, or of the newest. ConfigError if there
    is none, with those that exist."""
    found = traces(run)
    if not found:
        raise ConfigError(
            f"{run}: has no trace; train it with train.profile={{start: 10, steps: 3}}, or trace "
            "the "
            f"running job with maxstack profile {run} --live"
        )
    if step is None:
        return [*found.values()][-1]
    if step not in found:
        raise ConfigError(
            f"--trace {step}: {run} has no trace from that step; its traces start at "
            f"{', '.join(map(str, sorted(found)))}"
        )
    return found[step]


def planes(folder: Path, process: int) -> Path:
    """Return the file that a process's profiler wrote. ConfigError if there is none."""
    found = sorted((folder / SESSIONS / session(process)).glob("*.xplane.pb"))
    if not found:
        others = sorted(path.name for path in (folder / SESSIONS).glob("*"))
        raise ConfigError(
            f"{folder}: has no trace of process {process}; it has {', '.join(others) or 'none'}"
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def allocations(assignment: bytes, module: bytes) -> list[Allocation]:
    """Read the buffer assignment from XLA's BufferAssignmentProto, with the names of a
    HloModuleProto (xla/service/hlo.proto); plan/buffers.allocations reads the same from a dump. The
    fields are decoded here because jax ships no Python classes for these messages."""
    # The assignment refers to instructions by id; names stand in the module.
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
    """Decode the fields of a message in protobuf's wire format, by number."""
    fields: dict[int, list[int | bytes]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        number = 0
        shift = 0
        while True:
            byte = data[at]
            at += 1
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    while at < len(data):
        key = varint()
        kind = key & 7
        # Wire types (protobuf's encoding): 0 varint, 1 eight bytes, 2 length-delimited, 5 four
        # bytes.
        if kind == 0:
            value: int | bytes = varint()
        else:
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            value = data[at : at + size]
            at += size
        # Repeated fields are lists; of others the last value counts, as protobuf says.
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _messages(message: Message, number: int) -> Iterator[Message]:
    return (_fields(value) for value in message.get(number, ()) if isinstance(value, bytes))


def _number(message: Message, number: int) -> int:
    # Protobuf leaves out fields of value 0.
    value = message.get(number, (0,))[-1]
    return value if isinstance(value, int) else 0


def _text(message: Message, number: int) -> str:
    value = message.get(number, (b"",))[-1]
    return value.decode() if isinstance(value, bytes) else ""
