"""`maxstack plan --serve`: memory, room for requests and bounds on speed, counted by hand."""

import json
from types import SimpleNamespace

import parity
import pytest
import tiny
from tiny import ATTENTION, MLA

from maxstack import cli
from maxstack.errors import ConfigError
from maxstack.inference.capacity import capacity
from maxstack.inference.engine_setup import make_limits, room
from maxstack.inference.layout import Layout
from maxstack.inference.programs import inference_config
from maxstack.inference.roofline import Device, DeviceWeight
from maxstack.plan import topology
from maxstack.schema.config import Config
from maxstack.schema.mesh import AXES

LAYER = 2 * 32 * 4 * 8 + 2 * 32 * 2 * 8 + 3 * 32 * 64
"""Weights of a layer that are multiplied."""
TABLE, NORMS = 32 * tiny.VOCAB, 4 * (4 * 2 * 32 + 32)
BANDWIDTH, PEAK = 819e9, 197e12
"""Of a v5e chip."""
LANES = 128
"""Numbers that a row of a page is padded to on it."""


def config(mixer=ATTENTION, mesh=None, serve=None, **changes):
    model = tiny.one_block(mixer, **{"layers": 4, "dtype": "bfloat16"} | changes)
    return tiny.config(model=model, mesh=mesh or {}, serve={"rows": 32} | (serve or {}))


def planned(cfg, where="v5e:1x1", lengths=(64,), prompt=None):
    return capacity("tiny", lambda _: inference_config(cfg), topology.parse(where), lengths, prompt)


def test_memory_and_requests_are_those_counted_by_hand():
    made = planned(config())
    memory, (row,) = made.memory, made.lengths
    assert memory.weights == 2 * (4 * LAYER + 2 * TABLE) + NORMS
    assert memory.step == 32 * (4 * tiny.VOCAB + 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32))
    assert memory.cache == (memory.usable - memory.weights - memory.step) / 2
    assert made.token == 4 * 2 * 2 * LANES * 2 and row.bytes == 64 * made.token
    assert row.fit == memory.cache // row.bytes


def test_the_engine_makes_room_for_as_many_requests():
    cfg = config(mesh={"data": 1, "tensor": 2}, serve={"max_requests": 10**7, "max_length": 64})
    made, layout = planned(cfg, "h100:1x2"), Layout.of(cfg.model)
    shards = layout.shards(cfg.mesh, dict.fromkeys(AXES, 1) | {"tensor": 2})
    free = int((made.memory.usable - made.memory.weights) * shards)
    limits, _ = make_limits(cfg, layout, 64, free)
    assert shards == 2 and limits.pages[0] / 4 == pytest.approx(made.lengths[0].fit, rel=1e-4)
    programs = SimpleNamespace(layout=layout, limits=limits, replicas=1)
    said = room(SimpleNamespace(programs=programs, max_length=64)).split()
    assert float(said[2].replace(",", "")) == pytest.approx(made.lengths[0].fit, rel=1e-4)


def test_decode_reads_the_weights_once_and_the_cache_of_each_request():
    speed = planned(config()).lengths[0].decode[8]
    keys = (33 + 64) / 2
    read = 2 * (4 * LAYER + TABLE) + NORMS + 8 * keys * 4 * 2 * 2 * LANES * 2
    assert speed.limit == "memory" and speed.seconds == pytest.approx(read / BANDWIDTH)
    assert speed.tokens_per_second == pytest.approx(8 / speed.seconds)


def test_prefill_of_many_rows_is_bound_by_its_products():
    speed = planned(config(serve={"rows": 4096}), prompt=32).lengths[0].prefill
    flops = 2 * (4 * LAYER + TABLE) + 4 * 4 * 4 * 8 * (1 + 32) / 2
    assert speed.limit == "compute" and speed.seconds == pytest.approx(4096 * flops / PEAK)


def test_a_window_bounds_what_a_request_keeps_and_reads():
    whole, window = (
        planned(config(m), lengths=(4096,)) for m in (ATTENTION, ATTENTION | {"window": 64})
    )
    assert window.token == whole.token
    assert window.lengths[0].bytes == (64 + 32 + 16) * whole.token
    assert window.lengths[0].fit > 30 * whole.lengths[0].fit
    assert window.lengths[0].decode[128].seconds < whole.lengths[0].decode[128].seconds / 10


def test_mla_keeps_its_latent_and_one_rotated_key():
    assert planned(config(MLA)).token == 4 * LANES * 2
    assert planned(config(MLA), "h100:1x1").token == 4 * (16 + 4) * 2


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_cache_in_low_precision_keeps_a_byte_a_number_and_scales(dtype):
    keys_values, latents = (
        planned(config(m, serve={"cache_dtype": dtype})) for m in (ATTENTION, MLA)
    )
    assert keys_values.token == 4 * 2 * 2 * (8 + 4)
    assert latents.token == 4 * (16 + 4 + 4)


def test_recurrent_layers_keep_a_state_of_each_request_and_snapshots():
    made = planned(config(tiny.DELTA | {"conv": 4}, serve={"snapshots": 5}))
    state = 4 * (4 * 8 * 8 * 4 + 3 * (2 * 8 + 2 * 8 + 4 * 8) * 2)
    assert made.token == 0 and made.lengths[0].bytes == state == made.state
    assert made.memory.fixed == 6 * state


def test_tensor_shards_weights_and_cache_of_one_replica():
    split = config(mesh={"data": 1, "tensor": 2})
    one, two = planned(config(), "h100:1x1"), planned(split, "h100:1x2")
    assert (one.replicas, two.replicas) == (1, 1) and two.token == one.token / 2
    assert two.memory.weights == (one.memory.weights - NORMS) / 2 + NORMS


def test_replicas_add_their_tokens():
    one, four = planned(config()), planned(config(mesh={"data": 4}), "v5e:2x2")
    speed, sum_of_four = (made.lengths[0].decode[32].tokens_per_second for made in (one, four))
    assert four.replicas == 4 and sum_of_four == pytest.approx(4 * speed)


def test_fsdp_shards_weights_that_the_network_brings():
    made = planned(config(mesh={"data": 1, "fsdp": 4}), "v5e:2x2")
    assert made.memory.weights < planned(config()).memory.weights / 3
    assert made.lengths[0].decode[1].limit == "ICI"


def test_rows_need_the_experts_that_they_choose_on_average():
    held = DeviceWeight(kept=80.0, read=80.0, gathered=(), chosen=2 / 8)
    assert held.needed(1) == pytest.approx(20.0)
    assert held.needed(2) == pytest.approx(80 * (1 - 0.75**2))
    assert held._replace(spread=2).needed(1) == held.needed(2)


def test_experts_come_from_the_devices_that_hold_them():
    model = tiny.one_block(mlp=tiny.MOE)
    cfg = inference_config(config(blocks=model["blocks"], mesh={"data": 1, "expert": 4}))
    sizes = dict.fromkeys(AXES, 1) | {"expert": 4}
    device = Device.of(cfg, topology.parse("v5e:2x2"), sizes)
    experts = [held for held in device.weights if held.chosen < 1]
    assert {held.spread for held in experts} == {4} and len(experts) == 3
    assert all(held.kept == held.read == 4 * 32 * 32 * 2 for held in experts)


def test_weights_in_eight_bits_are_read_as_such():
    cfg = config()
    low = {"mode": "ptq", "rules": [{"module_path": ".*/(mixer|mlp)/.*", "weight_qtype": "int8"}]}
    quantized = Config.model_validate(cfg.model_dump() | {"quantization": low})
    seconds = [planned(each, "h100:1x1").lengths[0].decode[1].seconds for each in (cfg, quantized)]
    assert seconds[1] < 0.75 * seconds[0]


def test_a_cache_that_is_given_is_shared_by_the_devices_of_a_replica():
    cfg = config(mesh={"data": 1, "tensor": 2}, serve={"cache": 8.0})
    assert planned(cfg, "h100:1x2").memory.cache == 4 * 2**30


def test_a_cache_beyond_the_memory_is_refused():
    with pytest.raises(ConfigError, match=r"serve.cache=100: a device has 15\.\d+ GiB beside"):
        planned(config(serve={"cache": 100.0}))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The figures of a 70B model on eight H100."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    words = "plan synthetic model=llama-3.1-70b --serve --topology h100:1x8 --json"
    assert cli.main([*words.split(), str(file)]) == 0
    return json.loads(file.read_text())


def test_70b_fits_eight_h100_without_any_here(llama):
    row = llama["lengths"][1]
    assert llama["memory"]["weights"] == pytest.approx(2 * 70.55e9 / 8, rel=0.001)
    assert llama["token"] == 80 * 2 * 8 * 128 * 2 / 8
    assert [each["length"] for each in llama["lengths"]] == [1024, 4096, 16384]
    assert 100 < row["fit"] < 300
    assert row["decode"]["1"]["tokens_per_second"] == pytest.approx(190, rel=0.05)


def test_what_does_not_fit_is_refused_with_what_would(maxstack):
    words = "plan synthetic model=llama-3.1-70b mesh.data=8 --serve --topology h100:1x8"
    message = maxstack(words, code=1)
    assert "not one request of 1,024 tokens fits h100:1x8: a device has 72.78 GiB" in message
    assert "use mesh.data=4 mesh.fsdp=1 mesh.expert=1 mesh.tensor=2" in message


@pytest.mark.parametrize(
    "options, message",
    [
        ("--length 100", "--length 100: needs --serve"),
        ("--serve --search", "--search: does not work with --serve"),
        ("--serve --length 8 --prompt 8", "--prompt 8: leaves no room for an answer"),
        ("--serve --length 99 serve.max_length=64", "--length 99: the model takes 64"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message, tmp_path, maxstack):
    path = tiny.write(tmp_path, config())
    assert message in maxstack(f"plan {path} --topology v5e:1x1 {options}", code=1)


def test_a_model_folder_is_placed_over_tensor_as_the_engine_places_it(maxstack):
    folder = parity.GOLDENS / "qwen3"
    assert "mesh tensor=2" in maxstack(f"plan {folder} --serve --topology h100:1x2")


def test_a_runs_folder_says_how_long_its_requests_are(tmp_path, maxstack):
    tiny.write(tmp_path, config()).rename(tmp_path / "config.yml")
    printed = maxstack(f"plan {tmp_path} --serve --topology v5e:1x1")
    assert "1 x TPU v5 lite" in printed and "24           48" in printed
