"""Topologies by name: what there is, what there is not, and the links that a mesh axis has."""

import itertools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from topologies import needs

from maxstack.errors import ConfigError, installing
from maxstack.hardware.devices import arrange
from maxstack.plan import topology
from maxstack.plan.topology import Link, links, parse
from maxstack.schema.mesh import AXES


@pytest.mark.parametrize(
    "name, sides, slices, size, hosts",
    [
        ("v5p:8x8x16", (8, 8, 16), 1, 1024, 256),
        ("v5e:16x16*4", (16, 16), 4, 1024, 256),
        ("tpu7x:4x4x576", (4, 4, 576), 1, 18432, 2304),
        ("v4:12x16x16", (12, 16, 16), 1, 3072, 768),
        ("h100:32x8", (32, 8), 1, 256, 32),
        ("gb200:18x4", (18, 4), 1, 72, 18),
        ("gb200:2x72", (2, 72), 1, 144, 36),
    ],
)
def test_a_name_says_chips_slices_and_hosts(name, sides, slices, size, hosts):
    found = parse(name)
    assert (found.sides, found.slices, found.size, found.hosts) == (sides, slices, size, hosts)


@pytest.mark.parametrize(
    "name, said",
    [
        ("v5e:3x3", r"no such v5e; slices are 1x1, .*; nearest: v5e:2x4, v5e:4x4, "),
        ("v5e:16x32*2", r"nearest: v5e:16x16\*2, "),
        ("v5p:16x8x8", r"A <= B <= C, multiples of 4, up to 6144 chips; nearest: v5p:8x8x16, "),
        ("v5p:20x20x24", r"nearest: v5p:16x16x24, "),
        ("tpu7x:16x16", r"nearest: tpu7x:4x8x8, "),
        ("h100:3x7", r"GPUs per host, which are 1, 2, 4, 8; nearest: h100:3x8, h100:2x8, "),
        ("h100:256", r"nearest: h100:32x8, "),
        ("h100:4x8*2", r"GPUs have no slices; write .* h100:8x8$"),
        ("h10:1x8", r"chip h10: is not in the table; did you mean h100\?"),
        ("v5e", r"is not a topology; write a chip and its shape"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(name, said):
    with pytest.raises(ConfigError, match=said):
        parse(name)


def test_here_is_this_process():
    found = parse("here")
    assert (found.chip, found.size, found.devices()) == (None, 8, tuple(jax.devices()))
    assert links(found, (1, 1, 2, 4, 1, 1, 1)) == {
        "data": Link("memory", None),
        "fsdp": Link("memory", None),
    }


def test_a_missing_compiler_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(
        topology,
        "_PLUGINS",
        {"tpu": (("no_such.plugin",), "plan-tpu"), "cuda": (("no_such_plugin",), "plan-cuda")},
    )
    topology._ahead_of_time.cache_clear()
    for name, extra in (("v5e:2x4", "plan-tpu"), ("h100:1x8", "plan-cuda")):
        with pytest.raises(ConfigError, match=rf"is not installed; {re.escape(installing(extra))}"):
            parse(name).devices()


@pytest.mark.parametrize(
    "name, sizes, found",
    [
        ("v5e:16x16", {"fsdp": 256}, {"fsdp": ("ICI", 200)}),
        ("v5e:16x16", {"fsdp": 64, "tensor": 4}, {"fsdp": ("ICI", 125), "tensor": ("ICI", 75)}),
        (
            "v5e:16x16*4",
            {"slices": 4, "fsdp": 256},
            {"slices": ("DCN", 3.125), "fsdp": ("ICI", 200)},
        ),
        ("v5e:16x16*4", {"fsdp": 1024}, {"fsdp": ("DCN", 203.125)}),
        ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}, {"fsdp": ("ICI", 400), "tensor": ("ICI", 200)}),
        ("v5p:2x2x4", {"fsdp": 16}, {"fsdp": ("ICI", 300)}),
        ("tpu7x:4x4x4", {"fsdp": 64, "tensor": 2}, {"fsdp": ("ICI", 300), "tensor": ("D2D", 1200)}),
        (
            "h200:1x8",
            {"fsdp": 4, "tensor": 2},
            {"fsdp": ("NVLink", 450), "tensor": ("NVLink", 450)},
        ),
        (
            "h100:32x8",
            {"fsdp": 32, "tensor": 8},
            {"fsdp": ("network", 50), "tensor": ("NVLink", 450)},
        ),
        ("h100:32x8", {"fsdp": 256}, {"fsdp": ("network", 50 * 8 * 255 / 248)}),
        (
            "gb200:18x4",
            {"fsdp": 18, "tensor": 4},
            {"fsdp": ("NVLink", 900), "tensor": ("NVLink", 900)},
        ),
        ("gb200:36x2", {"fsdp": 72}, {"fsdp": ("network", 950)}),
    ],
)
def test_links_of_mesh_axes_in_gigabytes_a_second(name, sizes, found):
    got = links(parse(name), tuple(sizes.get(axis, 1) for axis in AXES))
    assert {
        axis: (link.kind, pytest.approx(link.bandwidth / 1e9)) for axis, link in got.items()
    } == found


def ring_bandwidth(found, mesh, axis):
    """Bytes/s that a device receives in a ring all-gather over a mesh axis, half of them each way
    around, all groups at once, by shortest routes."""
    chip, sides, n = found.chip, (*found.sides, 1)[:3], mesh.shape[axis]
    load = Counter()
    for line in mesh.swapaxes(axis, -1).reshape(-1, n):
        for a, b in itertools.chain(
            zip(line, [*line[1:], line[0]], strict=True),
            zip([*line[1:], line[0]], line, strict=True),
        ):
            at = list(a.coords)
            for dim, side in enumerate(sides):
                wraps = all(s % 4 == 0 for s in sides) if chip.torus.dims == 3 else side % 16 == 0
                ahead = (b.coords[dim] - at[dim]) % side if wraps else b.coords[dim] - at[dim]
                step = 1 if 0 < ahead <= (side // 2 if wraps else side) else -1
                while at[dim] != b.coords[dim]:
                    load[*at, dim, step] += (n - 1) / 2
                    at[dim] = (at[dim] + step) % side
    return (n - 1) / max(load.values()) * chip.torus.link if load else 0


@pytest.mark.parametrize(
    "name",
    ["v5e:4x8", "v5e:16x16", "v5p:2x2x2", "v5p:4x4x4", "v5p:4x4x12", "tpu7x:2x2x1", "tpu7x:4x4x4"],
)
def test_no_ring_exceeds_what_links_says(name):
    found = parse(name)
    for outer in (d for d in range(1, found.size + 1) if found.size % d == 0):
        for inner in (d for d in (1, 2, 3, 4, 8) if found.size // outer % d == 0):
            shape = (1, 1, outer, found.size // outer // inner, 1, 1, inner)
            mesh = arrange(topology._placeholders(found), shape)
            for axis, link in links(found, shape).items():
                assert ring_bandwidth(found, mesh, AXES.index(axis)) <= link.bandwidth * (
                    1 + 1e-9
                ), (shape, axis)


@pytest.mark.parametrize(
    "name, sizes",
    [
        pytest.param(name, sizes, marks=needs(name))
        for name, sizes in [
            ("v4:2x2x1", {"fsdp": 4}),
            ("v5e:1x1", {}),
            ("v5e:2x2", {"fsdp": 2, "tensor": 2}),
            ("v5e:4x4*2", {"slices": 2, "fsdp": 16}),
            ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}),
            ("v6e:2x4", {"fsdp": 8}),
            ("tpu7x:2x2x1", {"fsdp": 4, "tensor": 2}),
            ("a100-40:1x2", {"fsdp": 2}),
            ("a100-80:1x8", {"fsdp": 8}),
            ("h100:2x8", {"fsdp": 4, "tensor": 4}),
            ("h200:1x8", {"fsdp": 8}),
            ("b200:1x8", {"fsdp": 8}),
            ("b300:1x8", {"fsdp": 8}),
            ("gb200:1x72", {"fsdp": 72}),
        ]
    ],
)
def test_a_program_compiles_for_devices_that_are_not_here(name, sizes):
    found = parse(name)
    devices = found.devices()
    assert len(devices) == found.size and devices[0].device_kind in found.chip.kinds
    assert len({d.process_index for d in devices}) == found.hosts
    placed = arrange(devices, [sizes.get(axis, 1) for axis in AXES])
    mesh = Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    split = NamedSharding(mesh, PartitionSpec(("slices", "data", "fsdp")))
    x_BD = jax.ShapeDtypeStruct((found.size, 256), jnp.bfloat16, sharding=split)
    program = jax.jit(lambda x_BD: jnp.einsum("bd,cd->bc", x_BD, x_BD).sum()).lower(x_BD).compile()
    groups = math.prod(sizes.get(axis, 1) for axis in ("slices", "fsdp"))
    assert program.memory_analysis().argument_size_in_bytes >= found.size * 256 * 2 // groups
    assert (groups > 1) == any(word in program.as_text() for word in ("all-gather", "all-reduce"))
