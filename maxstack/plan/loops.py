"""How often a while loop of a compiled program turns, where its scalars tell."""

import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxstack.plan.hlo import Computation, Instruction, Program

MOST = 100_000
SAME = {
    "copy",
    "bitcast",
    "convert",
    "reshape",
    "copy-start",
    "copy-done",
    "broadcast",
    "opt-barrier",
}
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
}
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
Known = Callable[[int], int | None]
"""The loop's variables: place in its tuple -> value now, or None where it is not a known
integer."""


def turns(program: "Program", computation: "Computation", loop: "Instruction") -> int | None:
    """Turns of `loop`, which stands in `computation`; None where they depend on what only the run
    knows.

    XLA notes the number on a CPU and for CUDA (known_trip_count). A TPU program does not carry it:
    its condition and its counter are followed.
    """
    if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(found[1])
    condition, body = (
        program.computations.get(loop.attribute(key) or "") for key in ("condition", "body")
    )
    if not condition or not body:
        return None
    asked: dict[int, int | None] = {}

    def first(place: int) -> int | None:
        if place not in asked:
            asked[place] = None
            asked[place] = _value(program, computation, loop.operands[0], None, place)
        return asked[place]

    def follow(known: Known, place: int) -> int | None:
        return _value(program, body, body.root, known, place)

    _value(program, condition, condition.root, first)
    while True:  # the counters that the condition reads, and what those are computed from
        before = len(asked)
        for place in list(asked):
            follow(first, place)
        if len(asked) == before:
            break
    now = asked
    for turn in range(MOST):
        going = _value(program, condition, condition.root, now.get)
        if going is None:
            return None
        if not going:
            return turn
        now = {place: follow(now.get, place) for place in now}
    return None


def _value(
    program: "Program",
    computation: "Computation",
    name: str,
    known: Known | None,
    place: int | None = None,
) -> int | None:
    """The integer that instruction `name` makes (at `place` of its tuple); `known`: the elements of
    the computation's only parameter, if any."""
    instruction = computation.instructions[name]
    kind, operands = instruction.opcode, instruction.operands

    def of(operand: int, place: int | None = None) -> int | None:
        return _value(program, computation, operands[operand], known, place)

    if kind == "constant":
        return (
            {"true": 1, "false": 0}.get(instruction.literal)
            if not re.fullmatch(r"-?\d+", instruction.literal)
            else int(instruction.literal)
        )
    if kind == "get-tuple-element":
        return of(0, int(instruction.attribute("index") or 0))
    if kind == "parameter":
        if known is not None and place is not None:
            return known(place)
        return _from_caller(program, computation, int(instruction.literal), place)
    if kind == "tuple" and place is not None:
        return of(place)
    if kind in SAME and operands:
        return of(0, place)
    if kind in ("fusion", "call"):
        inner = program.computations[
            instruction.attribute("calls") or instruction.attribute("to_apply") or ""
        ]
        return _inside(program, inner, inner.root, lambda number: of(number), place)
    return _arithmetic(
        instruction,
        [of(i) for i in range(len(operands))]
        if kind in ARITHMETIC or kind in ("compare", "select", "not")
        else [],
    )


def _arithmetic(instruction: "Instruction", values: list[int | None]) -> int | None:
    if not values or any(value is None for value in values):
        return None
    numbers = [value for value in values if value is not None]
    if instruction.opcode == "compare":
        return int(COMPARE[instruction.attribute("direction") or ""](numbers[0], numbers[1]))
    if instruction.opcode == "select":
        return numbers[1] if numbers[0] else numbers[2]
    if instruction.opcode == "not":
        return int(not numbers[0])
    return ARITHMETIC[instruction.opcode](numbers[0], numbers[1])


def _inside(
    program: "Program", computation: "Computation", name: str, argument: Known, place: int | None
) -> int | None:
    """As `_value` in a computation that is called with several arguments: number of the parameter
    -> its value."""
    instruction = computation.instructions[name]
    if instruction.opcode == "parameter":
        return argument(int(instruction.literal))
    if instruction.opcode == "tuple" and place is not None:
        return _inside(program, computation, instruction.operands[place], argument, None)
    if instruction.opcode == "constant":
        return _value(program, computation, name, None)
    if instruction.opcode in SAME and instruction.operands:
        return _inside(program, computation, instruction.operands[0], argument, place)
    if instruction.opcode in ARITHMETIC or instruction.opcode in ("compare", "select", "not"):
        return _arithmetic(
            instruction,
            [
                _inside(program, computation, operand, argument, None)
                for operand in instruction.operands
            ],
        )
    return None


def _from_caller(
    program: "Program", computation: "Computation", number: int, place: int | None
) -> int | None:
    """A parameter's value (or that of an element of it) where every turn of the loop around gets
    the same."""
    if computation.name not in program.callers:
        return None
    caller, instruction = program.callers[computation.name]
    if instruction.opcode != "while":
        return (
            _value(program, caller, instruction.operands[number], None, place)
            if instruction.opcode == "call"
            else None
        )
    unchanged = place is not None and passes_through(program, instruction, place)
    return _value(program, caller, instruction.operands[0], None, place) if unchanged else None


def passes_through(program: "Program", loop: "Instruction", place: int) -> bool:
    """Whether a while loop gives back at `place` of its tuple what it was given there."""
    body = program.computations[loop.attribute("body") or ""]
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return False
    last = body.instructions[root.operands[place]]
    while last.opcode in SAME:
        last = body.instructions[last.operands[0]]
    return (
        last.opcode == "get-tuple-element"
        and body.instructions[last.operands[0]].opcode == "parameter"
        and last.attribute("index") == str(place)
    )
