"""A compiled XLA program, read from its text: computations, their instructions, and how often each
runs in a step."""

import re
from collections.abc import Iterator

from maxstack.plan import loops
from maxstack.plan.hlo import RUNS, Computation, Instruction, Program

_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
_NAME = re.compile(r"%([\w.-]+)")
_INDEX = re.compile(r"/\*index=\d+\*/")
_ROW = re.compile(r"(\d+) (?:\"((?:[^\"\\]|\\.)*)\"|\{(.*)\})$")


def parse(text: str) -> Program:
    """`jax.stages.Compiled.as_text()` -> Program. Raises ValueError where the text is no scheduled
    HLO module."""
    computations: dict[str, Computation] = {}
    tables: dict[str, list[str]] = {}
    entry, current, section = "", None, ""
    header, _, body = text.partition("\n")
    for line in _whole_lines(body):
        if current is not None and line.startswith("  "):
            _read(current, line)
        elif line.endswith("{") and line[:1] in "%E":
            found = _NAME.search(line)
            assert found
            current = computations[found[1]] = Computation(found[1], {}, "")
            entry = found[1] if line.startswith("ENTRY") else entry
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
    """One line an instruction: a kernel's own metadata may hold line breaks."""
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
    begun = _INSTRUCTION.match(line)
    if not begun:
        return
    line = _INDEX.sub("", line) if "/*" in line else line
    opcode = _OPCODE.search(line, begun.end() - 1)
    assert opcode, f"no opcode in {line[:200]!r}"
    start, end = opcode.end(), _closing(line, opcode.end())
    inside, kind = line[start:end], opcode[1]
    literal = kind in ("constant", "parameter")
    computation.instructions[begun[2]] = Instruction(
        begun[2],
        kind,
        line[begun.end() : opcode.start()],
        () if literal else tuple(_NAME.findall(inside)),
        line[end + 1 :].lstrip(", "),
        inside if literal else "",
    )
    if begun[1]:
        computation.root = begun[2]


def _closing(line: str, start: int) -> int:
    """Where the parenthesis closes that opened just before `start`."""
    end = line.find(")", start)
    depth = line.count("(", start, end)
    while depth and end >= 0:
        after = line.find(")", end + 1)
        depth += line.count("(", end, after) - 1
        end = after
    return end if end >= 0 else len(line)


def _frames(tables: dict[str, list[str]]) -> dict[int, tuple[str, int, int]]:
    """The tables of source lines: a row is a number and a name in quotes, or a number and fields in
    braces."""

    def rows(section: str) -> Iterator[tuple[int, str, dict[str, int]]]:
        for found in filter(None, map(_ROW.match, tables.get(section, ()))):
            yield (
                int(found[1]),
                found[2] or "",
                {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", found[3] or "")},
            )

    files = {number: name for number, name, _ in rows("FileNames")}
    places = {
        number: (files.get(row["file_name_id"], ""), row["line"])
        for number, _, row in rows("FileLocations")
    }
    # parent_frame_id is one more than the number of the caller's frame; the outermost frame's is 1.
    return {
        number: (*places[row["file_location_id"]], row.get("parent_frame_id", 1) - 1)
        for number, _, row in rows("StackFrames")
        if row["file_location_id"] in places
    }


def _called(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[tuple[str, float]]:
    if instruction.opcode == "while":
        turns = loops.turns(program, computation, instruction)
        if turns is None:
            program.uncounted.append(instruction.name)
            turns = 1
        yield instruction.attribute("body") or "", turns
        yield instruction.attribute("condition") or "", turns + 1
        return
    for key in RUNS.get(instruction.opcode, ()):
        if name := instruction.attribute(key):
            yield name, 1
    if instruction.opcode == "conditional":
        program.branching.append(instruction.name)
        yield from (
            (name, 1) for name in _NAME.findall(instruction.attribute("branch_computations") or "")
        )


def _count(program: Program) -> None:
    """Fill `callers`, then `times`, from the entry down. XLA prints what is called before what
    calls it."""
    calls = [
        (caller, i)
        for caller in program.computations.values()
        for i in caller.instructions.values()
        if i.opcode in RUNS or i.opcode == "while"
    ]
    for caller, instruction in calls:
        for key in (*RUNS.get(instruction.opcode, ()), "body", "condition"):
            if name := instruction.attribute(key):
                program.callers[name] = caller, instruction
        for name in _NAME.findall(instruction.attribute("branch_computations") or ""):
            program.callers[name] = caller, instruction
    program.times = dict.fromkeys(program.computations, 0.0) | {program.entry.name: 1.0}
    for computation in reversed(program.computations.values()):
        if times := program.times[computation.name]:
            for instruction in computation.instructions.values():
                for name, each in _called(program, computation, instruction):
                    program.times[name] += times * each
