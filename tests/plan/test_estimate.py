"""Estimates of memory and time: against the real state, counts by hand and the compiler."""

import functools
import math

import jax
import pytest
import tiny
from tiny import ATTENTION, GATED, MOE

from maxstack.plan.buffers import memory
from maxstack.plan.estimate import Shapes, estimate
from maxstack.plan.program import parse as read
from maxstack.plan.topology import Link, links, parse
from maxstack.plan.traffic import collectives
from maxstack.schema.mesh import AXES

PER_LAYER, TABLES = 32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 64, 2 * tiny.VOCAB * 32
NORMS = 32 * (2 * 4 + 1)


def model(mixer=ATTENTION, mlp=GATED, **changes):
    return tiny.one_block(mixer, mlp, **{"layers": 4} | changes)


def sizes_of(mesh):
    return {axis: mesh.get(axis, 1) for axis in AXES}


def of(cfg, mesh, over=None):
    """The estimate on v5e chips, with the links `over`; by default none takes time."""
    return estimate(Shapes.of(cfg), cfg, sizes_of(mesh), parse("v5e:4x4").chip, over or {})


def sent(cfg, mesh, axis):
    """Bytes over one axis: seconds on a link of one byte a second."""
    return of(cfg, mesh, {axis: Link("ICI", 1.0)}).seconds


@pytest.mark.parametrize(
    "mesh, shape",
    [
        ({"fsdp": 8}, model()),
        ({"data": 2, "fsdp": 2, "tensor": 2}, model()),
        ({"data": 4, "fsdp": 2, "optimizer_rules": {"embed": ["data", "fsdp"]}}, model()),
        ({"expert": 4, "fsdp": 2}, model(mlp=MOE)),
        ({"stage": 2, "fsdp": 4}, model()),
        (
            {"data": 4, "tensor": 2, "rules": {"kv_heads": None}},
            model(mixer=ATTENTION | {"kv_heads": 4}),
        ),
    ],
    ids=["fsdp", "three axes", "zero 1", "expert", "stage", "one shape, two rules"],
)
def test_state_is_that_of_its_shards(mesh, shape):
    cfg = tiny.config(mesh={"data": 1} | mesh, model=shape)
    away = cfg.model_copy(
        update={"mesh": cfg.mesh.model_copy(update={"offload": ("optimizer", "params")})}
    )
    state = jax.tree.leaves(tiny.make_run(cfg, 8).abstract[1:3])
    shards = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in state
    )
    assert of(cfg, mesh).memory - of(away, mesh).memory == pytest.approx(shards)


def test_logits_are_those_of_a_block_of_rows_however_many_there_are():
    def needed(rows, vocab):
        shape = model(vocab=vocab, embed=8, remat={"policy": "full"})
        cfg = tiny.config(model=shape, train={"batch_size": rows}, data={"seq_len": 4096})
        return of(cfg, {"fsdp": 8}).memory

    many, few = (needed(rows, 2**17) - needed(rows, 2**16) for rows in (512, 256))
    assert many == pytest.approx(few, rel=0.01)


def test_over_fsdp_weights_are_gathered_twice_and_gradients_scattered_once():
    mesh, cfg = {"fsdp": 16}, tiny.config(model=model(), train={"batch_size": 16})
    found = of(cfg, mesh, links(parse("v5e:4x4"), tuple(sizes_of(mesh).values())))
    sides = 2 * 50e9
    assert found.seconds == pytest.approx(3 * 4 * (4 * PER_LAYER + TABLES) * 15 / 16 / sides)


def test_over_data_gradients_are_summed():
    assert sent(tiny.config(model=model()), {"data": 8}, "data") == pytest.approx(
        2 * 4 * (4 * PER_LAYER + TABLES + NORMS) * 7 / 8
    )


def test_a_frozen_weight_is_gathered_but_has_no_gradient_and_no_state():
    whole, frozen = (
        tiny.config(model=model(), optimizer=chosen) for chosen in ({}, {"frozen": ["embed"]})
    )
    size = 4 * tiny.VOCAB * 32
    memory = of(whole, {"fsdp": 8}).memory - of(frozen, {"fsdp": 8}).memory
    assert memory == pytest.approx(3 * size / 8)  # gradient and two moments
    for axis, times in (("fsdp", 1), ("data", 2)):
        saved = sent(whole, {axis: 8}, axis) - sent(frozen, {axis: 8}, axis)
        assert saved == pytest.approx(times * size * 7 / 8)


@pytest.mark.parametrize(
    "quantization",
    [{}, {"mode": "ptq", "rules": [{"module_path": "blocks/.*", "weight_qtype": "int8"}]}],
    ids=str,
)
def test_of_adapters_alone_gradients_are_summed(quantization):
    cfg = tiny.config(model=model(), lora={"rank": 4}, quantization=quantization)
    assert sent(cfg, {"data": 8}, "data") == pytest.approx(
        2 * 4 * tiny.make_run(cfg).weights.adapters * 7 / 8
    )


def test_a_stage_passes_its_rows_on_and_gathers_its_weights_for_each_microbatch():
    mesh = {"stage": 2, "fsdp": 4}
    cfg = tiny.config(
        model=model(), mesh={"data": 1, "microbatches": 4} | mesh, train={"batch_size": 16}
    )
    assert sent(cfg, mesh, "stage") == pytest.approx(2 * 4 * (16 // 4) * 48 * 32)
    assert sent(cfg, mesh, "fsdp") == pytest.approx(3 * 4 * (4 * 2 * PER_LAYER + TABLES) * 3 / 4)


def test_tokens_travel_to_experts_wherever_they_stand_in_a_block():
    alone, beside = (
        sent(tiny.config(model=model(mlp=mlp)), {"expert": 4, "fsdp": 2}, "expert")
        for mlp in (MOE, {"kind": "parallel", "dense": GATED, "moe": MOE})
    )
    # layers, choices, a device's tokens, numbers, bytes, of which a quarter stay
    once = 4 * 2 * 48 * 32 * 4 * 3 / 4
    # there and back, forward and for both gradients
    assert alone == beside == pytest.approx(6 * once)


@pytest.mark.parametrize(
    ("mlp", "products"),
    [(GATED, 6 * PER_LAYER), (MOE, 6 * 32 * 8 * 12 + 2 * 2 * 3 * 32 * 32)],
    ids=["dense", "two experts of four, forward alone"],
)
def test_products_in_low_precision_take_the_time_of_their_type(mlp, products):
    shape, chip = model(mlp=mlp, dtype="bfloat16", remat={"policy": "none"}), parse("v5e:4x4").chip
    types = dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), "int8")
    low = {"rules": [{"module_path": ".*/(mixer|mlp)/.*"} | types]}
    plain, quantized = (
        of(tiny.config(model=shape, quantization=chosen), {"fsdp": 8}).seconds
        for chosen in ({}, low)
    )
    tokens = tiny.config().train.batch_size * tiny.config().data.seq_len / 8
    faster = 1 / chip.flops("bfloat16") - 1 / chip.flops("int8")
    assert plain - quantized == pytest.approx(4 * products * tokens * faster, rel=1e-3)


@functools.cache
def compiled(policy, **mesh):
    """A configuration whose memory is not that of its smallest parts, and its step."""
    mixer, mlp = {"heads": 8, "kv_heads": 4, "head_dim": 32}, {"hidden": 512}
    changes = {"embed": 256, "vocab": 1024, "remat": {"policy": policy}}
    cfg = tiny.config(
        model=model(ATTENTION | mixer, GATED | mlp, **changes),
        mesh={"data": 1} | mesh, train={"batch_size": 16}, data={"seq_len": 256},
    )  # fmt: skip
    return cfg, tiny.compiled(tiny.make_run(cfg, 8))


@pytest.mark.parametrize(
    "policy, mesh", [("full", {"fsdp": 8}), ("none", {"data": 2, "fsdp": 2, "tensor": 2})], ids=str
)
@pytest.mark.slow
def test_memory_is_within_a_factor_of_1_5_of_the_compiler_s_count(policy, mesh):
    cfg, made = compiled(policy, **mesh)
    assert 1 / 1.5 < of(cfg, mesh).memory / memory(made).needed < 1.5


def test_traffic_is_within_a_factor_of_1_5_of_the_compiler_s():
    cfg, made = compiled("full", fsdp=8)
    real = sum(one.sent for one in collectives(read(made.as_text()), sizes_of({"fsdp": 8})))
    assert 1 / 1.5 < sent(cfg, {"fsdp": 8}, "fsdp") / real < 1.5
