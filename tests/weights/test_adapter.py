"""Low-rank adapters: alone trained, nothing at first, on any mesh, on float and on quantized
bases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from maxstack import config
from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.weights.rewrite import Rewrite

MODEL = tiny.model(layers=2)
NF4 = {
    "mode": "ptq",
    "rules": [{"module_path": "blocks/.*", "weight_qtype": "nf4", "tile_size": 8}],
}
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def run_of(lora: dict | None, devices: int = 1, **sections: object):
    return tiny.make_run(
        tiny.config(
            **{"model": MODEL}
            | ({"lora": {"rank": 4} | lora} if lora is not None else {})
            | sections
        ),
        devices,
    )


def flat(params) -> dict:
    return nnx.traversals.flatten_mapping(params, sep="/")


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
    batch = own.batches.place(tiny.batch(own.cfg), 8)
    batch |= {"bytes": batch["mask"]}
    found, wanted = (float(run.eval_step(run.init().params, batch)["nll"]) for run in (own, base))
    assert found == (
        pytest.approx(wanted, rel=1e-6) if lora else wanted
    )  # a length over itself need not be 1 to the last place


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
        state, _ = run.step(state, run.batches.place(tiny.batch(run.cfg, i), 8))
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


def with_adapters(params) -> dict:
    """The weights with adapters that are something: B is drawn, not zero."""
    rng = np.random.default_rng(0)
    drawn = {
        path: rng.normal(size=leaf.shape).astype(np.float32) * 0.02
        if path.endswith("lora_b")
        else leaf
        for path, leaf in flat(params).items()
    }
    return nnx.traversals.unflatten_mapping(drawn, sep="/")


GRADIENT = {
    "learning_rate": 0.1,
    "chain": [{"kind": "trace", "decay": 0.0}, {"kind": "scale_by_learning_rate"}],
}


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
    params = with_adapters(state.params)
    state = jax.device_put(
        state._replace(params=params), jax.tree.map(lambda leaf: leaf.sharding, run.abstract)
    )
    for i in range(2):
        state, scalars = run.step(state, run.batches.place(tiny.batch(run.cfg, i), 16))
        losses.append(float(scalars["loss"]))
        gradients.append([jax.device_get(leaf) for leaf in jax.tree.leaves(state.opt) if leaf.ndim])
    return losses, gradients[0]


@pytest.fixture(scope="module")
def dropped_alone():
    """On one device, in one piece."""
    return dropped(1, {})


@pytest.mark.parametrize(
    ("devices", "mesh", "accumulate"),
    [
        pytest.param(1, {}, 2, marks=pytest.mark.release),
        pytest.param(8, {"context": 2, "stage": 2, "fsdp": 2}, 2, marks=pytest.mark.release),
    ],
    ids=["accumulate", "ring, stage, fsdp, accumulate"],
)
def test_dropout_drops_the_same_on_any_mesh_and_in_microbatches(
    devices, mesh, accumulate, dropped_alone
):
    (ours, our_gradients), (theirs, their_gradients) = (
        dropped(devices, mesh, accumulate),
        dropped_alone,
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for mine, other in zip(our_gradients, their_gradients, strict=True):
        assert np.linalg.norm(mine - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.release
def test_dropout_is_of_training_alone_and_differs_between_steps_and_layers():
    run = run_of({"dropout": 0.5}, model=tiny.model(layers=4))
    state = jax.device_get(run.init())
    params = with_adapters(state.params)
    placed = run.batches.place(tiny.batch(run.cfg), 8)
    places = jax.tree.map(lambda leaf: leaf.sharding, run.abstract)
    begins = [
        jax.device_put(state._replace(params=params, step=np.int32(step)), places)
        for step in (0, 0, 1)
    ]
    losses = {float(run.step(begin, placed)[1]["loss"]) for begin in begins}
    assert len(losses) == 2
    still = [
        float(run.eval_step(params, placed | {"bytes": placed["mask"]})["nll"]) for _ in range(2)
    ]
    assert still[0] == still[1] and still[0] / float(placed["mask"].sum()) not in losses
    adapter = (
        nnx.merge(*nnx.split(nnx.merge(run.graph, nnx.State(params)))).blocks["global"].mixer.query
    )
    assert adapter.lora_a.shape[0] == 2 and not np.array_equal(adapter.lora_a[0], adapter.lora_a[1])


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
    run = run_of(lora, model=tiny.model(layers=1, pattern=["global"]))
    rng = np.random.default_rng(1)
    params = {
        path: rng.normal(size=leaf.shape).astype(np.float32)
        if "lora" in path or "magnitude" in path
        else leaf
        for path, leaf in flat(jax.device_get(run.init().params)).items()
    }
    merged = nnx.traversals.unflatten_mapping(
        {path: run.weights.rewrite.original(path, params) for path in run.weights.original}, sep="/"
    )
    plain = run_of(None, model=tiny.model(layers=1, pattern=["global"]))
    batch = run.batches.place(tiny.batch(run.cfg), 8)
    batch |= {"bytes": batch["mask"]}
    found = run.eval_step(nnx.traversals.unflatten_mapping(params, sep="/"), batch)["nll"]
    assert float(plain.eval_step(merged, batch)["nll"]) == pytest.approx(float(found), rel=1e-5)
    assert float(found) != pytest.approx(
        float(plain.eval_step(plain.init().params, batch)["nll"]), rel=1e-4
    )


@pytest.mark.slow
def test_the_gradient_of_dora_is_that_of_the_formula_with_its_length_held():
    run = run_of({"dora": True}, model=tiny.model(layers=1, pattern=["global"]))
    model = nnx.merge(run.graph, nnx.State(run.init().params))
    adapter = jax.tree.map(lambda leaf: leaf[0], nnx.split(model.blocks["global"].mlp.gate)[1])
    rng = np.random.default_rng(2)
    w, a, b, m, x, g = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((32, 64), (32, 4), (4, 64), (64,), (5, 32), (5, 64))
    )
    graph = nnx.split(model.blocks["global"].mlp.gate)[0]

    def ours(a, b, m):
        state = nnx.State(
            {
                "base": adapter["base"].replace(w),
                "lora_a": adapter["lora_a"].replace(a),
                "lora_b": adapter["lora_b"].replace(b),
                "magnitude": adapter["magnitude"].replace(m),
            }
        )
        return (nnx.merge(graph, state).project(x) * g).sum()

    def formula(a, b, m):
        whole = w + 4.0 * a @ b
        return (x @ (m * whole / jnp.linalg.norm(jax.lax.stop_gradient(whole), axis=0)) * g).sum()

    for mine, known in zip(
        jax.grad(ours, (0, 1, 2))(a, b, m), jax.grad(formula, (0, 1, 2))(a, b, m), strict=True
    ):
        np.testing.assert_allclose(mine, known, rtol=2e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (
            ["blocks/globl/mlp"],
            "lora.targets.0: 'blocks/globl/mlp' matches no weight; nearest paths: "
            "blocks/global/mlp",
        ),
        (
            ["embed"],
            "lora.targets.0: 'embed' matches only embed: experts, tables, the head and "
            "what is no matrix take no adapters",
        ),
        (["q_proj"], r"'q_proj' matches no weight; here that is \.\*/mixer/query"),
    ],
)
def test_a_target_that_takes_nothing_is_refused_by_name(targets, says):
    with pytest.raises(ConfigError, match=says):
        Rewrite(tiny.config(lora={"targets": targets}))


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("heed", "lora.modules_to_save.0: 'heed' matches no weight; nearest paths: head"),
        (".*/gate", ".* matches blocks/global/mlp/gate, which is kept in low precision"),
    ],
)
def test_what_cannot_be_trained_whole_is_refused_by_name(pattern, says):
    with pytest.raises(ConfigError, match=says):
        Rewrite(tiny.config(lora={"modules_to_save": [pattern]}, quantization=NF4))


def test_lengths_of_columns_that_are_rounded_as_they_are_used_are_refused():
    rules = [{"module_path": ".*/gate", "weight_qtype": "int4"}]
    with pytest.raises(
        ConfigError,
        match="lora.dora: blocks/global/mlp/gate is rounded at each use .*; keep it in low "
        "precision with mode: ptq",
    ):
        Rewrite(tiny.config(lora={"dora": True}, quantization={"rules": rules}))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("lora={targets: []}", "give at least one pattern"),
    ],
)
def test_adapters_that_cannot_be_are_refused_before_jax(override, says, tmp_path):
    (tmp_path / "run.yml").write_text(config.dump(tiny.config(model=tiny.model(layers=4))))
    with pytest.raises(ConfigError, match=says):
        load(tmp_path / "run.yml", [override])
