"""Parses the text of a compiled XLA program.

How plan reads a program: the compiler's optimized HLO (`jax.stages.Compiled.as_text()`) is the
program that a device runs, after partitioning and fusion, so its shapes are per device. It is text
because that form is the same for CPU, GPU and TPU. A line of a computation is an instruction: a
name, a shape with its layout, an opcode, operands, and attributes that hold jax's op_name and a
stack frame. Fusions, conditionals and loops name the computations that they call. From the entry
down, `_count` multiplies the runs of each computation by the turns of the loops around it
(loops.py). On that stand traffic.py (collectives), work.py (FLOPs and bytes), buffers.py and
activations.py (memory), and profile/origins.py (layers and source lines)."""

import re
from collections.abc import Iterator

from maxstack.plan import loops
from maxstack.plan.hlo import Computation, Instruction, Program

_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
_NAME = re.compile(r"%([\w.-]+)")
_INDEX = re.compile(r"/\*index=\d+\*/")
_ROW = re.compile(r"(\d+) (?:\"((?:[^\"\\]|\\.)*)\"|\{(.*)\})$")


def parse(text: str) -> Program:
    """Parse `jax.stages.Compiled.as_text()`. ValueError for text that is not an HLO module."""
    computations: dict[str, Computation] = {}
    tables: dict[str, list[str]] = {}
    entry = ""
    section = ""
    current = None
    header, _, body = text.partition("\n")
    for line in _whole_lines(body):
        if current is not None and line.startswith("  "):
            _read(current, line)
        # A computation's head begins in the first column, with % or with ENTRY.
        elif line.endswith("{") and line[:1] in "%E":
            name = _NAME.findall(line)[0]
            current = computations[name] = Computation(name, {}, "", computations)
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            current = None
        elif line and current is None:
            # After the computations come tables of file names and stack frames: a title, then
            # numbered rows.
            if line[0].isdigit():
                tables.setdefault(section, []).append(line)
            else:
                section = line
    if not entry:
        raise ValueError("this text has no ENTRY computation, so it is not an HLO module")
    program = Program(header, computations, computations[entry], _frames(tables))
    _count(program)
    return program


def _whole_lines(body: str) -> Iterator[str]:
    """Join lines that a kernel's own metadata breaks, so that each holds a whole instruction."""
    whole = None
    for line in body.splitlines():
        # A kernel's metadata holds line breaks of its own; without this the rest of it would end
        # the computation.
        if whole is not None and line.startswith(('"', "}}")):
            whole += line
            continue
        if whole is not None:
            yield whole
        whole = line
    yield whole or ""


def _read(computation: Computation, line: str) -> None:
    head = _INSTRUCTION.match(line)
    if not head:
        return
    # XLA numbers the elements of long tuples in comments, which would be read as part of a shape.
    line = _INDEX.sub("", line) if "/*" in line else line
    # The shape may be a tuple with parentheses, so the opcode is the first word that touches one.
    opcode = _OPCODE.search(line, head.end() - 1)
    assert opcode, f"no opcode in {line[:200]!r}"
    end = _closing(line, opcode.end())
    inside = line[opcode.end() : end]
    kind = opcode[1]
    literal = kind in ("constant", "parameter")
    computation.instructions[head[2]] = Instruction(
        name=head[2],
        opcode=kind,
        shape=line[head.end() : opcode.start()],
        # A constant's parentheses hold data, a parameter's its number; neither names an operand.
        operands=() if literal else tuple(_NAME.findall(inside)),
        attributes=line[end + 1 :].lstrip(", "),
        computation=computation,
        literal=inside if literal else "",
    )
    if head[1]:
        computation.root = head[2]


def _closing(line: str, start: int) -> int:
    """Find the parenthesis that closes the one just before `start`."""
    end = line.find(")", start)
    # Parentheses are counted by str.count between closing ones, since a constant's line may hold
    # many numbers.
    depth = line.count("(", start, end)
    while depth and end >= 0:
        after = line.find(")", end + 1)
        depth += line.count("(", end, after) - 1
        end = after
    return end if end >= 0 else len(line)


def _frames(tables: dict[str, list[str]]) -> dict[int, tuple[str, int, int]]:
    """Read stack frames from the tables at the end of the text, whose rows are a number and a
    quoted name, or a number and fields in braces."""

    def rows(section: str) -> Iterator[tuple[int, str, dict[str, int]]]:
        for line in tables.get(section, ()):
            if row := _ROW.match(line):
                fields = re.findall(r"(\w+)=(\d+)", row[3] or "")
                yield int(row[1]), row[2] or "", {key: int(value) for key, value in fields}

    files = {number: name for number, name, _ in rows("FileNames")}
    lines = {
        number: (files.get(row["file_name_id"], ""), row["line"])
        for number, _, row in rows("FileLocations")
    }
    # parent_frame_id is one more than the number of the caller's frame; the outermost frame's is 1.
    return {
        number: (*lines[row["file_location_id"]], row.get("parent_frame_id", 1) - 1)
        for number, _, row in rows("StackFrames")
        if row["file_location_id"] in lines
    }


def _count(program: Program) -> None:
    """Set callers, then `times` from the entry down. XLA prints a computation before its callers,
    so the reverse order visits callers first."""
    calls = [(i, called) for i in program.instructions() if (called := [*i.called()])]
    for instruction, called in calls:
        for _, name in called:
            program.computations[name].caller = instruction
    # `+=` below, since XLA may call one computation from several places.
    program.times = dict.fromkeys(program.computations, 0.0) | {program.entry.name: 1.0}
    for instruction, called in reversed(calls):
        times = program.times[instruction.computation.name]
        if not times:
            continue
        turns = loops.turns(instruction) if instruction.opcode == "while" else 1
        # One turn keeps every figure that is built on it a lower bound.
        if turns is None:
            program.uncounted.append(instruction.name)
            turns = 1
        for key, name in called:
            # A loop checks its condition once more than it runs its body.
            program.times[name] += times * (turns + 1 if key == "condition" else turns)
