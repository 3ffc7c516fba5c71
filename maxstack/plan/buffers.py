"""What a compiled program keeps in a device's memory: totals, and the biggest buffers by name, as
the compiler assigned them."""

import bisect
import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from maxstack.plan.hlo import HOST, PLAIN, Computation, Instruction, Program
from maxstack.plan.program import parse

DUMP = "xla_dump_to"
"""Compiler option that names a folder for what XLA says of a compilation; `largest` reads the
buffer assignment there."""
ANY_SIZE = {"xla_tpu_max_hbm_size_mib": str(1 << 24)}
"""Compiler options with which a TPU program that does not fit compiles all the same, and so has
numbers instead of RESOURCE_EXHAUSTED."""

PASSES_ON = {
    "tuple",
    "get-tuple-element",
    "bitcast",
    "parameter",
    "constant",
    "while",
    "conditional",
    "call",
    "opt-barrier",
    "copy",
    "copy-start",
    "broadcast",
    "custom-call",
    "async-done",
    "copy-done",
    "transpose",
    "convert",
    "reshape",
}
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*)")
_VALUE = re.compile(
    r" value: <\d+ ([\w.-]+?)(?:\{[\d, ]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device, from `jax.stages.Compiled.memory_analysis`; nothing here is our own
    estimate."""

    arguments: int
    outputs: int
    aliased: int
    """Of the outputs, what is written into donated arguments."""
    temporaries: int
    code: int
    """The program itself, in a TPU's memory; 0 on a CPU and for CUDA, whose compilers do not
    say."""
    host: int
    """Pinned host memory: arguments, outputs and temporaries there."""
    peak: int | None
    """The most in use at one time, of all but code; None on a CPU, where XLA leaves temporaries
    out, and where jaxlib does not tell."""
    needed: int
    """What the device must have. TPU: peak and code, since temporaries are packed as loosely as the
    chip allows, and the compiler holds the peak against its memory; where the host's temporaries
    hide the peak, the loose sum. Elsewhere, and without a peak: the sum of the parts, since
    temporaries are one block that is taken whole."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A stretch of device memory and the largest value that lives there in the course of a step."""

    bytes: int
    name: str
    """An argument's path, such as state.params['embed']; XLA's name of other values."""
    op_name: str
    source: str
    """file:line; empty where XLA kept none, as for arguments."""
    kind: str
    """argument, output, constant or temporary."""
    exact: bool = True
    """From the compiler's assignment of buffers. If not: from the program's text, where values that
    never live together stand side by side."""


@dataclasses.dataclass
class Allocation:
    """One block of memory, and the values that it holds in turn or side by side: (instruction,
    offset, bytes)."""

    bytes: int
    kind: str
    space: int
    values: list[tuple[str, int, int]]


def memory(compiled: Any) -> Memory:
    """The totals of a compiled step (`jax.stages.Compiled`). Raises ValueError where the backend
    gives none."""
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this backend gives no memory analysis")
    host = (
        stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes
    )
    platform = _platform(compiled)
    arguments, outputs, aliased = (
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
    )
    temporaries, code = stats.temp_size_in_bytes, stats.generated_code_size_in_bytes
    peak = getattr(stats, "peak_memory_in_bytes", None) if platform != "cpu" else None
    if (
        peak and platform == "tpu"
        # measured: all arguments, the host's too, and the temporaries of that memory which has more
        # of them
    ):
        at_once = peak - arguments - stats.host_argument_size_in_bytes
        peak = arguments + (
            at_once if at_once > 1.01 * stats.host_temp_size_in_bytes else temporaries
        )
    needed = (
        peak + code
        if peak and platform == "tpu"
        else arguments + outputs - aliased + temporaries + code
    )
    return Memory(arguments, outputs, aliased, temporaries, code, host, peak or None, needed)


def largest(
    compiled: Any, count: int, folder: Path | None = None, program: Program | None = None
) -> list[Buffer]:
    """The `count` biggest buffers of a device's memory, the biggest first.

    The assignment of buffers comes with the executable on a CPU. For TPU and CUDA compile with
    `compiler_options={DUMP: folder}` and give the folder: without it the list is made from the
    program's text, and says so. `program`: the parsed text, if it is at hand.
    """
    program = program or parse(compiled.as_text())
    found = _of_executable(compiled) or (_of_folder(folder) if folder else [])
    if not found:
        return _by_size(program, count)
    rows = []
    for allocation in found:
        if allocation.space == PLAIN or not program.tiled and allocation.space != HOST:
            rows += [
                (size, allocation.kind, names)
                for size, names in _stretches(program, allocation, count)
            ]
    rows.sort(key=lambda row: -row[0])
    places = _places(program)
    return [_buffer(program, places, size, kind, names, True) for size, kind, names in rows[:count]]


def allocations(compiled: Any, folder: Path | None = None) -> list[Allocation]:
    """The compiler's assignment of values to memory: from the executable, else from the dump in
    `folder`; empty where neither has it."""
    return _of_executable(compiled) or (_of_folder(folder) if folder else [])


def _platform(compiled: Any) -> str:
    import jax

    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((next(iter(sharding.device_set)).platform for sharding in shardings), "")


def _of_executable(compiled: Any) -> list[Allocation]:
    """From BufferAssignmentProto (xla/service/hlo.proto), whose values are named by the instruction
    ids of HloModuleProto."""
    encoded = getattr(compiled.memory_analysis(), "serialized_buffer_assignment_proto", b"")
    if not encoded:
        return []
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    names = {}
    for computation in _all(module, 3):
        for instruction in _all(computation, 2):
            fields = dict(_fields(instruction))
            names[fields.get(35)] = bytes(fields.get(1, b"")).decode()
    values, found = {}, []
    for number, value in _fields(encoded):
        if number == 1:  # LogicalBufferProto: id, size, where it is defined
            fields = dict(_fields(value))
            place = dict(_fields(fields[3]))
            values[fields.get(1, 0)] = bytes(place.get(2, b"")).decode() or names.get(
                place.get(4), ""
            )
        elif number == 3:  # BufferAllocationProto
            fields = dict(_fields(value))
            assigned = [dict(_fields(row)) for row in _all(value, 9)]
            kind = _kind(
                bool(fields.get(5)), bool(fields.get(12)), bool(fields.get(7)), bool(fields.get(3))
            )
            found.append(
                Allocation(
                    fields.get(2, 0),
                    kind,
                    fields.get(8, 0),
                    [
                        (values.get(row.get(1, 0), ""), row.get(2, 0), row.get(3, 0))
                        for row in assigned
                    ],
                )
            )
    return found


def _of_folder(folder: Path) -> list[Allocation]:
    """From the text that XLA writes beside the optimized module: of several modules, the one with
    the most in it."""
    texts = sorted(
        folder.glob("*after_optimizations-buffer-assignment.txt"),
        key=lambda path: path.stat().st_size,
    )
    found: list[Allocation] = []
    for line in texts[-1].read_text().splitlines() if texts else ():
        if row := _ALLOCATION.match(line):
            says = row[2]
            kind = _kind(
                ", parameter " in says,
                ", constant" in says,
                "maybe-live-out" in says,
                "thread-local" in says,
            )
            colour = re.search(r", color (\d+)", says)
            found.append(Allocation(int(row[1]), kind, int(colour[1]) if colour else 0, []))
        elif found and (row := _VALUE.match(line)):
            found[-1].values.append((row[1], int(row[3]), int(row[2])))
    return found


def _kind(parameter: bool, constant: bool, live_out: bool, thread_local: bool) -> str:
    return (
        "argument"
        if parameter
        else "constant"
        if constant
        else "output"
        if live_out
        else "register"
        if thread_local
        else "temporary"
    )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, integer or bytes) of an encoded protocol buffer:
    protobuf.dev/programming-guides/encoding."""
    at, end = 0, len(message)

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < end:
        key = number()
        kind = key & 7
        if kind == 0:
            yield key >> 3, number()
            continue
        size = number() if kind == 2 else {1: 8, 5: 4}[kind]
        yield key >> 3, message[at : at + size]
        at += size


def _all(message: bytes, field: int) -> list[bytes]:
    return [value for number, value in _fields(message) if number == field]


def _stretches(program: Program, allocation: Allocation, count: int) -> list[tuple[int, list[str]]]:
    """At most `count` parts of a block of memory that do not overlap, each with the values that
    fill it exactly: the largest values first."""
    if allocation.kind == "register":
        return []
    if allocation.kind != "temporary":
        return [(allocation.bytes, [name for name, _, _ in allocation.values])]
    same: dict[tuple[int, int], list[str]] = {}
    for name, offset, size in allocation.values:
        same.setdefault((size, offset), []).append(name)
    taken: list[tuple[int, int]] = []
    found = []
    for (size, offset), names in sorted(same.items(), key=lambda row: (-row[0][0], row[0][1])):
        after = bisect.bisect(taken, (offset, 0))
        free = (after == len(taken) or taken[after][0] >= offset + size) and (
            after == 0 or taken[after - 1][1] <= offset
        )
        if size and free:
            taken.insert(after, (offset, offset + size))
            found.append((size, names))
            if len(found) == count:
                break
    return found


def _by_size(program: Program, count: int) -> list[Buffer]:
    """Arguments and single results by size, with no regard to when they live."""
    rows = []
    for computation, _ in program.running():
        for instruction in computation.instructions.values():
            argument = instruction.opcode == "parameter" and computation is program.entry
            if (
                argument
                or instruction.opcode not in PASSES_ON
                and not instruction.opcode.endswith("-done")
            ):
                sizes = [
                    shape.padded
                    for shape in instruction.shapes
                    if shape.space == PLAIN or not program.tiled and shape.space != HOST
                ]
                rows.append(
                    (
                        max(sizes, default=0),
                        "argument" if argument else "temporary",
                        [instruction.name],
                    )
                )
    rows.sort(key=lambda row: -row[0])
    places = _places(program)
    return [_buffer(program, places, *row, False) for row in rows[:count]]


def _places(program: Program) -> dict[str, tuple[Computation, Instruction]]:
    return {
        i.name: (computation, i)
        for computation in program.computations.values()
        for i in computation.instructions.values()
    }


def _buffer(
    program: Program,
    places: dict[str, tuple[Computation, Instruction]],
    size: int,
    kind: str,
    names: Iterable[str],
    exact: bool,
) -> Buffer:
    """Named after the value that says most: one that computes something and has a line of
    source."""
    known = [places[name] for name in names if name in places]
    if not known:
        return Buffer(size, next(iter(names), ""), "", "", kind, exact)
    if kind == "argument":
        made = next(
            (i for c, i in known if i.opcode == "parameter" and c is program.entry), known[0][1]
        )
        return Buffer(size, made.op_name or made.name, made.op_name, "", kind, exact)
    computation, made = min(
        known, key=lambda row: (row[1].opcode in PASSES_ON, not program.source(row[1]))
    )
    told = _saved(program, computation, made) or made
    return Buffer(size, made.name, told.op_name, program.source(told), kind, exact)


def _saved(program: Program, computation: Computation, made: Instruction) -> Instruction | None:
    """What a scan's stack of results holds: the instruction that made the slice written into it."""
    called = program.inside(made)
    root = called.instructions[called.root] if called else made
    where = called or computation
    while root.opcode in ("bitcast", "convert", "copy", "tuple") and root.operands:
        root = where.instructions[root.operands[0]]
    if root.opcode != "dynamic-update-slice":
        return None
    told = where.instructions[root.operands[1]]
    for _ in range(20):
        if told.opcode == "parameter" and where is called:
            where, told = computation, computation.instructions[made.operands[int(told.literal)]]
        elif told.opcode in PASSES_ON and told.operands and not (told.opcode == "tuple"):
            told = where.instructions[told.operands[0]]
        else:
            break
    return told if program.source(told) else None
