"""Shapes, instructions and computations of a compiled program."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator

PLAIN, HOST = 0, 5
"""Memory spaces as XLA numbers them: a device's main memory, pinned host memory."""
CALLS = {
    "fusion": ("calls",),
    "async-start": ("calls",),
    "call-start": ("to_apply",),
    "call": ("to_apply",),
    "conditional": ("true_computation", "false_computation", "branch_computations"),
    "while": ("body", "condition"),
}
"""Instructions that run other computations, and the attributes that name those."""
WRAPPERS = ("fusion", "async-start", "call-start")
"""Instructions whose computation is their own inside. A TPU's call-start runs on its
SparseCores."""
_LEAF = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array: element type, dimensions, memory space, and bytes without and with the padding of
    its layout's tiles."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    bytes: int
    padded: int


@dataclasses.dataclass(slots=True, eq=False)
class Instruction:
    """One line of the program. `shape` and `attributes` are XLA's text; `literal` stands between
    the parentheses of a constant or parameter."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    computation: "Computation" = dataclasses.field(repr=False)
    literal: str = ""

    @property
    def inputs(self) -> list["Instruction"]:
        """Instructions that make its operands."""
        return [self.computation.instructions[name] for name in self.operands]

    @property
    def users(self) -> list[tuple["Instruction", int]]:
        """Instructions that take it as an operand, each with the number of that operand."""
        return self.computation.users[self.name]

    @property
    def inside(self) -> "Computation | None":
        """The computation of a fusion or asynchronous call; None for other instructions."""
        if self.opcode not in WRAPPERS:
            return None
        return self.computation.others[next(self.called())[1]]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays that it makes: one, or the leaves of a tuple."""
        return shapes(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays that it makes, without padding."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """jax's scope and primitive (`jit(step)/.../dot_general`), or the path of an argument;
        empty where XLA kept none."""
        quoted = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else ""

    def attribute(self, key: str) -> str | None:
        """The text of an attribute that has no comma of its own outside brackets: `{0,1}`, `%name`,
        `LT`."""
        value = re.search(
            rf"(?:^|[ ,{{]){key}=(%?[\w.-]+|\{{[^{{}}]*\}}|\"[^\"]*\")", self.attributes
        )
        return value[1].strip('%"') if value else None

    def numbers(self, key: str) -> tuple[int, ...]:
        """The integers of an attribute such as `dimensions={0,2}`; none where it is absent."""
        return tuple(map(int, re.findall(r"\d+", self.attribute(key) or "")))

    def called(self) -> Iterator[tuple[str, str]]:
        """The computations that it runs: (attribute that names it, name)."""
        for key in CALLS.get(self.opcode, ()):
            for name in re.findall(r"[\w.-]+", self.attribute(key) or ""):
                yield key, name


@dataclasses.dataclass(eq=False)
class Computation:
    """Instructions by name, in the order in which they run."""

    name: str
    instructions: dict[str, Instruction]
    root: str
    others: dict[str, "Computation"] = dataclasses.field(repr=False)
    """All computations of the program by name."""
    caller: Instruction | None = None
    """The instruction that calls it (the last of several)."""

    @property
    def wrapper(self) -> Instruction | None:
        """The instruction that it is the inside of: a fusion, or an operation wrapped to run
        asynchronously; None for other computations."""
        return self.caller if self.caller and self.caller.opcode in WRAPPERS else None

    @property
    def result(self) -> Instruction:
        """The instruction that makes its result."""
        return self.instructions[self.root]

    @property
    def parameters(self) -> list[Instruction]:
        """Parameters in the order of their numbers."""
        return sorted(
            (i for i in self.instructions.values() if i.opcode == "parameter"),
            key=lambda i: int(i.literal),
        )

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Name -> (instruction that takes it as an operand, number of that operand)."""
        users: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for number, operand in enumerate(instruction.operands):
                users[operand].append((instruction, number))
        return users


@dataclasses.dataclass
class Program:
    """A module. A computation runs `times[name]` times in a step, every branch of a conditional
    each time; what a reduction applies to single elements counts as never run."""

    attributes: str
    computations: dict[str, Computation]
    entry: Computation
    frames: dict[int, tuple[str, int, int]]
    """Stack frame -> (file, line, frame of the caller or 0)."""
    times: dict[str, float] = dataclasses.field(default_factory=dict)
    uncounted: list[str] = dataclasses.field(default_factory=list)
    """Loops whose number of turns cannot be read from the program: they count as one turn."""

    @property
    def tiled(self) -> bool:
        """True of a TPU's program: arrays lie in tiles, and memory spaces other than the plain and
        the host's are on the chip."""
        return ":T(" in self.attributes

    def in_device_memory(self, space: int) -> bool:
        """True of memory spaces in the device's main memory."""
        return space == PLAIN or (space != HOST and not self.tiled)

    def source(self, instruction: Instruction) -> str:
        """`file:line` of the innermost caller that is maxstack's or in no installed package; empty
        where XLA kept none."""
        return next(self.sources(instruction), "")

    def sources(self, instruction: Instruction) -> Iterator[str]:
        """That line, then the callers of it outwards; where all are in packages, the innermost of
        them alone."""
        number = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        innermost = frame = int(number[1]) if number else 0
        known = False
        while frame in self.frames:
            file, line, caller = self.frames[frame]
            if "-packages/" not in file or "-packages/maxstack/" in file:
                known = True
                yield f"{file}:{line}"
            frame = caller
        if not known and innermost in self.frames:
            yield "{}:{}".format(*self.frames[innermost])

    def running(self) -> Iterator[tuple[Computation, float]]:
        """(computation, times that it runs), without those inside fusions: computations whose
        instructions the device is given one by one."""
        for computation in self.computations.values():
            if self.times.get(computation.name) and not computation.wrapper:
                yield computation, self.times[computation.name]


def within(op_name: str, scopes: Iterable[str]) -> bool:
    """True where jax's scopes of an operation, `a/jvp(b)/c`, hold one of `scopes` whole."""
    return not {*scopes}.isdisjoint(re.split(r"[/():]", op_name))


@functools.lru_cache(maxsize=65536)
def shapes(text: str) -> tuple[Shape, ...]:
    """The arrays in a shape's text, tuples flattened; tokens have no bytes."""
    return tuple(_shape(*match.groups()) for match in _LEAF.finditer(text))


@functools.lru_cache(maxsize=65536)
def _shape(dtype: str, dims: str, layout: str | None) -> Shape:
    sizes = tuple(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim)
    order, _, tiles = (layout or "").partition(":")
    space = re.search(r"S\((\d+)\)", tiles)
    minor = [int(n) for n in order.split(",") if n]
    physical = [sizes[n] for n in reversed(minor)] if len(minor) == len(sizes) else list(sizes)
    tiled = re.search(r"T((?:\([\d,]+\))+)", tiles)
    for tile in re.findall(r"\(([\d,]+)\)", tiled[1]) if tiled else ():
        physical = _padded(physical, [int(n) for n in tile.split(",")])
    bits = _bits(dtype, tiles)
    return Shape(
        dtype,
        sizes,
        int(space[1]) if space else PLAIN,
        -(-math.prod(sizes) * bits // 8),
        -(-math.prod(physical) * bits // 8),
    )


def _bits(dtype: str, tiles: str) -> int:
    """Bits of an element: E(n) of the layout, else the first number in the type's name."""
    if dtype in ("token", "opaque"):
        return 0
    number = re.search(r"E\((\d+)\)", tiles) or re.search(r"[a-z]+(\d+)", dtype)
    return int(number[1]) if number else 8


def _padded(physical: list[int], tile: list[int]) -> list[int]:
    """Dimensions, major to minor, cut into tiles: the numbers of tiles, then the tile itself."""
    physical = [1] * (len(tile) - len(physical)) + physical
    rest, last = physical[: -len(tile)], physical[-len(tile) :]
    return rest + [-(-n // t) for n, t in zip(last, tile, strict=True)] + tile
