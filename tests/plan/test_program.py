"""Reading a compiled program's text: shapes, how often things run, and where they come from."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from captured import captured

from maxstack.plan.hlo import shapes
from maxstack.plan.program import parse


def compiled(f, *arguments):
    return jax.jit(f).lower(*arguments).compile().as_text()


def matrix(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def instructions(program, opcode):
    """(instruction, number of its runs) of each instruction of a kind, in fusions too."""
    for computation in program.computations.values():
        for each in computation.instructions.values():
            if each.opcode == opcode:
                yield each, program.times[computation.name]


def times_of(program, opcode):
    return sorted(times for _, times in instructions(program, opcode))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("f32[3,5]{1,0}", [("f32", 60, 60, 0)]),
        ("bf16[1000,200]{1,0:T(8,128)(2,1)S(1)}", [("bf16", 400000, 1000 * 256 * 2, 1)]),
        ("f32[4,64,1,64]{3,2,1,0:T(1,128)}", [("f32", 65536, 4 * 64 * 128 * 4, 0)]),
        ("f32[4,512,1]{1,2,0:T(8,128)}", [("f32", 8192, 4 * 8 * 512 * 4, 0)]),
        ("s8[5000]{0:T(1024)(128)(4,1)}", [("s8", 5000, 5120, 0)]),
        ("s4[10,10]{1,0:E(4)}", [("s4", 50, 50, 0)]),
        ("pred[]", [("pred", 1, 1, 0)]),
        (
            "((f8e4m3fn[2,2]{1,0}), /*index=1*/token[], u32[]{:S(2)})",
            [("f8e4m3fn", 4, 4, 0), ("token", 0, 0, 0), ("u32", 4, 4, 2)],
        ),
    ],
)
def test_bytes_of_a_shape_with_and_without_the_padding_of_its_tiles(text, expected):
    assert [(s.dtype, s.bytes, s.padded, s.space) for s in shapes(text)] == expected


def nested(x, w):
    def outer(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0], None

    return jax.lax.scan(outer, x, w)[0]


@pytest.mark.parametrize(
    "f, arguments, turns",
    [
        (nested, (matrix(16, 16), matrix(5, 16, 16)), [15.0]),
        (lambda x: jax.lax.fori_loop(3, 20, lambda i, x: x @ x, x), (matrix(8, 8),), [17.0]),
        (
            lambda x: jax.lax.while_loop(
                lambda s: s[0] > 0, lambda s: (s[0] - 2, s[1] @ s[1]), (9, x)
            )[1],
            (matrix(8, 8),),
            [5.0],
        ),
        (
            lambda x: jax.lax.fori_loop(
                0,
                4,
                lambda i, s: (jax.lax.fori_loop(0, s[1], lambda j, x: x @ x, s[0]), s[1]),
                (x, 6),
            )[0],
            (matrix(8, 8),),
            [24.0],
        ),
    ],
)
def test_turns_of_loops_are_noted_or_follow_from_the_condition(f, arguments, turns):
    text = compiled(f, *arguments)
    assert "known_trip_count" in text and times_of(parse(text), "dot") == turns
    program = parse(re.sub(r'"known_trip_count":\{[^}]*\},?', "", text))
    assert times_of(program, "dot") == turns and not program.uncounted


def test_a_tpu_loop_that_notes_nothing():
    assert times_of(captured("tpu_loop"), "convolution") == [5.0, 5.0]


def test_a_loop_that_the_data_ends_counts_once_and_is_named():
    def f(x):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)

    program = parse(compiled(f, matrix(8, 8)))
    assert times_of(program, "dot") == [1.0] and len(program.uncounted) == 1


def test_each_branch_of_a_conditional_counts_once():
    def f(x, flag):
        return jax.lax.cond(flag, lambda x: x @ x, lambda x: x @ x @ x, x)

    program = parse(compiled(f, matrix(8, 8), jax.ShapeDtypeStruct((), jnp.bool_)))
    assert times_of(program, "dot") == [1.0, 1.0, 1.0]


def test_the_inside_of_a_reduction_does_not_run():
    program = parse(compiled(lambda x: x.sum(), matrix(64, 64)))
    inside = {each.attribute("to_apply") for each, _ in instructions(program, "reduce")}
    assert inside and all(program.times[name] == 0 for name in inside)


def test_source_is_the_innermost_line_outside_packages():
    def f(x):
        return optax.tree.norm(x)

    program = parse(compiled(f, matrix(8, 16)))
    ((root, _),) = instructions(program, "sqrt")
    line = f"test_program.py:{f.__code__.co_firstlineno + 1}"
    assert program.source(root).rsplit("/", 1)[-1] == line
    assert any("optax" in file for file, _, _ in program.frames.values())
    program = captured("tpu_loop")
    products = instructions(program, "convolution")
    assert {program.source(each) for each, _ in products} == {"step.py:45"}


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("module @jit_f {\n}\n")


def test_a_kernels_metadata_that_holds_line_breaks_ends_no_computation():
    text = """HloModule m

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %kernel = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"blocks":"512"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %negate = f32[4]{0} negate(%kernel)
}
"""  # noqa: E501
    program = parse(text)
    assert program.computations["main"].instructions["kernel"].op_name == "jit(f)/kernel"
    assert program.computations["main"].root == "negate"
