"""Measures activations: the values that a compiled step keeps from its forward pass for the
backward pass.

jax's op_names tell the passes apart. A value counts if the forward pass computes it, if some
instruction of the backward pass uses it, directly or through copies and tuples, and if it depends
on the batch: what depends on the weights alone, such as a cast, is no activation."""

import functools
from collections.abc import Iterator

from maxstack.plan import loops
from maxstack.plan.hlo import Computation, Instruction, Program

BATCH = "batch["
"""Prefix of the names of a step's arguments that hold the batch."""
# These hand a value on without computing it; counting them too would count one value several times.
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
        # With the layout's padding: that is what the value takes, on a TPU up to whole tiles.
        for shape in made.shapes
        if program.in_device_memory(shape.space)
    )


def _backward(instruction: Instruction) -> bool:
    return "transpose(" in instruction.op_name


def _made_forward(computation: Computation) -> Iterator[Instruction]:
    """Yield the values that the forward pass computes, not those that it only passes on."""
    for made in computation.instructions.values():
        # A tuple is not counted itself, but its elements where they are taken out: some of them may
        # only pass through a loop, as weights do.
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
        # Instructions with several results are counted by the get-tuple-element of each.
        elif made.opcode in PASSES_ON | ORIGINS or len(made.shapes) != 1:
            continue
        # jax writes transpose(jvp(..)) around what it derives for the backward pass, so jvp( alone
        # does not tell the passes apart.
        if "jvp(" in source.op_name and not _backward(source):
            yield made


def _read_backward(made: Instruction) -> bool:
    return any(
        # A copy or tuple between the passes may carry the name of either; what counts is who
        # computes with the value.
        _read_backward(user) if user.opcode in PASSES_ON else _backward(user)
        for user, _ in made.users
    )


def _of_batch(program: Program, value: Instruction) -> bool:
    """Return True for a value that depends on the batch."""

    # Without the cache a value would be visited once for every path to it.
    @functools.cache
    def depends(made: Instruction) -> bool:
        if made.opcode == "parameter":
            # Weights that both passes read (casts, gathers) are no activations. Inside loops the
            # parameters are not traced further: there each counts as dependent on the batch.
            return made.computation is not program.entry or made.op_name.startswith(BATCH)
        return any(map(depends, made.inputs))

    return depends(value)
