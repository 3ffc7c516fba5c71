"""Operations of a compiled program: the FLOPs of each, and the bytes that it moves through a
device's memory, per step.

An operation is an instruction that the device executes by itself. Its FLOPs are those of the matrix
products and convolutions in it. Its bytes are its operands and results in main memory, except that
a slice reads only what it takes, an update in place writes only what it changes, and a fusion reads
only the parts of an operand that its inside uses: otherwise a scan over stacked layers would read
the whole stack in every turn."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from maxstack.plan.hlo import PLAIN, Instruction, Program, Shape, within
from maxstack.plan.traffic import KINDS

# Loops, conditionals and calls are free themselves: the instructions inside them are counted where
# they run.
FREE = set(
    """
    tuple get-tuple-element bitcast parameter constant after-all partition-id replica-id while
    conditional call opt-barrier add-dependency domain send recv async-update
    """.split()
)
FREE_CALLS = set(
    """
    AllocateBuffer ConcatBitcast SliceId ZeroCrop AssumeGatherIndicesInBound AsyncCollectiveStart
    AsyncCollectiveDone Sharding LayoutConstraint PrepareAsyncCallStart PrepareAsyncCallDone
    """.split()
)
SELECTS = {"slice", "dynamic-slice", "gather"}
VIEWS = {"bitcast", "reshape", "get-tuple-element"}
RELAYOUT = {*VIEWS, "copy", "parameter"}
"""Operations that touch no memory inside a fusion; a copy there only reads the same tiles in
another order."""
IN_PLACE = {"dynamic-update-slice": 1, "scatter": -1}
"""Operations that overwrite part of their first operand -> the number of the operand that they
write."""
DECLARED = re.compile(r'(?:\\*"|\\22)flops(?:\\*"|\\22): ?(?:\\*"|\\22)?(\d+)')
"""A kernel's own count of FLOPs, in the backend_config of a TPU call or the metadata of a Triton
call, which writes quotes as \\22."""
PRODUCTS = ("dot", "convolution", "ragged-dot", "custom-call")
MATMULS = ("__cublas$", "__onednn$matmul")
"""Prefixes of the names of custom calls that are matrix products."""
WINDOW = {"pad": 0, "size": 1, "stride": 1, "lhs_dilate": 1, "rhs_dilate": 1}
"""Fields of a convolution's window, a number per spatial dimension, and their defaults."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction that a device executes. FLOPs and bytes are per device and step, of all
    `times` together."""

    name: str
    opcode: str
    op_name: str
    """jax's scope and primitive, of its largest product if it has one."""
    times: float
    flops: float
    """2 for each multiplication of a matrix product or convolution; other arithmetic is not
    counted."""
    bytes: float
    """Read from and written to the device's main memory, with the padding of its layout."""
    dtype: str = ""
    """Element type of the largest product's operands."""
    kernel: str = ""
    """Target of a custom call. A kernel's FLOPs are those that it declares (a Pallas kernel's cost
    estimate), or none."""


def operations(program: Program, without: Sequence[str] = ()) -> list[Operation]:
    """Return the operations that run, in the program's order, except collectives, free operations
    and those in one of the scopes `without`."""
    rows = (
        _operation(program, instruction, times)
        for computation, times in program.running()
        for instruction in computation.instructions.values()
    )
    return [row for row in rows if row and not within(row.op_name, without)]


def _operation(program: Program, instruction: Instruction, times: float) -> Operation | None:
    kind = instruction.opcode
    target = instruction.attribute("custom_call_target") or ""
    if (
        kind in FREE
        or kind.endswith("-done")
        or target in FREE_CALLS
        # Collectives are counted by traffic.py, on links instead of memory.
        or kind.removesuffix("-start") in KINDS
    ):
        return None
    # FLOPs of elementwise arithmetic are not counted: it is limited by the bytes that it moves.
    products = [*_products(instruction)]
    moved = [*_reads(instruction), *_writes(instruction)]
    return Operation(
        name=instruction.name,
        opcode=kind,
        op_name=origin(instruction).op_name,
        times=times,
        flops=times * sum(flops for flops, *_ in products),
        bytes=times * sum(size for space, size in moved if program.in_device_memory(space)),
        dtype=_largest(products)[1] if products else "",
        kernel=target,
    )


def origin(instruction: Instruction) -> Instruction:
    """Find the instruction whose op_name tells where this one comes from: its largest product;
    itself; the inside of a fusion, from the result on; or, for copies that the compiler inserted, a
    producer of its operands or a user of its result a few steps away. Itself if none has an
    op_name."""
    if products := [*_products(instruction)]:
        maker = _largest(products)[2]
        # The largest product decides: the name of a fusion is that of its result, which may be
        # elementwise work of another layer.
        if maker.op_name:
            return maker
    candidates = [instruction]
    if called := instruction.inside:
        candidates += reversed(called.instructions.values())
    for towards_users in (False, True):
        near = [instruction]
        # Four steps and eight neighbours a step: copies that the compiler inserts stand next to
        # what they serve, and a walk through the whole program would find a name for anything.
        for _ in range(4):
            near = [x for made in near for x in _neighbours(made, towards_users)][:8]
            candidates += near
    return next((made for made in candidates if made.op_name), instruction)


def _largest(products: list[tuple[float, str, Instruction]]) -> tuple[float, str, Instruction]:
    return max(products, key=lambda product: product[0])


def _neighbours(made: Instruction, towards_users: bool) -> list[Instruction]:
    return [user for user, _ in made.users] if towards_users else made.inputs


def _products(instruction: Instruction) -> Iterator[tuple[float, str, Instruction]]:
    """Yield (FLOPs, element type, the product) of every product in an instruction."""
    kind = instruction.opcode
    if called := instruction.inside:
        for inner in called.instructions.values():
            yield from _products(inner)
        return
    if kind not in PRODUCTS:
        return
    operands = [shape for made in instruction.inputs for shape in made.shapes]
    target = instruction.attribute("custom_call_target") or ""
    # A kernel's products are not in the text; only what it declares is known. jax drops the cost
    # estimate of Pallas kernels for Triton, so these write it into their metadata.
    if kind == "custom-call" and not target.startswith(MATMULS):
        declared = DECLARED.search(instruction.attributes)
        if declared and int(declared[1]):
            # The text does not say which operands a kernel multiplies; the largest are taken for
            # them.
            dtypes = [x.dtype for x in sorted(operands, key=lambda x: -x.bytes)]
            yield float(declared[1]), dtypes[0] if dtypes else "", instruction
        return
    left, right = operands[:2]
    out = instruction.shapes[0]
    if kind == "dot":
        contracted = instruction.numbers("lhs_contracting_dims")
        count = math.prod(out.dims) * math.prod(left.dims[n] for n in contracted)
    elif kind == "convolution":
        count = _convolution(instruction, left, out)
    else:
        # left is [..., m, k] in some order and out ends in n: each element of left meets n columns.
        count = math.prod(left.dims) * out.dims[-1]
    yield 2.0 * count, left.dtype, instruction


def _convolution(instruction: Instruction, left: Shape, out: Shape) -> int:
    """Count the multiplications outside padding and the holes of a dilation, as XLA's
    HloCostAnalysis does. A TPU's batched products are convolutions."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels, instruction.name
    window = dict(re.findall(r"(\w+)=([\dx_-]+)", instruction.attribute("window") or ""))
    fields = {key: value.split("x") for key, value in window.items()}
    count = 1
    for n, label in enumerate(sorted(filter(str.isdigit, labels[1]))):
        low, size, stride, hole, step = (
            int(fields[key][n].split("_")[0]) if key in fields else default
            for key, default in WINDOW.items()
        )
        last = (left.dims[labels[1].index(label)] - 1) * hole
        # Counted one by one for each spatial dimension, which are independent: padding, strides and
        # dilation at once have no simple formula.
        positions = (
            o * stride + k * step - low
            for o in range(out.dims[labels[3].index(label)])
            for k in range(size)
        )
        count *= sum(0 <= at <= last and at % hole == 0 for at in positions)
    # Each output channel meets only the input channels of its group.
    features = left.dims[labels[1].index("f")] // _number(instruction, "feature_group_count")
    batch = left.dims[labels[1].index("b")] // _number(instruction, "batch_group_count")
    return count * features * batch * out.dims[labels[3].index("f")]


def _number(instruction: Instruction, key: str) -> int:
    return int(instruction.attribute(key) or 1)


def _reads(instruction: Instruction) -> Iterator[tuple[int, float]]:
    """Yield (memory space, bytes) that one run reads."""
    # An operand that an instruction uses twice is read from memory once.
    for made in dict.fromkeys(instruction.inputs):
        shapes = made.shapes
        read = sum(
            _read(instruction, number)
            for number, other in enumerate(instruction.inputs)
            if other is made
        )
        space = shapes[0].space if shapes else PLAIN
        yield space, min(read, sum(shape.padded for shape in shapes))


def _read(user: Instruction, number: int) -> float:
    """Return the bytes of operand `number` that `user` reads; infinite for all."""
    kind = user.opcode
    if kind in SELECTS and number == 0:
        return sum(shape.padded for shape in user.shapes)
    # An asynchronous slice returns its operands first, then its result.
    if kind.removesuffix("-start") in SELECTS and number == 0:
        return user.shapes[len(user.operands)].padded
    if (
        kind in IN_PLACE
        and number == 0
        or kind == "tuple"
        or kind in KINDS
        or user.attribute("custom_call_target") in FREE_CALLS
    ):
        return 0
    called = user.inside
    return _seen(called.parameters[number]) if called else math.inf


def _seen(made: Instruction) -> float:
    """Return the bytes of a value inside a fusion that its users read; infinite for all."""
    total = 0.0
    for user, number in made.users:
        # A change of tiles before a slice reads only the slice. Counted as the whole stack, 70B on
        # tpu7x got a bound of 50.9 % MFU, below the published 52.3 %; counted this way 80.2 %.
        if _relayout(user):
            total += _seen(user)
        elif (
            user.opcode in IN_PLACE
            and number == 0
            and any(later.opcode not in (*VIEWS, "tuple") for later, _ in user.users)
        ):
            return math.inf  # the rest of the operand is read later
        else:
            total += _read(user, number)
    return total


def _relayout(user: Instruction) -> bool:
    """Return True if an instruction inside a fusion, or a nested fusion, only changes the layout of
    its operand."""
    called = user.inside
    inner = called.instructions.values() if called else [user]
    return all(instruction.opcode in RELAYOUT for instruction in inner)


def _writes(made: Instruction) -> Iterator[tuple[int, int]]:
    """Yield (memory space, bytes) that one run writes."""
    kind = made.opcode
    shapes = made.shapes
    if called := made.inside:
        for space, size in _results(called.result):
            # The fusion's own shape has the memory space; shapes inside a fusion do not.
            yield shapes[0].space if len(shapes) == 1 else space, size
        return
    if kind in IN_PLACE:
        # In place: only the update is written, the rest of the array stays.
        update = made.inputs[IN_PLACE[kind]].shapes[0]
        yield shapes[0].space, update.padded
        return
    if kind == "copy-start":
        shapes = shapes[:1]
    elif kind.endswith("-start"):
        # It produces its operands again, then the result, then scalars for the -done operation.
        again = sum(len(operand.shapes) for operand in made.inputs)
        shapes = tuple(shape for shape in shapes[again:] if shape.dims)
    yield from ((shape.space, shape.padded) for shape in shapes)


def _results(made: Instruction) -> Iterator[tuple[int, int]]:
    """Yield (memory space, bytes) of a result inside a fusion, without what is passed through."""
    if made.opcode == "tuple":
        for operand in made.inputs:
            yield from _results(operand)
    elif made.opcode in ("bitcast", "reshape"):  # the outermost view has the result's memory space
        for _, size in _results(made.inputs[0]):
            yield made.shapes[0].space, size
    elif (
        # A parameter that a fusion returns is its operand's buffer, not a copy.
        made.opcode not in ("parameter", "constant", *KINDS)
        and made.attribute("custom_call_target") not in FREE_CALLS
    ):
        yield from _writes(made)
