"""Memory of compiled steps: totals, and the biggest buffers by name."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
import tiny

from maxstack.plan.buffers import DUMP, allocations, largest, memory


@pytest.fixture(scope="module")
def run():
    return tiny.make_run(
        tiny.config(
            mesh={"data": 2, "fsdp": 2, "tensor": 2}, model=tiny.model(layers=2, pattern=["global"])
        ),
        8,
    )


@pytest.fixture(scope="module")
def lowered(run):
    return run.step.lower(run.abstract, run.abstract_batch())


@pytest.fixture(scope="module")
def compiled(lowered):
    return lowered.compile()


def totals(found):
    return {
        kind: sum(one.bytes for one in found if one.kind == kind)
        for kind in ("argument", "temporary")
    }


def test_the_assignment_adds_up_to_the_totals(compiled):
    total = memory(compiled)
    assert totals(allocations(compiled)) == {
        "argument": total.arguments,
        "temporary": total.temporaries,
    }
    outputs = sum(one.bytes for one in allocations(compiled) if one.kind == "output")
    assert outputs <= total.outputs - total.aliased + 4096
    assert total.needed == total.arguments + total.outputs - total.aliased + total.temporaries
    assert total.peak is None and total.host == 0


def test_a_tpu_needs_its_peak_and_other_hardware_the_sum():
    def needed(platform, **on_host):
        figures = {"argument": 100, "output": 50, "alias": 40, "temp": 70, "generated_code": 5}
        stats = {
            f"{where}{name}_size_in_bytes": on_host.get(name, 0) if where else size
            for where in ("", "host_")
            for name, size in figures.items()
        }
        device = type("Device", (), {"platform": platform})
        sharding = type("Sharding", (), {"device_set": {device}})
        made = type("Compiled", (), {"input_shardings": sharding, "output_shardings": None})
        made.memory_analysis = lambda: type("Stats", (), stats | {"peak_memory_in_bytes": 150})
        return memory(made).needed

    assert (needed("tpu"), needed("gpu"), needed("cpu")) == (155, 185, 185)
    assert (
        needed("tpu", argument=20) == 135
    )  # the peak that XLA tells includes arguments in the host's memory
    assert (
        needed("tpu", temp=50) == 175
    )  # and is that of the host's temporaries, where they are more


def test_arguments_are_as_large_as_their_shards(run, compiled):
    leaves = jax.tree.leaves((run.abstract, run.abstract_batch()))
    shards = [
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    ]
    assert memory(compiled).arguments == sum(shards)


def test_the_biggest_arguments_have_their_paths(compiled):
    found = [one for one in largest(compiled, 10_000) if one.kind == "argument"]
    assert sum(one.bytes for one in found) == memory(compiled).arguments
    assert {"state.step", "state.params['embed']", "batch['tokens']"} <= {one.name for one in found}


def test_the_biggest_temporaries_do_not_overlap_and_say_where_they_come_from(compiled):
    found = [one for one in largest(compiled, 10_000) if one.kind == "temporary"]
    assert sum(one.bytes for one in found) <= memory(compiled).temporaries
    assert [one.bytes for one in found] == sorted((one.bytes for one in found), reverse=True)
    assert all(one.exact for one in found)
    assert any(re.search(r"maxstack/\w+/\w+\.py:\d+$", one.source) for one in found[:5])


def loss(w_LEF, x):
    def layer(x, w):
        return jnp.sin(x @ w), None

    return jax.lax.scan(layer, x, w_LEF)[0].sum()


@pytest.fixture(scope="module")
def scan(tmp_path_factory):
    """A compiled scan, and the folder with XLA's dump of it."""
    folder = tmp_path_factory.mktemp("dump")
    w, x = (
        jax.ShapeDtypeStruct((8, 64, 64), jnp.float32),
        jax.ShapeDtypeStruct((512, 64), jnp.float32),
    )
    return jax.jit(jax.grad(loss)).lower(w, x).compile(compiler_options={DUMP: str(folder)}), folder


def test_what_a_scan_saves_is_named_after_what_made_it(scan):
    saved = [one for one in largest(scan[0], 4) if one.bytes >= 8 * 512 * 64 * 4]
    lines = {int(one.source.rsplit(":", 1)[1]) - loss.__code__.co_firstlineno for one in saved}
    assert len(saved) == 2 and lines == {
        2,
        4,
    }  # the cosine, by its line, and the layer's input, by that of the scan


def test_the_compiler_s_dump_says_the_same_as_the_executable(scan):
    made, folder = scan

    class WithoutAssignment:
        """As an executable for hardware that is not here."""

        def __getattr__(self, name):
            return getattr(made, name)

        def memory_analysis(self):
            return type("Stats", (), {"serialized_buffer_assignment_proto": b""})

    assert largest(WithoutAssignment(), 20, folder) == largest(made, 20)
    assert totals(allocations(WithoutAssignment(), folder)) == totals(allocations(made))
    guessed = largest(WithoutAssignment(), 20)
    assert {one.name for one in guessed if one.kind == "argument"} == {"w_LEF", "x"} and not any(
        one.exact for one in guessed
    )
