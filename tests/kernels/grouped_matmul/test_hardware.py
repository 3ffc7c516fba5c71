"""The kernels of the grouped matmul compile for TPUs that are not here, on a mesh, and their
compiled programs tell what they compute."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from topologies import needs

from maxstack import sharding
from maxstack.kernels.grouped_matmul import grouped_matmul
from maxstack.plan.program import parse as read
from maxstack.plan.topology import parse
from maxstack.plan.work import operations
from maxstack.schema.mesh import MeshConfig

M, E, K, N = 100, 2, 160, 128


def compiled(name, dtype):
    """Values of the result and both gradients, each device with its own rows and groups' sizes."""
    devices = parse(name).devices()
    cfg = MeshConfig(data=len(devices), fsdp=1)
    mesh, split, whole = sharding.make_mesh(cfg, devices), PartitionSpec("data"), PartitionSpec()

    def local(x, w, dy, sizes_E):
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes_E, "megablox"), x, w)
        dx, dw = pull(dy)
        return y, dx, jax.lax.psum(dw, "data")

    def shape(of, spec, dtype=dtype):
        return jax.ShapeDtypeStruct(of, dtype, sharding=NamedSharding(mesh, spec))

    n = len(devices)
    given = (
        shape((n * M, K), split),
        shape((E, K, N), whole),
        shape((n * M, N), split),
        shape((n * E,), split, jnp.int32),
    )
    with sharding.use(mesh, cfg):
        f = sharding.per_device(local, (split, whole, split, split), (split, split, whole))
        return jax.jit(f).lower(*given).compile().as_text()


TARGETS = (
    ("v5e:2x2", "bfloat16"),
    ("v5p:2x2x1", "float32"),
    ("v6e:2x2", "bfloat16"),
    ("tpu7x:2x2x1", "float32"),
)


@pytest.mark.parametrize(
    "name, dtype", [pytest.param(*target, marks=needs(target[0])) for target in TARGETS]
)
def test_the_three_kernels_declare_the_products_of_their_rows(name, dtype):
    calls = [one for one in operations(read(compiled(name, dtype))) if one.kernel]
    rows = 128  # a whole tile
    assert [one.flops for one in calls] == [2 * rows * K * N] * 3
    assert {one.kernel for one in calls} == {"tpu_custom_call"}
