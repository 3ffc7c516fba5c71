"""Measures activations: the values that a compiled step keeps from its forward pass for the
backward pass."""

import functools
from collections.abc import Iterator

from maxstack.plan import loops
from maxstack.plan.hlo import Computation, Instruction, Program

BATCH = "batch["
"""Prefix of the names of a step's arguments that hold the batch."""
PASSES_ON = {
    "tuple",
    "get-tuple-element",
    "bitcast",
    "copy",
    "copy-start",
    "copy-done",
    "opt-barrier",
    "async-done",
}
ORIGINS = {"parameter", "constant", "iota"}


def activations(program: Program) -> int:
    """Sum the bytes on one device, with layout padding, of the values that depend on the batch, are
    produced in the forward pass (jax names it `jvp`) and used in the backward pass
    (`transpose(jvp)`). All of them exist at the end of the forward pass."""
    return sum(
        shape.padded
        for computation, _ in program.running()
        for made in _made_forward(computation)
        if _read_backward(made) and _of_batch(program, made)
        for shape in made.shapes
        if program.in_device_memory(shape.space)
    )


def _backward(instruction: Instruction) -> bool:
    return "transpose(" in instruction.op_name


def _made_forward(computation: Computation) -> Iterator[Instruction]:
    """Yield the values that the forward pass computes, not those that it only passes on."""
    for made in computation.instructions.values():
        source = made
        if made.opcode == "get-tuple-element":
            source = made.inputs[0]
            index = int(made.attribute("index") or 0)
            if (
                source.opcode in PASSES_ON | ORIGINS
                or source.opcode == "while"
                and loops.passes_through(source, index)
            ):
                continue
        elif made.opcode in PASSES_ON | ORIGINS or len(made.shapes) != 1:
            continue
        if "jvp(" in source.op_name and not _backward(source):
            yield made


def _read_backward(made: Instruction) -> bool:
    return any(
        _read_backward(user) if user.opcode in PASSES_ON else _backward(user)
        for user, _ in made.users
    )


def _of_batch(program: Program, value: Instruction) -> bool:
    """Return True for a value that depends on the batch."""

    @functools.cache
    def depends(made: Instruction) -> bool:
        if made.opcode == "parameter":
            return made.computation is not program.entry or made.op_name.startswith(BATCH)
        return any(map(depends, made.inputs))

    return depends(value)
