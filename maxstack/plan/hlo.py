"""Shapes, instructions and computations of a compiled program."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

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
