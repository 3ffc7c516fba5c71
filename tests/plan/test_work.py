"""FLOPs and bytes of compiled programs against counts by hand and the compiler's own."""

import jax
import jax.numpy as jnp
import pytest
import tiny
from captured import captured

from maxstack.plan.program import parse
from maxstack.plan.work import operations


def program_of(f, *arguments, **options):
    return parse(jax.jit(f, **options).lower(*arguments).compile().as_text())


def matrix(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def flops(program, **options):
    return sum(one.flops for one in operations(program, **options))


def memory(program):
    return sum(one.bytes for one in operations(program))


@pytest.mark.parametrize(
    "f, arguments",
    [
        (lambda a, b: a @ b, (matrix(24, 40), matrix(40, 56))),
        (lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (matrix(3, 8, 16), matrix(3, 24, 16))),
        (
            lambda x, k: jax.lax.conv_general_dilated(
                x, k, (2, 1), "SAME", rhs_dilation=(1, 2), feature_group_count=2
            ),
            (matrix(2, 6, 9, 11), matrix(4, 3, 3, 3)),
        ),
        (
            lambda x, k: jax.lax.conv_general_dilated(x, k, (1,), [(2, 2)], lhs_dilation=(3,)),
            (matrix(2, 4, 10), matrix(8, 4, 5)),
        ),
    ],
)
def test_products_have_the_flops_that_the_compiler_counts(f, arguments):
    made = jax.jit(f).lower(*arguments).compile()
    assert flops(parse(made.as_text())) == made.cost_analysis()["flops"] > 0


@pytest.mark.slow
def test_a_training_step_on_eight_devices_has_the_flops_of_a_count_by_hand():
    heads, kv, head, embed, hidden, layers, rows, seq = 4, 2, 8, 32, 64, 3, 8, 48
    model = tiny.one_block(tiny.ATTENTION | {"backend": "reference"}, remat={"policy": "none"})
    run = tiny.make_run(tiny.config(mesh={"data": 2, "fsdp": 2, "tensor": 2}, model=model), 8)
    weights = layers * (embed * head * (2 * heads + 2 * kv) + 3 * embed * hidden)
    scores = layers * heads * head * seq * 2
    counted = 6 * rows * seq * (weights + embed * tiny.VOCAB + scores)
    assert flops(parse(tiny.compiled(run).as_text())) == counted / 8


def test_a_scan_reads_each_layer_of_its_stack_once():
    n, layers = 256, 6

    def f(x, w_LEF):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w_LEF)[0]

    program = program_of(f, matrix(8, n), matrix(layers, n, n))
    stack, x = layers * n * n * 4, 8 * n * 4
    assert flops(program) == 2 * layers * 8 * n * n
    # read, and on a CPU copied before the product reads it
    assert stack <= memory(program) <= 3 * stack + 10 * layers * x


def test_elementwise_work_reads_its_operands_and_writes_its_result():
    program = program_of(lambda a, b: jnp.sin(a) * b + 1, matrix(1000), matrix(1000))
    assert [one.bytes for one in operations(program)] == [12000.0] and flops(program) == 0


def test_a_slice_and_an_update_in_place_move_only_what_they_touch():
    def update(stack, piece, i):
        return jax.lax.dynamic_update_index_in_dim(stack, piece * 2, i, 0)

    def read(stack, i):
        return jnp.sin(jax.lax.dynamic_index_in_dim(stack, i, 0))

    stack, index = matrix(100, 500), jax.ShapeDtypeStruct((), jnp.int32)
    updating = program_of(update, stack, matrix(500), index, donate_argnums=0)
    for program in (updating, program_of(read, stack, index)):
        assert 2 * 2000 <= memory(program) <= 2 * 2000 + 16


def test_a_tpu_s_own_memory_and_what_passes_through_fusions_are_not_counted():
    program, row = captured("tpu_loop"), 256 * 1024 * 2
    found = {one.name: one for one in operations(program)}
    assert {name: one.bytes for name, one in found.items() if one.bytes > 1e6} == {
        "both.2": 5 * 2 * row,
        "first.2": 5 * row,
        "copy-start.1": 4 * row,
        "copy-start": 4 * row,
    }
    assert {one.dtype: one.flops for one in found.values() if one.flops} == {
        "bf16": 5 * 2 * 1024**3
    }
    assert flops(program) == 2 * 5 * 2 * 1024**3


@pytest.mark.parametrize(
    "name, expected",
    [
        ("tpu_slices", 2 * 2 * 128 * 512 * 256),
        ("tpu_sparsecore", 2 * 2 * 1024 * 512 * 2048),
        ("cuda", 2 * 2 * 256 * 512 * 256),
    ],
)
def test_flops_of_other_hardware(name, expected):
    assert flops(captured(name)) == expected


def test_operations_of_a_scope_can_be_left_out():
    def f(x, w):
        with jax.named_scope("attention"):
            y = x @ w
        return jnp.sum(jnp.tanh(y) @ x)

    program = program_of(f, matrix(32, 32), matrix(32, 32))
    assert (flops(program), flops(program, without=("attention",))) == (4 * 32**3, 2 * 32**3)


KERNELS = """HloModule m

ENTRY %main (a: bf16[64,32], b: bf16[32,16]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0} parameter(0), metadata={op_name="a"}
  %b = bf16[32,16]{1,0} parameter(1), metadata={op_name="b"}
  %gemm = (bf16[64,16]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/dot_general"}
  %out = bf16[64,16]{1,0} get-tuple-element(%gemm), index=0
  %size = s32[2]{0} constant({1, 2})
  ROOT %kernel = bf16[64,16]{1,0} custom-call(%size, %out), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/attention/call"}, \
backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"12345","transcendentals":"7","bytes_accessed":"99"}}}
}
"""  # noqa: E501


def test_library_products_are_counted_and_kernels_have_the_flops_that_they_declare():
    gemm, kernel = operations(parse(KERNELS))
    assert (gemm.flops, gemm.dtype, gemm.kernel) == (2 * 64 * 32 * 16, "bf16", "__cublas$lt$matmul")
    assert (kernel.flops, kernel.dtype, kernel.kernel, kernel.op_name) == (
        12345,
        "bf16",
        "tpu_custom_call",
        "jit(f)/attention/call",
    )
    assert kernel.bytes == 2 * 64 * 16 * 2 + 8


def test_host_memory_does_not_count():
    text = KERNELS.replace("ROOT %kernel", "%kernel").replace(
        '"99"}}}\n',
        '"99"}}}\n'
        "  ROOT %away = (bf16[64,16]{1,0:S(5)}, bf16[64,16]{1,0}, u32[]) copy-start(%kernel)\n",
    )
    away = operations(parse(text))[-1]
    assert away.bytes == 2048


def test_a_stack_that_a_fusion_only_tiles_anew_is_not_read_whole():
    """HLO in a TPU compiler's manner: a fusion inside the fusion changes the tiles of all layers,
    and a slice of one follows."""
    program = parse("""HloModule m, is_scheduled=true

%tiled (p: bf16[80,16,128]) -> bf16[80,16,128] {
  %p = bf16[80,16,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  ROOT %c = bf16[80,16,128]{2,1,0:T(8,128)(2,1)} copy(%p)
}

%inside (stack: bf16[80,16,128], i: s32[]) -> bf16[1,16,128] {
  %stack = bf16[80,16,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %again = bf16[80,16,128]{2,1,0:T(8,128)(2,1)} fusion(%stack), kind=kLoop, calls=%tiled
  ROOT %layer = bf16[1,16,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%again, %i, %zero, %zero), dynamic_slice_sizes={1,16,128}
}

ENTRY %main (a: bf16[80,16,128], b: s32[]) -> bf16[1,16,128] {
  %a = bf16[80,16,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  %b = s32[]{:T(128)} parameter(1)
  ROOT %f = bf16[1,16,128]{2,1,0:T(8,128)(2,1)} fusion(%a, %b), kind=kLoop, calls=%inside
}
""")  # noqa: E501
    layer = 16 * 128 * 2
    assert 2 * layer <= memory(program) <= 2 * layer + 512
