"""Shapes, instructions and computations of a compiled program, as program.py parses them."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator

PLAIN = 0
"""XLA's number of a device's main memory."""
HOST = 5
"""XLA's number of pinned host memory."""
# The to_apply of a reduction or sort is left out: it is applied to elements, and its instructions
# are no operations that the device runs by themselves.
CALLS = {
    "fusion": ("calls",),
    "async-start": ("calls",),
    "call-start": ("to_apply",),
    "call": ("to_apply",),
    "conditional": ("true_computation", "false_computation", "branch_computations"),
    "while": ("body", "condition"),
}
"""Opcodes that call computations, and the attributes that name these."""
WRAPPERS = ("fusion", "async-start", "call-start")
"""Opcodes whose computation is a part of them. A TPU's call-start runs on its SparseCores."""
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


# eq=False: instructions are compared and hashed by identity. By value each comparison would walk
# the whole program, which every instruction refers to.
@dataclasses.dataclass(slots=True, eq=False)
class Instruction:
    """One line of the program. `shape` and `attributes` are XLA's text; `literal` is the text
    between the parentheses of a constant or parameter."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    computation: "Computation" = dataclasses.field(repr=False)
    literal: str = ""

    @property
    def inputs(self) -> list["Instruction"]:
        """Instructions that produce its operands."""
        return [self.computation.instructions[name] for name in self.operands]

    @property
    def users(self) -> list[tuple["Instruction", int]]:
        """Instructions that use it, each with the number of the operand."""
        return self.computation.users[self.name]

    @property
    def inside(self) -> "Computation | None":
        """The computation of a fusion or asynchronous call; None for other instructions."""
        if self.opcode not in WRAPPERS:
            return None
        return self.computation.others[next(self.called())[1]]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays that it produces: one, or the leaves of a tuple."""
        return shapes(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays that it produces, without padding."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """jax's scope and primitive (`jit(step)/.../dot_general`), or the path of an argument;
        empty where XLA kept none."""
        # The name may hold quotes, which XLA escapes.
        quoted = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else ""

    def attribute(self, key: str) -> str | None:
        """Return the text of an attribute without commas outside brackets: `{0,1}`, `%name`,
        `LT`."""
        value = re.search(
            rf"(?:^|[ ,{{]){key}=(%?[\w.-]+|\{{[^{{}}]*\}}|\"[^\"]*\")", self.attributes
        )
        return value[1].strip('%"') if value else None

    def numbers(self, key: str) -> tuple[int, ...]:
        """Return the integers of an attribute such as `dimensions={0,2}`; none if it is absent."""
        return tuple(map(int, re.findall(r"\d+", self.attribute(key) or "")))

    def called(self) -> Iterator[tuple[str, str]]:
        """Yield (attribute, name) of each computation that it calls."""
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
    """The instruction that calls it, the last of several."""

    @property
    def wrapper(self) -> Instruction | None:
        """The fusion or asynchronous operation that it is a part of; None for other
        computations."""
        return self.caller if self.caller and self.caller.opcode in WRAPPERS else None

    @property
    def result(self) -> Instruction:
        """The instruction that produces its result."""
        return self.instructions[self.root]

    @property
    def parameters(self) -> list[Instruction]:
        """Parameters by number."""
        return sorted(
            (i for i in self.instructions.values() if i.opcode == "parameter"),
            key=lambda i: int(i.literal),
        )

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Name -> (instruction that uses it, number of the operand)."""
        users: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for number, operand in enumerate(instruction.operands):
                users[operand].append((instruction, number))
        return users


@dataclasses.dataclass
class Program:
    """A module. A computation runs `times[name]` times in a step. All branches of a conditional
    count each time; a computation that a reduction applies to elements counts as never run."""

    attributes: str
    computations: dict[str, Computation]
    entry: Computation
    frames: dict[int, tuple[str, int, int]]
    """Stack frame -> (file, line, frame of the caller or 0)."""
    times: dict[str, float] = dataclasses.field(default_factory=dict)
    uncounted: list[str] = dataclasses.field(default_factory=list)
    """Loops whose number of turns the program does not tell; they count as one turn."""

    def instructions(self) -> Iterator[Instruction]:
        """Yield the instructions of all computations."""
        for computation in self.computations.values():
            yield from computation.instructions.values()

    @property
    def tiled(self) -> bool:
        """True for a TPU's program: arrays are tiled, and memory spaces other than PLAIN and HOST
        are on the chip."""
        return ":T(" in self.attributes

    def in_device_memory(self, space: int) -> bool:
        """Return True for memory spaces in the device's main memory."""
        # XLA's CPU and GPU compilers use other numbers for blocks of the same memory.
        return space == PLAIN or (space != HOST and not self.tiled)

    def source(self, instruction: Instruction) -> str:
        """Return `file:line` of the innermost caller in maxstack or outside installed packages;
        empty if XLA kept none."""
        return next(self.sources(instruction), "")

    def sources(self, instruction: Instruction) -> Iterator[str]:
        """Yield that line, then its callers outwards; if all are in packages, only the
        innermost."""
        number = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        innermost = frame = int(number[1]) if number else 0
        known = False
        while frame in self.frames:
            file, line, caller = self.frames[frame]
            # maxstack itself may be installed in site-packages, and its lines are the ones to show.
            if "-packages/" not in file or "-packages/maxstack/" in file:
                known = True
                yield f"{file}:{line}"
            frame = caller
        # An operation that jax alone made still gets a line rather than none.
        if not known and innermost in self.frames:
            yield "{}:{}".format(*self.frames[innermost])

    def running(self) -> Iterator[tuple[Computation, float]]:
        """Yield (computation, times that it runs) for those whose instructions the device executes
        one by one, so without the inside of fusions."""
        for computation in self.computations.values():
            # A fusion is one operation for the device, and its inside is counted with it.
            if self.times.get(computation.name) and not computation.wrapper:
                yield computation, self.times[computation.name]


def within(op_name: str, scopes: Iterable[str]) -> bool:
    """Return True if the scopes of an op_name such as `a/jvp(b)/c` include one of `scopes`."""
    # Split into whole scopes: a search for the text would find `attention` in `attention_norm` too.
    return not {*scopes}.isdisjoint(re.split(r"[/():]", op_name))


# A program repeats the same few shapes in most of its lines.
@functools.lru_cache(maxsize=65536)
def shapes(text: str) -> tuple[Shape, ...]:
    """Parse the arrays in a shape's text, with tuples flattened; tokens have no bytes."""
    return tuple(_shape(*match.groups()) for match in _LEAF.finditer(text))


@functools.lru_cache(maxsize=65536)
def _shape(dtype: str, dims: str, layout: str | None) -> Shape:
    sizes = tuple(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim)
    order, _, tiles = (layout or "").partition(":")
    space = re.search(r"S\((\d+)\)", tiles)
    # XLA lists dimensions from minor to major; tiles cut them from major to minor.
    minor = [int(n) for n in order.split(",") if n]
    physical = [sizes[n] for n in reversed(minor)] if len(minor) == len(sizes) else list(sizes)
    # Several tiles nest, as in T(8,128)(2,1): each one cuts the dimensions that the one before
    # left.
    tiled = re.search(r"T((?:\([\d,]+\))+)", tiles)
    for tile in re.findall(r"\(([\d,]+)\)", tiled[1]) if tiled else ():
        physical = _padded(physical, [int(n) for n in tile.split(",")])
    bits = _bits(dtype, tiles)
    return Shape(
        dtype,
        sizes,
        int(space[1]) if space else PLAIN,
        # Bits are rounded up to bytes once for the array: two 4-bit numbers share a byte.
        -(-math.prod(sizes) * bits // 8),
        -(-math.prod(physical) * bits // 8),
    )


def _bits(dtype: str, tiles: str) -> int:
    """Return the bits of an element: E(n) of the layout, or the first number in the type's name."""
    if dtype in ("token", "opaque"):
        return 0
    # E(4) is how a layout says that 4-bit numbers are packed; without it each takes the bits of its
    # type. pred has no number and takes a byte.
    number = re.search(r"E\((\d+)\)", tiles) or re.search(r"[a-z]+(\d+)", dtype)
    return int(number[1]) if number else 8


def _padded(physical: list[int], tile: list[int]) -> list[int]:
    """Cut dimensions, major to minor, into tiles: numbers of tiles, then the tile's own
    dimensions."""
    # A tile may have more dimensions than the array: a vector is tiled as a matrix of one row.
    physical = [1] * (len(tile) - len(physical)) + physical
    split = len(physical) - len(tile)
    counts = [-(-n // t) for n, t in zip(physical[split:], tile, strict=True)]
    return physical[:split] + counts + tile
