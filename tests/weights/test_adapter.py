"""Low-rank adapters: alone trained, nothing at first, on any mesh, on float and on quantized
bases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import trees
from flax import nnx
from test_meshes import GRADIENT

from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.state import flat, tree
from maxstack.weights.rewrite import Rewrite

MODEL = tiny.model(layers=2)
NF4 = {
    "mode": "ptq",
    "rules": [{"module_path": "blocks/.*", "weight_qtype": "nf4", "tile_size": 8}],
}
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def run_of(lora: dict | None, devices: int = 1, **sections: object):
    given = {} if lora is None else {"lora": {"rank": 4} | lora}
    return tiny.make_run(tiny.config(**{"model": MODEL} | given | sections), devices)


def nll_of(run, params) -> float:
    batch = tiny.place(run)
    return float(run.eval_step(params, batch | {"bytes": batch["mask"]})["nll"])


def draw(params, names, scale=1.0):
    """The weights with others where names end so, drawn."""
    rng, drawn = np.random.default_rng(0), flat(jax.device_get(params))
    for path, leaf in drawn.items():
        if path.endswith(names):
            drawn[path] = rng.normal(size=leaf.shape).astype(np.float32) * scale
    return tree(drawn)


@pytest.mark.parametrize(
    ("lora", "quantization"),
    [
        pytest.param({}, NF4, marks=pytest.mark.slow),
        pytest.param({"dora": True}, NF4, marks=pytest.mark.release),
        pytest.param({}, {}, marks=pytest.mark.release),
        pytest.param({"dora": True}, {}, marks=pytest.mark.release),
    ],
    ids=["lora, nf4", "dora, nf4", "lora", "dora"],
)
def test_a_fresh_adapter_changes_nothing(lora, quantization):
    own, base = run_of(lora, quantization=quantization), run_of(None, quantization=quantization)
    found, wanted = (nll_of(run, run.init().params) for run in (own, base))
    # a length over itself need not be 1 to the last place
    assert found == (pytest.approx(wanted, rel=1e-6) if lora else wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "saved",
    [{}, pytest.param({"modules_to_save": ["head"]}, marks=pytest.mark.release)],
    ids=["alone", "head"],
)
def test_adapters_and_what_is_named_are_trained_and_have_optimizer_state(saved):
    run = run_of({"targets": [".*/mixer", ".*/mlp/gate"], **saved}, quantization=NF4)
    before = flat(jax.device_get(run.init().params))
    state = run.init()
    for i in range(2):  # A has no gradient before B is something
        state, _ = run.step(state, tiny.place(run, i))
    moved = {
        path for path, leaf in flat(state.params).items() if not np.array_equal(leaf, before[path])
    }
    adapters = {path for path in before if path.endswith(("lora_a", "lora_b"))}
    whole = {*saved.get("modules_to_save", ())}
    assert moved == adapters | whole and len(adapters) == 2 * 2 * 5
    leaves = jax.tree_util.tree_leaves_with_path(run.abstract.opt)
    states = {
        jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in leaves if leaf.ndim
    }
    assert {name.split("/", 2)[-1].partition("/")[2] for name in states} and all(
        name.endswith(("lora_a", "lora_b", *whole)) for name in states
    )


@pytest.mark.release
def test_a_mesh_trains_adapters_as_one_device_does():
    alone, spread = (
        tiny.steps(run_of({"dora": True}, devices, quantization=NF4, mesh=mesh), 3)
        for devices, mesh in ((1, {}), (8, MESH))
    )
    assert [row["loss"] for row in spread] == pytest.approx(
        [row["loss"] for row in alone], rel=2e-3
    )  # Adam makes much of little


def dropped(devices: int, mesh: dict, accumulate: int = 1):
    """Two steps with dropout, from adapters that are something -> (losses, gradients of the
    first)."""
    run = run_of(
        {"dropout": 0.5},
        devices,
        model=tiny.model(layers=2, pattern=["global"]),
        mesh={"data": 1} | mesh,
        optimizer=GRADIENT,
        train={"batch_size": 16, "accumulate": accumulate},
        data={"seq_len": 32},
    )
    state, losses, gradients = jax.device_get(run.init()), [], []
    params = draw(state.params, "lora_b", 0.02)
    state = jax.device_put(
        state._replace(params=params), jax.tree.map(lambda leaf: leaf.sharding, run.abstract)
    )
    for i in range(2):
        state, scalars = run.step(state, tiny.place(run, i))
        losses.append(float(scalars["loss"]))
        gradients.append([jax.device_get(leaf) for leaf in jax.tree.leaves(state.opt) if leaf.ndim])
    return losses, gradients[0]


@pytest.mark.parametrize(
    ("devices", "mesh", "accumulate"),
    [
        pytest.param(1, {}, 2, marks=pytest.mark.release),
        pytest.param(8, {"context": 2, "stage": 2, "fsdp": 2}, 2, marks=pytest.mark.release),
    ],
    ids=["accumulate", "ring, stage, fsdp, accumulate"],
)
def test_dropout_drops_the_same_on_any_mesh_and_in_microbatches(devices, mesh, accumulate):
    ours, mine = dropped(devices, mesh, accumulate)
    theirs, other = dropped(1, {})
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for one, wanted in zip(mine, other, strict=True):
        assert np.linalg.norm(one - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.mark.release
def test_dropout_is_of_training_alone_and_differs_between_steps_and_layers():
    run = run_of({"dropout": 0.5}, model=tiny.model(layers=4))
    state = jax.device_get(run.init())
    params, placed = draw(state.params, "lora_b", 0.02), tiny.place(run)
    places, losses = jax.tree.map(lambda leaf: leaf.sharding, run.abstract), set()
    for step in (0, 0, 1):
        begin = jax.device_put(state._replace(params=params, step=np.int32(step)), places)
        losses.add(float(run.step(begin, placed)[1]["loss"]))
    assert len(losses) == 2
    still = nll_of(run, params)
    assert nll_of(run, params) == still and still / float(placed["mask"].sum()) not in losses
    a_L = flat(params)["blocks/global/mixer/query/lora_a"]
    assert a_L.shape[0] == 2 and not np.array_equal(*a_L)


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param({}, marks=pytest.mark.release),
        {"dora": True},
        pytest.param({"rslora": True}, marks=pytest.mark.release),
    ],
    ids=["lora", "dora", "rslora"],
)
def test_a_merged_weight_multiplies_as_the_adapter_does(lora):
    model = tiny.model(layers=1, pattern=["global"])
    run, plain = run_of(lora, model=model), run_of(None, model=model)
    params = draw(run.init().params, ("lora_a", "lora_b", "magnitude"))
    rewrite, leaves = run.weights.rewrite, flat(params)
    merged = tree({path: rewrite.original(path, leaves) for path in run.weights.original})
    found = nll_of(run, params)
    assert nll_of(plain, merged) == pytest.approx(found, rel=1e-5)
    assert found != pytest.approx(nll_of(plain, plain.init().params), rel=1e-4)


@pytest.mark.slow
def test_the_gradient_of_dora_is_that_of_the_formula_with_its_length_held():
    run = run_of({"dora": True}, model=tiny.model(layers=1, pattern=["global"]))
    model = nnx.merge(run.graph, nnx.State(run.init().params))
    graph, stacked = nnx.split(model.blocks["global"].mlp.gate)
    adapter = jax.tree.map(lambda leaf: leaf[0], stacked)
    rng = np.random.default_rng(2)
    w, a, b, m, x, g = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((32, 64), (32, 4), (4, 64), (64,), (5, 32), (5, 64))
    )

    def ours(a, b, m):
        values = {"base": w, "lora_a": a, "lora_b": b, "magnitude": m}
        state = nnx.State({name: adapter[name].replace(values[name]) for name in values})
        return (nnx.merge(graph, state).project(x) * g).sum()

    def formula(a, b, m):
        whole = w + 4.0 * a @ b
        return (x @ (m * whole / jnp.linalg.norm(jax.lax.stop_gradient(whole), axis=0)) * g).sum()

    mine, known = (jax.grad(f, (0, 1, 2))(a, b, m) for f in (ours, formula))
    trees.close(mine, known, rtol=2e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("lora", "quantization", "says"),
    [
        (
            {"targets": ["blocks/globl/mlp"]},
            {},
            "lora.targets.0: 'blocks/globl/mlp' matches no weight; nearest paths: "
            "blocks/global/mlp",
        ),
        (
            {"targets": ["embed"]},
            {},
            "lora.targets.0: 'embed' matches only embed: experts, tables, the head and "
            "what is no matrix take no adapters",
        ),
        ({"targets": ["q_proj"]}, {}, r"'q_proj' matches no weight; here that is \.\*/mixer/query"),
        (
            {"modules_to_save": ["heed"]},
            NF4,
            "lora.modules_to_save.0: 'heed' matches no weight; nearest paths: head",
        ),
        (
            {"modules_to_save": [".*/gate"]},
            NF4,
            ".* matches blocks/global/mlp/gate, which is kept in low precision",
        ),
        (
            {"dora": True},
            {"rules": [{"module_path": ".*/gate", "weight_qtype": "int4"}]},
            "lora.dora: blocks/global/mlp/gate is rounded at each use .*; keep it in low "
            "precision with mode: ptq",
        ),
    ],
)
def test_adapters_that_cannot_be_are_refused_by_name(lora, quantization, says):
    with pytest.raises(ConfigError, match=says):
        Rewrite(tiny.config(lora=lora, quantization=quantization))


def test_adapters_of_nothing_are_refused_before_jax(tmp_path):
    path = tiny.write(tmp_path, tiny.config(model=tiny.model(layers=4)))
    with pytest.raises(ConfigError, match="give at least one pattern"):
        load(path, ["lora={targets: []}"])
