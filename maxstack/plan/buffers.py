"""Device memory of a compiled program: totals, and the biggest buffers by name, as the compiler
assigned them."""

import bisect
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxstack.plan.hlo import PLAIN, Instruction, Program

DUMP = "xla_dump_to"
"""Compiler option that names a folder for what XLA writes about a compilation; `largest` reads the
assignment of buffers there."""

PASSES_ON = set(
    """
    tuple get-tuple-element bitcast parameter constant while conditional call opt-barrier copy
    copy-start broadcast custom-call async-done copy-done transpose convert reshape
    """.split()
)
KINDS = {
    ", parameter ": "argument",
    ", constant": "constant",
    "maybe-live-out": "output",
    "thread-local": "register",
    "": "temporary",
}
"""Words of XLA's line about an allocation -> its kind; the first that are there decide."""
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*)")
_VALUE = re.compile(
    r" value: <\d+ ([\w.-]+?)(?:\{[\d, ]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)


class Memory(NamedTuple):
    """Bytes on each device, from `jax.stages.Compiled.memory_analysis`, without estimates of our
    own."""

    arguments: int
    code: int
    """The program itself, in a TPU's memory; 0 on a CPU and for CUDA, whose compilers do not
    say."""
    needed: int
    """Bytes that the device must have. TPU: peak and code, since temporaries are packed as loosely
    as the chip allows, and the compiler holds the peak against its memory; where the host's
    temporaries hide the peak, the loose sum. Elsewhere, and without a peak: the sum of the parts,
    since temporaries are one block that is taken whole."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A stretch of device memory, and the largest value that lives there in the course of a
    step."""

    bytes: int
    name: str
    """An argument's path, such as state.params['embed']; XLA's name of other values."""
    op_name: str
    source: str
    """file:line; empty where XLA kept none, as for arguments."""
    kind: str
    """argument, output, constant or temporary."""
    exact: bool = True
    """From the compiler's assignment of buffers; otherwise from the program's text, which lists
    values side by side that never live together."""


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
    code, temporaries = stats.generated_code_size_in_bytes, stats.temp_size_in_bytes
    arguments = stats.argument_size_in_bytes
    runs = temporaries + stats.output_size_in_bytes - stats.alias_size_in_bytes
    peak = getattr(stats, "peak_memory_in_bytes", None) if _platform(compiled) == "tpu" else None
    if peak:
        # measured: all arguments, the host's too, and the temporaries of that memory which has more
        # of them
        at_once = peak - arguments - stats.host_argument_size_in_bytes
        hidden = at_once <= 1.01 * stats.host_temp_size_in_bytes
        runs = temporaries if hidden else at_once
    return Memory(arguments, code, code + arguments + runs)


def largest(program: Program, count: int, assigned: Sequence[Allocation] = ()) -> list[Buffer]:
    """The `count` biggest buffers of a device's memory, the biggest first. Without the compiler's
    assignment of memory the list is made from the program's text, and says so."""
    rows = [
        (size, allocation.kind, names)
        for allocation in assigned
        if program.in_device_memory(allocation.space)
        for size, names in _stretches(allocation, count)
    ]
    exact = bool(rows)
    rows = sorted(rows or _by_size(program), key=lambda row: -row[0])[:count]
    made = {
        i.name: i
        for computation in program.computations.values()
        for i in computation.instructions.values()
    }
    return [_buffer(program, made, size, kind, names, exact) for size, kind, names in rows]


def allocations(folder: Path) -> list[Allocation]:
    """The compiler's assignment of values to memory, from the text that XLA writes beside the
    optimized module where `compiler_options={DUMP: folder}`: of several modules, that with the most
    in it. Empty where there is none."""
    texts = sorted(
        folder.glob("*after_optimizations-buffer-assignment.txt"),
        key=lambda path: path.stat().st_size,
    )
    rows: list[Allocation] = []
    for line in texts[-1].read_text().splitlines() if texts else ():
        if block := _ALLOCATION.match(line):
            kind = next(kind for words, kind in KINDS.items() if words in block[2])
            color = re.search(r", color (\d+)", block[2])
            rows.append(Allocation(int(block[1]), kind, int(color[1]) if color else PLAIN, []))
        elif rows and (value := _VALUE.match(line)):
            rows[-1].values.append((value[1], int(value[3]), int(value[2])))
    return rows


def _platform(compiled: Any) -> str:
    import jax

    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((next(iter(sharding.device_set)).platform for sharding in shardings), "")


def _stretches(allocation: Allocation, count: int) -> Iterator[tuple[int, list[str]]]:
    """At most `count` parts of a block of memory that do not overlap, each with the values that
    fill it exactly: the largest values first."""
    if allocation.kind != "temporary":
        if allocation.kind != "register":
            yield allocation.bytes, [name for name, _, _ in allocation.values]
        return
    values: dict[tuple[int, int], list[str]] = {}
    for name, offset, size in allocation.values:
        values.setdefault((size, offset), []).append(name)
    chosen: list[tuple[int, int]] = []
    for (size, offset), names in sorted(values.items(), key=lambda row: (-row[0][0], row[0][1])):
        after = bisect.bisect(chosen, (offset, 0))
        free = (after == len(chosen) or chosen[after][0] >= offset + size) and (
            after == 0 or chosen[after - 1][1] <= offset
        )
        if size and free:
            chosen.insert(after, (offset, offset + size))
            yield size, names
        if len(chosen) == count:
            return


def _by_size(program: Program) -> Iterator[tuple[int, str, list[str]]]:
    """(bytes, kind, [name]) of arguments and single results, with no regard to when they live."""
    for computation, _ in program.running():
        for instruction in computation.instructions.values():
            argument = instruction.opcode == "parameter" and computation is program.entry
            if argument or not (
                instruction.opcode in PASSES_ON or instruction.opcode.endswith("-done")
            ):
                sizes = [
                    shape.padded
                    for shape in instruction.shapes
                    if program.in_device_memory(shape.space)
                ]
                kind = "argument" if argument else "temporary"
                yield max(sizes, default=0), kind, [instruction.name]


def _buffer(
    program: Program,
    made: dict[str, Instruction],
    size: int,
    kind: str,
    names: list[str],
    exact: bool,
) -> Buffer:
    """Named after the value that says most: one that computes something and has a line of
    source."""
    values = [made[name] for name in names if name in made]
    if not values:
        return Buffer(size, "".join(names[:1]), "", "", kind, exact)
    if kind == "argument":
        arguments = [
            i for i in values if i.opcode == "parameter" and i.computation is program.entry
        ]
        argument = (arguments or values)[0]
        name = argument.op_name or argument.name
        return Buffer(size, name, argument.op_name, "", kind, exact)
    value = min(values, key=lambda i: (i.opcode in PASSES_ON, not program.source(i)))
    maker = _saved(program, value) or value
    return Buffer(size, value.name, maker.op_name, program.source(maker), kind, exact)


def _saved(program: Program, made: Instruction) -> Instruction | None:
    """The instruction that made the slice written into a scan's stack of results; None for other
    values."""
    called = made.inside
    root = called.result if called else made
    while root.opcode in ("bitcast", "convert", "copy", "tuple") and root.operands:
        root = root.inputs[0]
    if root.opcode != "dynamic-update-slice":
        return None
    maker = root.inputs[1]
    for _ in range(20):
        if maker.opcode == "parameter" and maker.computation is called:
            maker = made.inputs[int(maker.literal)]
        elif maker.opcode in PASSES_ON - {"tuple"} and maker.operands:
            maker = maker.inputs[0]
        else:
            break
    return maker if program.source(maker) else None
