"""A compiled XLA program, read from its text: computations, their instructions, and how often each
runs in a step."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from maxstack.plan import loops

BITS = {
    "pred": 8,
    "s1": 1,
    "u1": 1,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "s32": 32,
    "u32": 32,
    "s64": 64,
    "u64": 64,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "f4e2m1fn": 4,
    "f8e8m0fnu": 8,
}
PLAIN, VMEM, HOST = 0, 1, 5
"""Memory spaces as XLA numbers them: a device's main memory, a TPU core's vector memory, pinned
host memory."""

_LEAF = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
_NAME = re.compile(r"%([\w.-]+)")
_INDEX = re.compile(r"/\*index=\d+\*/")
_ROW = re.compile(r"(\d+) (?:\"((?:[^\"\\]|\\.)*)\"|\{(.*)\})$")
WRAPPERS = {"fusion": "calls", "async-start": "calls", "call-start": "to_apply"}
"""Instructions whose inside is a computation of its own, and the attribute that names it. A TPU's
call-start runs on its SparseCores."""
RUNS = {kind: (key,) for kind, key in WRAPPERS.items()} | {
    "call": ("to_apply",),
    "conditional": ("true_computation", "false_computation"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array: element type, dimensions, memory space, and bytes without and with the padding of
    its layout's tiles."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    bytes: int
    padded: int


@dataclasses.dataclass(slots=True)
class Instruction:
    """One line of the program. `shape` and `attributes` are XLA's text; `literal` stands between
    the parentheses of a constant or parameter."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    literal: str = ""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays it makes: one, or the leaves of its tuple."""
        return shapes(self.shape)

    @property
    def bytes(self) -> int:
        """Of all arrays that it makes, without padding."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """jax's scope and primitive (`jit(step)/.../dot_general`), or the path of an argument;
        empty where XLA kept none."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    def attribute(self, key: str) -> str | None:
        """The text of an attribute that has no comma of its own outside brackets: `{0,1}`, `%name`,
        `LT`."""
        found = re.search(
            rf"(?:^|[ ,{{]){key}=(%?[\w.-]+|\{{[^{{}}]*\}}|\"[^\"]*\")", self.attributes
        )
        return found[1].strip('%"') if found else None

    def numbers(self, key: str) -> tuple[int, ...]:
        """The integers of an attribute such as `dimensions={0,2}`; none where it is absent."""
        return tuple(int(n) for n in re.findall(r"\d+", self.attribute(key) or ""))


@dataclasses.dataclass
class Computation:
    """Instructions by name, in the order in which they run."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    @property
    def parameters(self) -> list[Instruction]:
        """By their number."""
        return sorted(
            (i for i in self.instructions.values() if i.opcode == "parameter"),
            key=lambda i: int(i.literal),
        )

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Name -> the instructions that take it as an operand, and as which."""
        found: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for place, operand in enumerate(instruction.operands):
                found[operand].append((instruction, place))
        return found


@dataclasses.dataclass
class Program:
    """A module. A computation runs `times[name]` times in a step; those that a reduction applies to
    single elements, none."""

    attributes: str
    computations: dict[str, Computation]
    entry: Computation
    frames: dict[int, tuple[str, int, int]]
    """Stack frame -> (file, line, frame of the caller or 0)."""
    times: dict[str, float] = dataclasses.field(default_factory=dict)
    callers: dict[str, tuple[Computation, Instruction]] = dataclasses.field(default_factory=dict)
    """Computation -> where it is called from (the last place, where there are several)."""
    uncounted: list[str] = dataclasses.field(default_factory=list)
    """Loops whose number of turns the program does not tell: they count as one turn."""
    branching: list[str] = dataclasses.field(default_factory=list)
    """Conditionals: every branch counts as taken, each time."""

    @property
    def tiled(self) -> bool:
        """Whether it is a TPU's: its arrays lie in tiles, and its memory spaces other than the
        plain and the host's are on the chip."""
        return ":T(" in self.attributes

    def source(self, instruction: Instruction) -> str:
        """`file:line` of the innermost caller outside installed packages; empty where XLA kept
        none."""
        text = instruction.attributes
        if found := re.search(r'source_file="([^"]*)" source_line=(\d+)', text):
            return f"{found[1]}:{found[2]}"
        found = re.search(r"stack_frame_id=(\d+)", text)
        start = frame = int(found[1]) if found else 0
        while frame in self.frames and "-packages/" in self.frames[frame][0]:
            frame = self.frames[frame][2]
        frame = frame if frame in self.frames else start
        return "{}:{}".format(*self.frames[frame]) if frame in self.frames else ""

    def running(self) -> Iterator[tuple[Computation, float]]:
        """Computations whose instructions the device is given one by one (not those inside
        fusions), with how often each runs."""
        for computation in self.computations.values():
            if self.times.get(computation.name) and not self.fused(computation.name):
                yield computation, self.times[computation.name]

    def fused(self, computation: str) -> bool:
        """Whether it is the inside of one instruction: a fusion, or an operation wrapped to run
        asynchronously."""
        return computation in self.callers and self.callers[computation][1].opcode in WRAPPERS

    def inside(self, instruction: Instruction) -> Computation | None:
        """What a fusion or asynchronous call is made of; None for other instructions."""
        key = WRAPPERS.get(instruction.opcode)
        return self.computations[instruction.attribute(key) or ""] if key else None


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


@functools.lru_cache(maxsize=65536)
def shapes(text: str) -> tuple[Shape, ...]:
    """The arrays in a shape's text, tuples flattened; tokens have no bytes."""
    return tuple(_shape(*match.groups()) for match in _LEAF.finditer(text))


@functools.lru_cache(maxsize=65536)
def _shape(dtype: str, dims: str, layout: str | None) -> Shape:
    sizes = tuple(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim)
    order, _, tiles = (layout or "").partition(":")
    stored = re.search(r"E\((\d+)\)", tiles)
    bits = int(stored[1]) if stored else 0 if dtype in ("token", "opaque") else BITS.get(dtype, 8)
    space = re.search(r"S\((\d+)\)", tiles)
    minor = [int(n) for n in order.split(",") if n]
    physical = [sizes[n] for n in reversed(minor)] if len(minor) == len(sizes) else list(sizes)
    tiled = re.search(r"T((?:\([\d,]+\))+)", tiles)
    for tile in re.findall(r"\(([\d,]+)\)", tiled[1]) if tiled else ():
        physical = _padded(physical, [int(n) for n in tile.split(",")])
    return Shape(
        dtype,
        sizes,
        int(space[1]) if space else 0,
        -(-math.prod(sizes) * bits // 8),
        -(-math.prod(physical) * bits // 8),
    )


def _padded(physical: list[int], tile: list[int]) -> list[int]:
    """Dimensions, major to minor, cut into tiles: the numbers of tiles, then the tile itself."""
    physical = [1] * (len(tile) - len(physical)) + physical
    rest, last = physical[: len(physical) - len(tile)], physical[len(physical) - len(tile) :]
    return rest + [-(-n // t) for n, t in zip(last, tile, strict=True)] + tile


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
