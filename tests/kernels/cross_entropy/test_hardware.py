"""The kernels of linear cross-entropy compile, both passes, for hardware that is not here."""

import jax
import pytest
from jax.sharding import SingleDeviceSharding
from topologies import needs

from maxstack import sharding
from maxstack.kernels.backends import Device
from maxstack.kernels.cross_entropy import OP, CrossEntropyCase, Request
from maxstack.plan import program, topology, work
from maxstack.schema.mesh import MeshConfig

REQUEST, ROWS, EMBED, VOCAB = Request(30.0, 1e-4), 1000, 640, 3001
CHIPS = {
    "v5e:2x2": "bfloat16",
    "v5p:2x2x1": "float32",
    "v6e:2x2": "bfloat16",
    "tpu7x:2x2x1": "bfloat16",
}


def compiled(name, dtype, sizes):
    """The gradients by x, head and bias, with the first candidate's blocks but for `sizes`."""
    device = topology.parse(name).devices()[0]
    case = CrossEntropyCase(REQUEST, ROWS, EMBED, VOCAB, dtype, True, False, Device.of(device))
    backend = OP[OP.choose(case).backend]
    assert backend.name == "pallas_tpu"
    blocks = backend.candidates(case)[0] | sizes

    def given(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    def total(x, head, bias, targets, weights):
        return backend.run(x, head, targets, weights, REQUEST, bias, blocks=blocks).total

    floats = (
        given((ROWS, EMBED), dtype),
        given((EMBED, VOCAB), "float32"),
        given((VOCAB,), "float32"),
    )
    alone = MeshConfig(data=1)
    with sharding.use(sharding.make_mesh(alone, [device]), alone):
        return (
            jax.jit(jax.grad(total, (0, 1, 2)))
            .lower(*floats, given((ROWS,), "int32"), given((ROWS,), "float32"))
            .compile()
        )


@pytest.mark.parametrize(
    "name, dtype",
    [pytest.param(name, dtype, marks=needs(name)) for name, dtype in CHIPS.items()],
)
def test_the_tpu_kernels_compile_and_declare_their_products(name, dtype):
    text = compiled(name, dtype, {"tile_rows": 256, "tile_columns": 512}).as_text()
    flops = [
        one.flops for one in work.operations(program.parse(text)) if one.kernel == "tpu_custom_call"
    ]
    assert flops == [2 * ROWS * EMBED * VOCAB] * 2
