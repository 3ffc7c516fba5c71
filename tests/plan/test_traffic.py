"""Collectives of compiled programs: kind, mesh axes, times and bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from captured import captured
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxstack.plan.program import parse
from maxstack.plan.traffic import Collective, collectives, sent
from maxstack.plan.traffic import _axes as axes_of
from maxstack.plan.traffic import _groups as groups_of

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
BLOCK = 8 * 128 * 4
"""Bytes of a device's piece of a [64, 128] float32 array cut in eight."""


def brief(found: list[Collective]) -> list[tuple]:
    return sorted((one.kind, one.axes, one.size, one.times, one.payload, one.sent) for one in found)


def gather(x):
    return jax.lax.all_gather(x, "fsdp", tiled=True)


def scatter(x):
    return jax.lax.psum_scatter(x, ("data", "fsdp"), tiled=True)


def exchange(x):
    return jax.lax.all_to_all(x, "tensor", 1, 1, tiled=True)


def shift(x):
    return jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])


def sum_in_a_scope(x):
    with jax.named_scope("rarely"):
        return jax.lax.psum(x, "data")


def three_sums(x):
    return jax.lax.scan(
        lambda x, _: (jax.lax.psum(x, ("data", "tensor")) * 0.5, None), x, None, length=3
    )[0]


@pytest.mark.parametrize(
    "f, expected",
    [
        (gather, ("all-gather", ("fsdp",), 2, 1.0, 2 * BLOCK, BLOCK)),
        (scatter, ("reduce-scatter", ("data", "fsdp"), 4, 1.0, BLOCK, 0.75 * BLOCK)),
        (exchange, ("all-to-all", ("tensor",), 2, 1.0, BLOCK, 0.5 * BLOCK)),
        (shift, ("collective-permute", ("data",), 2, 1.0, BLOCK, BLOCK)),
        (sum_in_a_scope, None),
        (three_sums, ("all-reduce", ("data", "tensor"), 4, 3.0, BLOCK, 3 * 1.5 * BLOCK)),
    ],
)
def test_each_kind_on_eight_devices(f, expected):
    mesh, split = jax.make_mesh(tuple(MESH.values()), tuple(MESH)), P(tuple(MESH))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, split))
    program = parse(jax.jit(mapped).lower(x).compile().as_text())
    found = brief(collectives(program, MESH, without=("rarely",)))
    assert found == ([expected] if expected else [])


@pytest.mark.parametrize(
    "text, axes, size",
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("replica_groups={}", ("data", "fsdp", "tensor"), 8),
        ("replica_groups=[4,2]<=[8]", ("tensor",), 2),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",), 2),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",), 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("data", "fsdp"), 4),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_2'}", ("tensor",), 2),
        (
            "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,2,2]T(2,1,0)) {'a'}",
            ("fsdp", "tensor"),
            4,
        ),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ("fsdp",), 2),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}", ("data", "fsdp"), 4),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}", ("tensor",), 2),
    ],
)
def test_every_way_to_write_groups_of_devices(text, axes, size):
    groups = groups_of(f"channel_id=1, {text}, use_global_device_ids=true", 8)
    assert (axes_of(groups, MESH), groups.shape[1]) == (axes, size)


def test_groups_of_16384_devices():
    mesh = {"slices": 4, "fsdp": 512, "tensor": 8}
    listed = ",".join(
        "{" + ",".join(map(str, row)) + "}"
        for row in np.arange(16384).reshape(4, 512, 8).swapaxes(1, 2).reshape(32, 512).tolist()
    )
    assert axes_of(groups_of(f"replica_groups={{{listed}}}", 16384), mesh) == ("fsdp",)
    assert axes_of(groups_of("replica_groups=[4096,4]<=[4,4096]T(1,0)", 16384), mesh) == ("slices",)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("all-gather", 750.0),
        ("reduce-scatter", 750.0),
        ("all-to-all", 750.0),
        ("ragged-all-to-all", 750.0),
        ("all-reduce", 1500.0),
        ("collective-permute", 1000.0),
    ],
)
def test_ring_algorithms_send(kind, expected):
    assert sent(kind, 1000, 4) == expected


def test_a_tpu_collective_that_runs_beside_others_counts_once():
    whole = 1024 * 1024 * 2
    found = collectives(captured("tpu_loop"), {"fsdp": 4})
    assert brief(found) == [("all-gather", ("fsdp",), 4, 5.0, whole, 5 * 0.75 * whole)] * 2
    assert "jit(two)/while/body/closed_call/dot_general" in {one.op_name for one in found}


def test_a_tpu_reduce_scatter_and_what_goes_between_slices():
    found = collectives(captured("tpu_slices"), {"slices": 2, "fsdp": 4})
    whole = 512 * 256 * 2
    assert brief(found) == [
        ("all-gather", ("fsdp",), 4, 1.0, whole, 0.75 * whole),
        ("all-reduce", ("slices",), 2, 1.0, whole // 4, whole / 4),
        ("reduce-scatter", ("fsdp",), 4, 1.0, whole, 0.75 * whole),
    ]
    assert [one.axes for one in found if one.between_slices] == [("slices",)]


def test_collectives_on_a_tpu_s_sparse_cores():
    found = collectives(captured("tpu_sparsecore"), {"fsdp": 4, "tensor": 2})
    whole = 1024 * 2048 * 2
    part = whole // 4
    assert brief(found) == [
        ("all-gather", ("fsdp",), 4, 1.0, whole, 0.75 * whole),
        ("all-reduce", ("tensor",), 2, 1.0, part, part),
        ("all-to-all", ("fsdp",), 4, 1.0, part, 0.75 * part),
        ("all-to-all", ("fsdp",), 4, 1.0, part, 0.75 * part),
        ("reduce-scatter", ("fsdp",), 4, 1.0, whole, 0.75 * whole),
    ]


def test_collectives_of_cuda():
    whole = 512 * 256 * 2
    assert brief(collectives(captured("cuda"), {"fsdp": 4})) == [
        ("all-gather", ("fsdp",), 4, 1.0, whole, 0.75 * whole),
        ("reduce-scatter", ("fsdp",), 4, 1.0, whole, 0.75 * whole),
    ]
