"""Copies that differ: found, whosever and whichever bit, and told apart by computing the steps
again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec

from maxstack import sharding
from maxstack.errors import ConfigError
from maxstack.faults.replicas import Corruption, Recompute, Replicas
from maxstack.schema.mesh import MeshConfig
from maxstack.state import State

DTYPES = ("float32", "bfloat16", "float16", "int8", "bool", "key")


def made(mesh, seed=0):
    """A state of every dtype, in several splits, one leaf long enough for the loop over chunks; and
    its Replicas."""
    rng, mesh = (
        np.random.default_rng(seed),
        sharding.make_mesh(MeshConfig.model_validate(mesh), jax.devices()),
    )

    def put(shape, dtype, *spec):
        if dtype == "key":
            array = jax.random.wrap_key_data(
                jnp.asarray(rng.integers(0, 2**32, (*shape, 2), np.uint32))
            )
        else:
            array = jnp.asarray(
                rng.integers(0, 2, shape) if dtype == "bool" else rng.normal(size=shape) * 3
            ).astype(dtype)
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    params = {dtype: put((4, 6), dtype) for dtype in DTYPES} | {
        "long": put((2, 3, 9000), "float32", "tensor")
    }
    opt = {
        "split": put((8, 4), "float32", "fsdp", "tensor"),
        "alone": put((8,), "float32", ("data", "fsdp", "tensor")),
    }
    state = State(put((), "int32"), params, opt, {"refused": put((), "int32")})
    return state, Replicas(
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state),
        mesh,
    )


def flipped(state, path, place, element, bit):
    """The state with one bit of one element of one device's copy flipped. `place`: of the device in
    the mesh."""

    def damaged(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(damaged(jax.random.key_data(leaf)))
        devices, copies = list(leaf.sharding.mesh.devices.flat), []
        for shard in leaf.addressable_shards:
            values = np.array(shard.data)
            if shard.device == devices[place]:
                raw = values.reshape(-1).view(
                    np.uint8 if values.dtype.itemsize == 1 else f"uint{8 * values.dtype.itemsize}"
                )
                raw[element % raw.size] ^= raw.dtype.type(1 << bit)
            copies.append(jax.device_put(values, shard.device))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, copies)

    return jax.tree_util.tree_map_with_path(
        lambda at, leaf: (
            damaged(leaf) if jax.tree_util.keystr(at, simple=True, separator="/") == path else leaf
        ),
        state,
    )


@pytest.fixture(scope="module")
def many():
    return made({"data": 4, "tensor": 2})


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}])
def test_equal_copies_and_equal_states_have_equal_hashes(mesh):
    (state, replicas), (same, _), (other, _) = made(mesh), made(mesh), made(mesh, seed=1)
    hashes = replicas.hashes(state)
    assert replicas.compare(hashes) == []
    np.testing.assert_array_equal(hashes, replicas.hashes(same))
    assert (hashes != replicas.hashes(other)).any()


@pytest.mark.parametrize(
    "path", [*(f"params/{name}" for name in (*DTYPES, "long")), "opt/split", "step"]
)
def test_any_flipped_bit_is_found_and_its_device_named(many, path):
    (state, replicas), rng = many, np.random.default_rng(len(path))
    bits = {"int8": 8, "bfloat16": 16, "float16": 16, "bool": 1}.get(path.split("/")[-1], 32)
    for bit in range(bits):
        place = int(rng.integers(8))
        (found,) = replicas.compare(
            replicas.hashes(flipped(state, path, place, int(rng.integers(1 << 20)), bit))
        )
        assert found.outvoted() == {place}
        assert found.part.name == {"params": "params", "opt": "opt"}.get(
            path.split("/")[0], "counters"
        )


def test_swapped_elements_and_leaves_are_found(many):
    state, replicas = many
    long, flat = state.params["long"], state.params["long"].reshape(-1)
    swapped = jax.device_put(flat.at[:2].set(flat[1::-1]).reshape(long.shape), long.sharding)
    for params in (
        {"long": swapped},
        {"bfloat16": state.params["float16"], "float16": state.params["bfloat16"]},
    ):
        params = {
            name: jax.lax.bitcast_convert_type(leaf, state.params[name].dtype)
            for name, leaf in params.items()
        }
        assert (
            replicas.hashes(state) != replicas.hashes(state._replace(params=state.params | params))
        ).any()


def test_single_copies_are_not_counted_as_covered():
    def replicas(devices, **mesh):
        run = tiny.make_run(tiny.config(mesh=mesh), devices)
        return Replicas(run.abstract, run.mesh)

    assert replicas(8, data=8).covered == replicas(8, data=2, fsdp=2, tensor=2).covered == 1.0
    fsdp = replicas(8, fsdp=8)
    assert fsdp.covered < 0.02 and "the rest exists once" in fsdp.describe(100)
    alone = Corruption(replicas(1), 1, print)
    assert not alone.due(1, saving=True), "one device has nothing to compare"


def test_a_fault_that_does_not_recur_is_a_passing_one(many):
    (state, replicas), told = many, []
    health = Corruption(replicas, 10, told.append)
    assert health.compare_copies(10, state) is None
    assert not health.due(17, saving=False) and health.due(17, saving=True)
    assert health.compare_copies(17, flipped(state, "params/int8", 3, 5, 1)) == Recompute(17)
    assert told[0].startswith("step 17: SILENT DATA CORRUPTION in 0.000412 ")
    assert "MiB of params: device 3 (cpu) of process 0: differs from most" in told[0]
    assert health.compare_copies(10, state) is None and health.due(17, saving=False)
    assert health.compare_copies(17, state) is None
    assert told[1].startswith(
        "step 17, computed again: all copies agree, so the fault was a passing one, of "
        "device 3 (cpu) of process 0;"
    )
    assert not health.due(17, saving=False)


def assert_stays(health, step, state, device):
    """The comparison ends the run, and names the device."""
    said = rf"the fault stays, in device {device} \(cpu\) of process 0; take it out of service"
    with pytest.raises(ConfigError, match=f"step {step}: .*{said}"):
        health.compare_copies(step, state)


def test_recomputation_tells_which_of_two_replicas_was_wrong():
    (state, replicas), told = made({"data": 2, "fsdp": 2, "tensor": 2}), []
    damaged = flipped(state, "opt/split", 6, 0, 0)
    health = Corruption(replicas, 10, told.append)
    assert health.compare_copies(20, damaged) == Recompute(20)
    assert (
        "device 2 (cpu) of process 0 and device 6 (cpu) of process 0: differ, and it is not known "
        "yet which is right" in told[0]
    )
    assert (
        health.compare_copies(20, state) is None
        and "a passing one, of device 6 (cpu) of process 0;" in told[1]
    )
    assert health.compare_copies(30, damaged) == Recompute(30)
    assert_stays(health, 30, flipped(state, "opt/split", 6, 0, 1), 6)


@pytest.mark.parametrize("again", [20, 15])
def test_a_recurring_fault_ends_the_run_and_names_the_device(many, again):
    state, replicas = many
    health = Corruption(replicas, 5, lambda text: None)
    health.compare_copies(20, flipped(state, "params/float32", 5, 3, 30))
    assert_stays(health, again, flipped(state, "params/float32", 5, 9, 2), 5)


def test_faults_on_changing_devices_blame_the_program(many):
    state, replicas = many
    health = Corruption(replicas, 5, lambda text: None)
    health.compare_copies(20, flipped(state, "params/float32", 5, 3, 30))
    with pytest.raises(
        ConfigError,
        match=r"device 5 .* before, device 2 .* now, so it is not one device's; "
        r".*faults.check_every=0",
    ):
        health.compare_copies(20, flipped(state, "params/float32", 2, 3, 30))


def test_passing_faults_are_passed_over_three_times(many):
    state, replicas = many
    health = Corruption(replicas, 5, lambda text: None)
    for step in (5, 10, 15):
        assert (
            health.compare_copies(step, flipped(state, "step", 1, 0, 7)) == Recompute(step)
            and health.compare_copies(step, state) is None
        )
    with pytest.raises(ConfigError, match="step 20: .*fault number 4 since this process began"):
        health.compare_copies(20, flipped(state, "step", 1, 0, 7))
