"""What a device computes and moves through its memory in a step, instruction by instruction of a
compiled program: what a roofline is made of."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from maxstack.plan.hlo import HOST, PLAIN, Computation, Instruction, Program, Shape
from maxstack.plan.traffic import KINDS

FREE = {
    "tuple",
    "get-tuple-element",
    "bitcast",
    "parameter",
    "constant",
    "after-all",
    "partition-id",
    "replica-id",
    "while",
    "conditional",
    "call",
    "opt-barrier",
    "add-dependency",
    "domain",
    "send",
    "recv",
    "async-update",
}
FREE_CALLS = {
    "AllocateBuffer",
    "ConcatBitcast",
    "SliceId",
    "ZeroCrop",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveStart",
    "AsyncCollectiveDone",
    "Sharding",
    "LayoutConstraint",
    "PrepareAsyncCallStart",
    "PrepareAsyncCallDone",
}
SELECTS = {"slice", "dynamic-slice", "gather"}
VIEWS = {"bitcast", "reshape", "get-tuple-element"}
RELAYOUT = {*VIEWS, "copy", "parameter"}
"""Inside a fusion none of these touches memory: a copy there is another way to read the same
tiles."""
IN_PLACE = {"dynamic-update-slice": 1, "scatter": -1}
"""Operations that overwrite part of their first operand, and which operand says with what."""
DECLARED = re.compile(r'(?:\\*"|\\22)flops(?:\\*"|\\22): ?(?:\\*"|\\22)?(\d+)')
"""A kernel's own count, in the backend_config of a TPU's call or the metadata of a Triton call,
whose quotes are written as \\22."""
MATMULS = ("__cublas$", "__onednn$matmul")


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction that the device is given. FLOPs and bytes are of one device in a step, all
    `times` together."""

    name: str
    opcode: str
    op_name: str
    """jax's scope and primitive: those of its largest product, if it has one."""
    times: float
    flops: float
    """2 for each multiplication of a matrix product or convolution; other arithmetic is not
    counted."""
    bytes: float
    """Read from and written to the device's main memory, with the padding of its layout."""
    dtype: str = ""
    """Element type of the largest product's operands."""
    host_bytes: float = 0.0
    """Read from and written to pinned host memory."""
    kernel: str = ""
    """Target of a custom call. FLOPs of a kernel are those it declares itself (a Pallas kernel's
    cost estimate), or none."""


def operations(program: Program, without: Sequence[str] = ()) -> list[Operation]:
    """Everything that runs, in the program's order, but collectives and what costs nothing; leaves
    out what has one of `without` in its op_name."""
    found = []
    for computation, times in program.running():
        for instruction in computation.instructions.values():
            if (one := _operation(program, computation, instruction, times)) and not any(
                scope in one.op_name for scope in without
            ):
                found.append(one)
    return found


def _operation(
    program: Program, computation: Computation, instruction: Instruction, times: float
) -> Operation | None:
    kind = instruction.opcode
    target = instruction.attribute("custom_call_target") or ""
    if (
        kind in FREE
        or kind.endswith("-done")
        or target in FREE_CALLS
        or kind.removesuffix("-start") in KINDS
    ):
        return None
    products = sorted(_products(program, computation, instruction), reverse=True)
    moved = [
        *_reads(program, computation, instruction),
        *_writes(program, computation, instruction),
    ]
    memory = sum(
        size for space, size in moved if space == PLAIN or space != HOST and not program.tiled
    )
    op_name = products[0][2] if products else ""
    op_name = (
        op_name
        or instruction.op_name
        or _inside(program, instruction)
        or _near(computation, instruction)
    )
    return Operation(
        instruction.name,
        kind,
        op_name,
        times,
        times * sum(row[0] for row in products),
        times * memory,
        products[0][1] if products else "",
        times * sum(size for space, size in moved if space == HOST),
        target,
    )


def _inside(program: Program, instruction: Instruction) -> str:
    """The op_name nearest to the result of a fusion that has none."""
    called = program.inside(instruction)
    names = [inner.op_name for inner in reversed(called.instructions.values())] if called else []
    return next(filter(None, names), "")


def _near(computation: Computation, instruction: Instruction) -> str:
    """The op_name of what makes its operands, or else of what takes its result, a few steps away:
    for copies that the compiler put in."""
    for towards_users in (False, True):
        names = [instruction.name]
        for _ in range(4):
            names = (
                [user.name for name in names for user, _ in computation.users[name]]
                if towards_users
                else [
                    operand for name in names for operand in computation.instructions[name].operands
                ]
            )
            if found := next(
                filter(None, (computation.instructions[name].op_name for name in names[:8])), ""
            ):
                return found
    return ""


def _products(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[tuple[float, str, str]]:
    """(FLOPs, element type, op_name) of every product in an instruction."""
    kind = instruction.opcode
    if called := program.inside(instruction):
        for inner in called.instructions.values():
            yield from _products(program, called, inner)
        return
    target = instruction.attribute("custom_call_target") or ""
    operands = (
        [computation.instructions[name].shapes for name in instruction.operands[:2]]
        if kind in ("dot", "convolution", "ragged-dot", "custom-call")
        else []
    )
    if kind == "custom-call" and not target.startswith(MATMULS):
        declared = DECLARED.search(instruction.attributes)
        if declared and int(declared[1]):
            given = [
                shape
                for name in instruction.operands
                for shape in computation.instructions[name].shapes
            ]
            yield (
                float(declared[1]),
                max(given, key=lambda shape: shape.bytes).dtype if given else "",
                instruction.op_name,
            )
        return
    if not operands:
        return
    left, right, out = operands[0][0], operands[1][0], instruction.shapes[0]
    if kind == "dot":
        count = math.prod(out.dims) * math.prod(
            left.dims[n] for n in instruction.numbers("lhs_contracting_dims")
        )
    elif kind == "convolution":
        count = _convolution(instruction, left, right, out)
    # left is [..., m, k] in some order and the result ends in n: every element of left meets n
    # columns
    else:
        count = math.prod(left.dims) * out.dims[-1]
    yield 2.0 * count, left.dtype, instruction.op_name


def _convolution(instruction: Instruction, left: Shape, right: Shape, out: Shape) -> int:
    """Multiplications that meet neither padding nor the holes of a dilation, as XLA's
    HloCostAnalysis counts. A TPU's batched products are such."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels, instruction.name
    window = dict(
        re.findall(
            r"(\w+)=([\dx_-]+)",
            (re.search(r"window=\{([^}]*)\}", instruction.attributes) or ["", ""])[1],
        )
    )
    spatial = [label for label in labels[1] if label.isdigit()]
    count = 1
    for n, label in enumerate(sorted(spatial, key=int)):

        def of(key: str, default: str, n: int = n) -> str:
            return window[key].split("x")[n] if key in window else default

        low = int(of("pad", "0_0").split("_")[0])
        stride, hole, step = (
            int(of("stride", "1")),
            int(of("lhs_dilate", "1")),
            int(of("rhs_dilate", "1")),
        )
        size, last = int(of("size", "1")), (left.dims[labels[1].index(label)] - 1) * hole
        places = (
            o * stride + k * step - low
            for o in range(out.dims[labels[3].index(label)])
            for k in range(size)
        )
        count *= sum(0 <= place <= last and place % hole == 0 for place in places)
    groups = (
        int(instruction.attribute("feature_group_count") or 1),
        int(instruction.attribute("batch_group_count") or 1),
    )
    features, batch = (
        left.dims[labels[1].index("f")] // groups[0],
        left.dims[labels[1].index("b")] // groups[1],
    )
    return count * features * batch * out.dims[labels[3].index("f")]


def _reads(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[tuple[int, int]]:
    """(memory space, bytes) that one run reads."""
    for name in dict.fromkeys(instruction.operands):
        shapes = computation.instructions[name].shapes
        whole = sum(shape.padded for shape in shapes)
        seen = [
            _read(program, instruction, place)
            for place, operand in enumerate(instruction.operands)
            if operand == name
        ]
        yield (
            shapes[0].space if shapes else PLAIN,
            min(whole, sum(whole if part is None else part for part in seen)),
        )


def _read(program: Program, user: Instruction, place: int) -> int | None:
    """Bytes of operand number `place` that `user` looks at; None: all."""
    kind = user.opcode
    if kind in SELECTS and place == 0:
        return sum(shape.padded for shape in user.shapes)
    if kind.removesuffix("-start") in SELECTS and place == 0:
        return user.shapes[len(user.operands)].padded
    if (
        kind in IN_PLACE
        and place == 0
        or kind == "tuple"
        or kind in KINDS
        or user.attribute("custom_call_target") in FREE_CALLS
    ):
        return 0
    called = program.inside(user)
    return _seen(program, called, called.parameters[place]) if called else None


def _seen(program: Program, computation: Computation, made: Instruction) -> int | None:
    """Bytes of a value inside a fusion that its users look at; None: all."""
    total = 0
    for user, place in computation.users[made.name]:
        if _relayout(program, user):
            seen = _seen(program, computation, user)
        elif (
            user.opcode in IN_PLACE
            and place == 0
            and any(
                later.opcode not in (*VIEWS, "tuple") for later, _ in computation.users[user.name]
            )
        ):
            seen = None  # what was not overwritten is looked at later
        else:
            seen = _read(program, user, place)
        if seen is None:
            return None
        total += seen
    return total


def _relayout(program: Program, user: Instruction) -> bool:
    """Whether an instruction inside a fusion gives its operand as it is, but for the layout; alone
    or as a fusion of its own."""
    called = program.inside(user)
    return (
        user.opcode in RELAYOUT
        or called is not None
        and all(one.opcode in RELAYOUT for one in called.instructions.values())
    )


def _writes(
    program: Program, computation: Computation, made: Instruction
) -> Iterator[tuple[int, int]]:
    """(memory space, bytes) that one run writes."""
    kind = made.opcode
    if called := program.inside(made):
        found = [*_results(program, called, called.instructions[called.root])]
        yield from (
            ((made.shapes[0].space, size) for _, size in found) if len(made.shapes) == 1 else found
        )
    elif kind in IN_PLACE:
        update = computation.instructions[made.operands[IN_PLACE[kind]]].shapes[0]
        yield made.shapes[0].space, update.padded
    elif kind == "copy-start":
        yield made.shapes[0].space, made.shapes[0].padded
    elif kind.endswith(
        "-start"
    ):  # makes its operands again, then the result, then scalars that the end waits for
        given = sum(len(computation.instructions[name].shapes) for name in made.operands)
        yield from ((shape.space, shape.padded) for shape in made.shapes[given:] if shape.dims)
    else:
        yield from ((shape.space, shape.padded) for shape in made.shapes)


def _results(
    program: Program, computation: Computation, made: Instruction
) -> Iterator[tuple[int, int]]:
    """(memory space, bytes) of a result inside a fusion, less what is passed through."""
    if made.opcode == "tuple":
        for operand in made.operands:
            yield from _results(program, computation, computation.instructions[operand])
    elif made.opcode in ("bitcast", "reshape"):  # the outermost view says where the result lies
        seen = _results(program, computation, computation.instructions[made.operands[0]])
        yield from ((made.shapes[0].space, size) for _, size in seen)
    elif (
        made.opcode not in ("parameter", "constant", *KINDS)
        and made.attribute("custom_call_target") not in FREE_CALLS
    ):
        yield from _writes(program, computation, made)
