"""The arrangement of devices in a mesh, with stand-ins for TPUs and GPUs."""

import itertools
import math
import random
import types

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils

from maxstack.errors import ConfigError
from maxstack.hardware.devices import arrange, over_slices


def tpus(sides, cores=1, slices=1, kind="TPU v5"):
    """Devices as jax lists them: by slice, then z, y, x and core."""
    places = itertools.product(
        range(slices), *(range(side) for side in reversed(sides)), range(cores)
    )
    return [
        types.SimpleNamespace(
            platform="tpu",
            device_kind=kind,
            id=i,
            slice_index=s,
            coords=[x, y, z],
            core_on_chip=core,
        )
        for i, (s, z, y, x, core) in enumerate(places)
    ]


def ids(mesh):
    return np.vectorize(lambda device: device.id)(mesh)


def hops(a, b):
    return sum(abs(i - j) for i, j in zip(a.coords, b.coords, strict=True))


def test_neighbours_along_the_innermost_axis_are_adjacent_chips():
    mesh = arrange(tpus((4, 4, 4)), (1, 1, 1, 16, 1, 1, 4))
    assert {hops(a, b) for row in mesh.reshape(-1, 4) for a, b in itertools.pairwise(row)} == {1}


def test_the_cores_of_a_chip_are_an_axis_of_two():
    mesh = arrange(tpus((4, 4, 4), cores=2, kind="TPU7x"), (1, 1, 1, 64, 1, 1, 2))
    assert all(a.coords == b.coords for a, b in mesh.reshape(-1, 2))


@pytest.mark.parametrize(
    "inner, outer",
    [
        ((1, 1, 1, 64, 1, 1, 4), (4, 1, 1, 1, 1, 1, 1)),
        ((1, 1, 2, 16, 1, 1, 8), (2, 1, 2, 1, 1, 1, 1)),
    ],
)
def test_several_slices_stand_as_in_jaxs_hybrid_mesh(inner, outer):
    devices = tpus((16, 16, 1), slices=4, kind="TPU v5 lite")
    theirs = mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, allow_split_physical_axes=True
    )
    shape = [a * b for a, b in zip(inner, outer, strict=True)]
    assert (ids(arrange(devices[::-1], shape)) == ids(theirs)).all()


@pytest.mark.parametrize("sides, cores", [((8, 12, 20), 1), ((4, 4, 12), 2), ((12, 12, 12), 1)])
def test_sides_with_other_factors_than_two_take_any_mesh(sides, cores):
    devices, draw = tpus(sides, cores), random.Random(0)
    for _ in range(20):
        shape = [1] * 7
        left = len(devices)
        while left > 1:
            prime = next(p for p in (2, 3, 5) if left % p == 0)
            shape[draw.randrange(7)] *= prime
            left //= prime
        assert sorted(ids(arrange(devices, shape)).flat) == list(range(len(devices)))


def test_a_side_of_twelve_is_one_axis_of_twelve():
    mesh = arrange(tpus((12, 12, 12)), (1, 1, 1, 144, 1, 1, 12))
    assert {hops(a, b) for row in mesh.reshape(-1, 12) for a, b in itertools.pairwise(row)} == {1}


def test_a_part_of_a_slice_is_taken_row_by_row():
    devices = tpus((4, 4, 1))[:6]
    assert ids(arrange(devices[::-1], (3, 2))).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_slices_that_no_axes_can_hold_are_refused():
    assert over_slices((2, 1, 6, 4), 12) == [2, 1, 6, 1]
    with pytest.raises(ConfigError, match=r"cannot be laid over 3 slices; set mesh.slices=3"):
        over_slices((1, 1, 4, 4), 3)


def test_gpus_stand_by_id_and_cpus_as_given():
    gpus = [types.SimpleNamespace(platform="gpu", id=i) for i in (3, 1, 2, 0)]
    assert ids(arrange(gpus, (2, 2))).tolist() == [[0, 1], [2, 3]]
    given = jax.devices()[::-1]
    assert arrange(given, (2, math.prod((2, 2)))).flatten().tolist() == given
