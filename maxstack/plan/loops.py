"""Counts the turns of a compiled program's while loops.

XLA notes the number on a CPU and for CUDA (known_trip_count). A TPU's program does not carry it, so
the loop is interpreted on its integers: its initial counters are traced through the calls and loops
around it, then its condition and the counters that this reads are evaluated turn by turn."""

import operator
import re
from collections.abc import Callable

from maxstack.plan.hlo import Computation, Instruction

# Bounds the interpretation of a loop that never ends, such as one that is misread.
MOST = 100_000
# A broadcast of a counter holds the same integer in every element.
SAME = set("copy bitcast convert reshape copy-start copy-done broadcast opt-barrier".split())
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
}
Counters = dict[int | None, int | None]
"""Index in a loop's tuple -> the integer there, or None if it is unknown."""
Parameter = Callable[[int, int | None], int | None]
"""(number of a parameter, index in its tuple or None) -> its value, or None if it is not a known
integer."""


def turns(loop: Instruction) -> int | None:
    """Return the turns of a while loop; None if they depend on data and no scope `turns_N` around
    it says how many to expect."""
    # Before XLA's own count: a loop over an expert's rows, whose turns only the run knows, names
    # the turns that balanced routing needs.
    if expected := re.search(r"\bturns_(\d+)/while$", loop.op_name):
        return int(expected[1])
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(noted[1])
    computations = {key: loop.computation.others[name] for key, name in loop.called()}
    condition, body = computations["condition"], computations["body"]
    counters: Counters = {}

    # Records each element of the loop's tuple that is asked for: these are the counters. Evaluating
    # every element instead would walk into the model's arithmetic.
    def before(_: int, index: int | None) -> int | None:
        if index not in counters:
            counters[index] = None
            counters[index] = _value(loop.inputs[0], _of_caller(loop.computation), index)
        return counters[index]

    _value(condition.result, before)
    size = 0
    while len(counters) > size:  # add what the counters known so far are computed from
        size = len(counters)
        for index in list(counters):
            _value(body.result, before, index)
    for turn in range(MOST):
        going = _value(condition.result, _element_of(counters))
        # None is a condition that depends on data; 0 is the end.
        if not going:
            return None if going is None else turn
        # All counters of a turn are computed from those of the turn before, so the old dict must
        # stay until all are done.
        counters = {index: _value(body.result, _element_of(counters), index) for index in counters}
    return None


def _element_of(counters: Counters) -> Parameter:
    """Look up the elements of a loop's tuple, the only parameter of its body and condition."""
    return lambda _, index: counters.get(index)


def _value(instruction: Instruction, parameter: Parameter, index: int | None = None) -> int | None:
    """Evaluate the integer that an instruction produces, or that its tuple holds at `index`.
    `parameter`: returns the values of the computation's parameters."""
    kind = instruction.opcode
    operands = instruction.inputs

    def operand(number: int, index: int | None = None) -> int | None:
        return _value(operands[number], parameter, index)

    if kind == "constant":
        literal = {"true": "1", "false": "0"}.get(instruction.literal, instruction.literal)
        return int(literal) if re.fullmatch(r"-?\d+", literal) else None
    if kind == "parameter":
        return parameter(int(instruction.literal), index)
    if kind == "get-tuple-element":
        return operand(0, int(instruction.attribute("index") or 0))
    if kind == "tuple" and index is not None:
        return operand(index)
    if kind in SAME and operands:
        return operand(0, index)
    if kind in ("fusion", "call"):
        inner = instruction.computation.others[next(instruction.called())[1]]
        return _value(inner.result, operand, index)
    if kind not in (*ARITHMETIC, "compare", "select", "not"):
        return None
    return _arithmetic(instruction, [operand(number) for number in range(len(operands))])


def _arithmetic(instruction: Instruction, values: list[int | None]) -> int | None:
    # One unknown operand makes the result unknown, also in a product with 0: no counter needs more.
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return None
    if instruction.opcode == "compare":
        direction = instruction.attribute("direction") or ""  # LT, LE, GT, GE, EQ or NE
        return int(getattr(operator, direction.lower())(numbers[0], numbers[1]))
    if instruction.opcode == "select":
        return numbers[1] if numbers[0] else numbers[2]
    if instruction.opcode == "not":
        return int(not numbers[0])
    return ARITHMETIC[instruction.opcode](numbers[0], numbers[1])


def _of_caller(computation: Computation) -> Parameter:
    """Look up the parameters of a called computation, as far as all turns of the loops around get
    the same values."""

    def value(number: int, index: int | None) -> int | None:
        if (caller := computation.caller) is None:
            return None
        # A value that a loop around changes differs from turn to turn, so there is no one number of
        # turns.
        unchanged = caller.opcode == "call" or (
            caller.opcode == "while" and index is not None and passes_through(caller, index)
        )
        if not unchanged:
            return None
        return _value(caller.inputs[number], _of_caller(caller.computation), index)

    return value


def passes_through(loop: Instruction, index: int) -> bool:
    """Return True if a while loop leaves element `index` of its tuple unchanged."""
    root = loop.computation.others[loop.attribute("body") or ""].result
    if root.opcode != "tuple":
        return False
    last = root.inputs[index]
    while last.opcode in SAME:
        last = last.inputs[0]
    return (
        last.opcode == "get-tuple-element"
        and last.inputs[0].opcode == "parameter"
        and last.attribute("index") == str(index)
    )
