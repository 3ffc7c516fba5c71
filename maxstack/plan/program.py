"""Parser of a compiled XLA program's text: computations, their instructions, and how often each
runs in a step."""

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
    """Parse `jax.stages.Compiled.as_text()`. ValueError where the text is no HLO module."""
    computations: dict[str, Computation] = {}
    tables: dict[str, list[str]] = {}
    entry, current, section = "", None, ""
    header, _, body = text.partition("\n")
    for line in _whole_lines(body):
        if current is not None and line.startswith("  "):
            _read(current, line)
        elif line.endswith("{") and line[:1] in "%E":
            name = _NAME.findall(line)[0]
            current = computations[name] = Computation(name, {}, "", computations)
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            current = None
        elif line and current is None:
            if line[0].isdigit():
                tables.setdefault(section, []).append(line)
            else:
                section = line
    if not entry:
        raise ValueError("this text has no ENTRY computation, so it is no HLO module")
    program = Program(header, computations, computations[entry], _frames(tables))
    _count(program)
    return program


def _whole_lines(body: str) -> Iterator[str]:
    """Lines of the text, each with a whole instruction: a kernel's own metadata may hold line
    breaks."""
    whole = None
    for line in body.splitlines():
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
    line = _INDEX.sub("", line) if "/*" in line else line
    opcode = _OPCODE.search(line, head.end() - 1)
    assert opcode, f"no opcode in {line[:200]!r}"
    start, end = opcode.end(), _closing(line, opcode.end())
    inside, kind = line[start:end], opcode[1]
    literal = kind in ("constant", "parameter")
    computation.instructions[head[2]] = Instruction(
        name=head[2],
        opcode=kind,
        shape=line[head.end() : opcode.start()],
        operands=() if literal else tuple(_NAME.findall(inside)),
        attributes=line[end + 1 :].lstrip(", "),
        computation=computation,
        literal=inside if literal else "",
    )
    if head[1]:
        computation.root = head[2]


def _closing(line: str, start: int) -> int:
    """Index of the parenthesis that closes what opened just before `start`."""
    end = line.find(")", start)
    depth = line.count("(", start, end)
    while depth and end >= 0:
        after = line.find(")", end + 1)
        depth += line.count("(", end, after) - 1
        end = after
    return end if end >= 0 else len(line)


def _frames(tables: dict[str, list[str]]) -> dict[int, tuple[str, int, int]]:
    """Stack frames from the tables of source lines: a row is a number and a name in quotes, or a
    number and fields in braces."""

    def rows(section: str) -> Iterator[tuple[int, str, dict[str, int]]]:
        for row in filter(None, map(_ROW.match, tables.get(section, ()))):
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
    """Fill callers, then `times`, from the entry down. XLA prints what is called before what
    calls it."""
    calls = [
        (i, called)
        for caller in program.computations.values()
        for i in caller.instructions.values()
        if (called := [*i.called()])
    ]
    for instruction, called in calls:
        for _, name in called:
            program.computations[name].caller = instruction
    program.times = dict.fromkeys(program.computations, 0.0) | {program.entry.name: 1.0}
    for instruction, called in reversed(calls):
        times = program.times[instruction.computation.name]
        if not times:
            continue
        turns = loops.turns(instruction) if instruction.opcode == "while" else 1
        if turns is None:
            program.uncounted.append(instruction.name)
            turns = 1
        for key, name in called:
            program.times[name] += times * (turns + (key == "condition"))
