"""Device memory of a compiled program: totals, and the largest buffers by name.

The names come from the compiler's buffer assignment, which says which values share a block of
memory and where in it they lie. It is read from XLA's dump or, in a profile, from the executable.
Without it, the list is made from the program's text, which does not say which values live at the
same time."""

import bisect
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxstack.plan.hlo import PLAIN, Instruction, Program

# The dump is read on every platform: on a CPU the executable's protocol buffers say the same, which
# a test held, but other platforms give the text alone.
DUMP = "xla_dump_to"
"""Compiler option that names the folder of XLA's dump."""
PASSES_ON = set(
    """
    tuple get-tuple-element bitcast parameter constant while conditional call opt-barrier copy
    copy-start broadcast custom-call async-done copy-done transpose convert reshape
    """.split()
)
KINDS = {
    # A donated argument's line says "parameter" and "maybe-live-out"; as its memory is the
    # argument's, "parameter" comes first.
    ", parameter ": "argument",
    ", constant": "constant",
    "maybe-live-out": "output",
    "thread-local": "register",
    "": "temporary",
}
"""Words in XLA's line about an allocation -> its kind; the first match decides."""
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*)")
_VALUE = re.compile(
    r" value: <\d+ ([\w.-]+?)(?:\{[\d, ]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)


class Memory(NamedTuple):
    """Bytes on each device, from `jax.stages.Compiled.memory_analysis`, without estimates of our
    own."""

    arguments: int
    code: int
    """The program itself, in a TPU's memory; 0 on CPU and CUDA, whose compilers do not report
    it."""
    needed: int
    """Bytes that the device must have. On a TPU: peak and code, which the compiler compares with
    the chip's memory, since its temporaries are packed only as tightly as they need to be; if host
    temporaries hide the peak, the sum of the parts. Elsewhere: the sum of the parts, since
    temporaries are one block that is allocated whole."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A range of device memory, and the largest value that it holds during a step."""

    bytes: int
    name: str
    """An argument's path, such as state.params['embed']; XLA's name of other values."""
    op_name: str
    source: str
    """file:line; empty if XLA kept none, as for arguments."""
    kind: str
    """argument, output, constant or temporary."""
    exact: bool = True
    """True if read from the buffer assignment, False if from the program's text."""


@dataclasses.dataclass
class Allocation:
    """One block of memory, and the values that it holds at some time: (instruction, offset,
    bytes)."""

    bytes: int
    kind: str
    space: int
    values: list[tuple[str, int, int]]


def memory(compiled: Any) -> Memory:
    """Return the totals of a compiled step (`jax.stages.Compiled`). ValueError if the backend has
    none."""
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this backend gives no memory analysis")
    code = stats.generated_code_size_in_bytes
    temporaries = stats.temp_size_in_bytes
    arguments = stats.argument_size_in_bytes
    runs = temporaries + stats.output_size_in_bytes - stats.alias_size_in_bytes
    # Only a TPU's compiler compares its peak with the chip's memory; elsewhere the temporaries are
    # one block, whatever the peak inside it.
    peak = getattr(stats, "peak_memory_in_bytes", None) if _platform(compiled) == "tpu" else None
    if peak:
        # Measured: XLA's peak includes all arguments, the host's too, and the temporaries of the
        # device or of the host, whichever has more.
        at_once = peak - arguments - stats.host_argument_size_in_bytes
        hidden = at_once <= 1.01 * stats.host_temp_size_in_bytes
        runs = temporaries if hidden else at_once
    return Memory(arguments, code, code + arguments + runs)


def largest(program: Program, count: int, assigned: Sequence[Allocation] = ()) -> list[Buffer]:
    """Return the `count` largest buffers of a device's memory, the largest first."""
    rows = [
        (size, allocation.kind, names)
        for allocation in assigned
        if program.in_device_memory(allocation.space)
        for size, names in _stretches(allocation, count)
    ]
    # The text tells no lifetimes, so a list that is made from it is marked as inexact.
    exact = bool(rows)
    rows = sorted(rows or _by_size(program), key=lambda row: -row[0])[:count]
    made = {instruction.name: instruction for instruction in program.instructions()}
    return [_buffer(program, made, size, kind, names, exact) for size, kind, names in rows]


def allocations(folder: Path) -> list[Allocation]:
    """Read the buffer assignment in XLA's dump (`compiler_options={DUMP: folder}`), of several
    modules the largest. Empty if there is none."""
    # A dump holds small modules beside the step; the step's assignment is the longest file.
    texts = sorted(
        folder.glob("*after_optimizations-buffer-assignment.txt"),
        key=lambda path: path.stat().st_size,
    )
    rows: list[Allocation] = []
    for line in texts[-1].read_text().splitlines() if texts else ():
        if block := _ALLOCATION.match(line):
            kind = next(kind for words, kind in KINDS.items() if words in block[2])
            color = re.search(r", color (\d+)", block[2])
            # "color" is XLA's word for the memory space; a line without one is of main memory.
            rows.append(Allocation(int(block[1]), kind, int(color[1]) if color else PLAIN, []))
        elif rows and (value := _VALUE.match(line)):
            rows[-1].values.append((value[1], int(value[3]), int(value[2])))
    return rows


def _platform(compiled: Any) -> str:
    import jax

    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((next(iter(sharding.device_set)).platform for sharding in shardings), "")


def _stretches(allocation: Allocation, count: int) -> Iterator[tuple[int, list[str]]]:
    """Yield at most `count` ranges of a block that do not overlap, each with the values that fill
    it: the largest values first."""
    if allocation.kind != "temporary":
        # Thread-local blocks are registers, not device memory.
        if allocation.kind != "register":
            yield allocation.bytes, [name for name, _, _ in allocation.values]
        return
    values: dict[tuple[int, int], list[str]] = {}
    for name, offset, size in allocation.values:
        values.setdefault((size, offset), []).append(name)
    chosen: list[tuple[int, int]] = []
    # Values at overlapping offsets live at different times, and only one of them can be shown for a
    # stretch of memory: the largest, so that the sizes of the list never add up to more than the
    # block.
    for (size, offset), names in sorted(values.items(), key=lambda row: (-row[0][0], row[0][1])):
        # `chosen` stays sorted and without overlaps, so the two neighbours alone can collide.
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
    """Yield (bytes, kind, [name]) of arguments and results, regardless of when they live."""
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
                # Of an instruction with several results only the largest counts: the parts of a
                # tuple are separate buffers.
                yield max(sizes, default=0), kind, [instruction.name]


def _buffer(
    program: Program,
    made: dict[str, Instruction],
    size: int,
    kind: str,
    names: list[str],
    exact: bool,
) -> Buffer:
    """Make a buffer named after the most telling value: one that computes something and has a
    source line."""
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
    # One stretch holds many values in turn. A copy or tuple says nothing to a reader, so the first
    # that computes something and has a source line gives the name.
    value = min(values, key=lambda i: (i.opcode in PASSES_ON, not program.source(i)))
    # A scan's stacked results are written by a dynamic-update-slice whose line is the scan's own;
    # the line that computed the slice is the one to change.
    maker = _saved(program, value) or value
    return Buffer(size, value.name, maker.op_name, program.source(maker), kind, exact)


def _saved(program: Program, made: Instruction) -> Instruction | None:
    """Return the instruction that computed the slice written into a scan's stacked results; None
    for other values."""
    called = made.inside
    root = called.result if called else made
    while root.opcode in ("bitcast", "convert", "copy", "tuple") and root.operands:
        root = root.inputs[0]
    if root.opcode != "dynamic-update-slice":
        return None
    maker = root.inputs[1]
    for _ in range(20):
        if maker.opcode == "parameter" and maker.computation is called:
            # A parameter of the fusion is computed outside of it: go on with the fusion's operand.
            maker = made.inputs[int(maker.literal)]
        elif maker.opcode in PASSES_ON - {"tuple"} and maker.operands:
            maker = maker.inputs[0]
        else:
            break
    return maker if program.source(maker) else None
