"""Tokens that travel to their experts against the same mixture on one device: values, gradients,
rounds, capacity and memory."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maxstack import sharding
from maxstack.layers import dispatch
from maxstack.layers.context import Context
from maxstack.layers.moe import MoE
from maxstack.schema.mesh import MeshConfig
from maxstack.schema.mlps import MoEConfig

EMBED, EXPERTS, BATCH, TIME = 8, 8, 8, 32
MESHES = {
    "expert": {"expert": 8},
    "expert-tensor": {"expert": 4, "tensor": 2},
    "data-fsdp-expert": {"data": 2, "fsdp": 2, "expert": 2},
    "context-expert-tensor": {"expert": 2, "context": 2, "tensor": 2},
}


def config(**fields):
    return MoEConfig(
        **{
            "kind": "moe",
            "experts": EXPERTS,
            "top_k": 3,
            "hidden": 4,
            "bias": True,
            "router": {"bias": True},
            **fields,
        }
    )


def drawn(cfg):
    """The module's graph, and random weights by name."""
    graph, state = nnx.split(MoE(cfg, EMBED, std=1.0, out_std=1.0, dtype="float32"))
    rng = np.random.default_rng(0)
    return (
        graph,
        {name: jnp.asarray(rng.normal(size=p.shape), p.dtype) for name, p in state.items()},
        {name: p.axes for name, p in state.items()},
    )


def flooded(weights):
    """The same with a router that sends every token to two experts first, which are on one device
    where a device has two."""
    return weights | {"router_bias": weights["router_bias"].at[4:6].set(100.0)}


def batch(seed=1):
    """Inputs, segments with padding anywhere, and what the outputs are summed with."""
    rng = np.random.default_rng(seed)
    x, probe = rng.normal(size=(2, BATCH, TIME, EMBED)).astype(np.float32)
    return x, rng.integers(0, 4, (BATCH, TIME)).astype(np.int32), probe


def total(graph, weights, x, segments, probe):
    out, report = nnx.merge(graph, nnx.State(weights))(
        x, x, Context(jnp.arange(TIME)[None], segments, real_BT=segments > 0)
    )
    return (out * probe).sum(), (out, report)


def differentiated(graph):
    return jax.jit(jax.value_and_grad(functools.partial(total, graph), (0, 1), has_aux=True))


@functools.cache
def alone(cfg):
    """`differentiated` on one device, compiled once for all meshes."""
    return differentiated(drawn(cfg)[0])


def on(mesh, cfg):
    """`differentiated` on a mesh of eight devices; the weights are placed on it first."""
    graph, _, axes = drawn(cfg)
    mesh_cfg = MeshConfig(**{"data": 1, **mesh})
    devices = sharding.make_mesh(mesh_cfg, jax.devices())
    step = differentiated(graph)

    def run(weights, *inputs):
        placed = {
            name: jax.device_put(
                w, NamedSharding(devices, sharding.spec(axes[name], mesh_cfg.rules))
            )
            for name, w in weights.items()
        }
        with sharding.use(devices, mesh_cfg):
            return step(placed, *inputs)

    return run


def assert_same(got, wanted, within=1e-5):
    """Every array within a share of its greatest value."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=0, atol=within * float(jnp.abs(b).max())
        ),
        got,
        wanted,
    )


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.slow
def test_tokens_that_travel_get_what_they_get_on_one_device(mesh):
    cfg, inputs = config(slack=0.5), batch()
    run, weights = on(mesh, cfg), drawn(cfg)[1]
    rounds = []
    for given in (weights, flooded(weights)):
        (_, (out, report)), grads = run(given, *inputs)
        (_, (wanted, wanted_report)), wanted_grads = alone(cfg)(given, *inputs)
        assert_same((out, grads), (wanted, wanted_grads))
        np.testing.assert_array_equal(report["load"], wanted_report["load"])
        assert not np.asarray(out)[inputs[1] == 0].any()
        rounds.append(int(report["rounds"]))
    assert 1 < rounds[0] < rounds[1]


@pytest.mark.slow
def test_a_capacity_drops_the_same_with_and_without_the_axis():
    cfg, inputs = config(capacity=0.75), batch()
    weights = flooded(drawn(cfg)[1])
    (_, (out, report)), grads = on(MESHES["expert-tensor"], cfg)(weights, *inputs)
    (_, (wanted, wanted_report)), wanted_grads = alone(cfg)(weights, *inputs)
    assert_same((out, grads), (wanted, wanted_grads))
    most, real = math.ceil(0.75 * TIME * 3 / EXPERTS), (inputs[1] > 0).sum(axis=1)
    assert report["dropped"] == wanted_report["dropped"] >= (real - most).sum() > 0
    assert report.keys() == wanted_report.keys() == {"load", "dropped"}


@pytest.mark.slow
def test_a_program_in_stages_agrees_on_the_rounds_of_all_of_them():
    cfg, (x, segments, probe) = config(top_k=2), batch()
    graph, weights, _ = drawn(cfg)
    stages = jax.tree.map(lambda *parts: jnp.stack(parts), weights, flooded(weights))
    mesh_cfg = MeshConfig(data=1, stage=2, expert=4)
    over, own = PartitionSpec("stage"), PartitionSpec()

    def stage(weights, *inputs):
        (_, (_, report)), grads = jax.value_and_grad(functools.partial(total, graph), has_aux=True)(
            jax.tree.map(lambda w: w[0], weights), *inputs
        )
        return jax.tree.map(lambda a: a[None], (report["rounds"], grads))

    with sharding.use(sharding.make_mesh(mesh_cfg, jax.devices()), mesh_cfg):
        split = sharding.per_device(stage, (over, own, own, own), over, frozenset({"stage"}))
        rounds, grads = jax.jit(split)(stages, x, segments, probe)
    for i, given in enumerate((weights, flooded(weights))):
        wanted = alone(cfg)(given, x, segments, probe)[1][0]
        assert_same({name: grad[i] for name, grad in grads.items()}, wanted)
    assert rounds[0] == rounds[1] > 1


@pytest.mark.slow
def test_memory_is_that_of_one_round_whatever_the_routing_may_be():
    mesh_cfg = MeshConfig(data=1, expert=8)
    mesh = sharding.make_mesh(mesh_cfg, jax.devices())
    own, tokens, chosen = PartitionSpec("expert"), 256, 2

    def wide(w_LDF, x_SD, sizes_L):
        return jnp.tanh(x_SD @ w_LDF[0]) @ w_LDF[0].T

    def temporaries(slack):
        def mixed(w, x, weight, expert):
            how = dispatch.plan_travel(EXPERTS, ("expert",), tokens, chosen, slack, None, False)
            return dispatch.mix_experts(wide, how, w, x, weight, expert)[0]

        def loss(*given):
            return jnp.square(sharding.per_device(mixed, (own, own, own, own), own)(*given)).sum()

        shapes = (
            (EXPERTS, EMBED, 512),
            (8 * tokens, EMBED),
            (8 * tokens, chosen),
            (8 * tokens, chosen),
        )
        given = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, own))
            for shape, dtype in zip(shapes, ("float32",) * 3 + ("int32",), strict=True)
        ]
        with sharding.use(mesh, mesh_cfg):
            return (
                jax.jit(jax.grad(loss, (0, 1, 2)))
                .lower(*given)
                .compile()
                .memory_analysis()
                .temp_size_in_bytes
            )

    assert (
        temporaries(0.5) < temporaries(4.0) / 6
    )  # the latter holds all rows that can come, and the former needs up to 29 rounds for them
