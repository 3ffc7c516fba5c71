"""Memory of compiled steps: totals, and the biggest buffers by name."""

import re

import jax
import jax.numpy as jnp
import pytest
import tiny

from maxstack.plan.buffers import DUMP, allocations, largest, memory
from maxstack.plan.program import parse


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """XLA's dump of `compiled`."""
    return tmp_path_factory.mktemp("dump")


@pytest.fixture(scope="module")
def compiled(folder):
    model = tiny.model(layers=2, pattern=["global"])
    cfg = tiny.config(mesh={"data": 2, "fsdp": 2, "tensor": 2}, model=model)
    return tiny.compiled(tiny.make_run(cfg, 8), **{DUMP: str(folder)})


@pytest.fixture(scope="module")
def buffers(compiled, folder):
    return largest(parse(compiled.as_text()), 10_000, allocations(folder))


def total_of(kind, rows):
    return sum(row.bytes for row in rows if row.kind == kind)


@pytest.mark.slow
def test_the_assignment_adds_up_to_the_totals(compiled, folder):
    total, blocks, stats = memory(compiled), allocations(folder), compiled.memory_analysis()
    new = stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert total_of("argument", blocks) == total.arguments
    assert total_of("temporary", blocks) == stats.temp_size_in_bytes
    assert total_of("output", blocks) <= new + 4096
    assert total.needed == total.arguments + new + stats.temp_size_in_bytes


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


def test_the_biggest_arguments_have_their_paths(compiled, buffers):
    arguments = [buffer for buffer in buffers if buffer.kind == "argument"]
    assert total_of("argument", arguments) == memory(compiled).arguments
    assert {"state.step", "state.params['embed']", "batch['tokens']"} <= {x.name for x in arguments}


def test_the_biggest_temporaries_do_not_overlap_and_say_where_they_come_from(compiled, buffers):
    temporaries = [buffer for buffer in buffers if buffer.kind == "temporary"]
    sizes = [buffer.bytes for buffer in temporaries]
    assert sum(sizes) <= compiled.memory_analysis().temp_size_in_bytes
    assert sizes == sorted(sizes, reverse=True)
    assert all(buffer.exact for buffer in temporaries)
    assert any(re.search(r"maxstack/\w+/\w+\.py:\d+$", x.source) for x in temporaries[:5])


def loss(w_LEF, x):
    def layer(x, w):
        return jnp.sin(x @ w), None

    return jax.lax.scan(layer, x, w_LEF)[0].sum()


@pytest.fixture(scope="module")
def scan(tmp_path_factory):
    """A compiled scan, parsed, and the folder with XLA's dump of it."""
    folder = tmp_path_factory.mktemp("dump")
    w, x = (jax.ShapeDtypeStruct(dims, jnp.float32) for dims in ((8, 64, 64), (512, 64)))
    made = jax.jit(jax.grad(loss)).lower(w, x).compile(compiler_options={DUMP: str(folder)})
    return parse(made.as_text()), folder


def test_what_a_scan_saves_is_named_after_what_made_it(scan):
    saved = [x for x in largest(scan[0], 4, allocations(scan[1])) if x.bytes >= 8 * 512 * 64 * 4]
    lines = {int(x.source.rsplit(":", 1)[1]) - loss.__code__.co_firstlineno for x in saved}
    # the cosine, by its line, and the layer's input, by that of the scan
    assert len(saved) == 2 and lines == {2, 4}


def test_without_an_assignment_buffers_are_read_from_the_text_and_say_so(scan, tmp_path):
    guessed = largest(scan[0], 20, allocations(tmp_path))
    assert {x.name for x in guessed if x.kind == "argument"} == {"w_LEF", "x"}
    assert not any(x.exact for x in guessed)
