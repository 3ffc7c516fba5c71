"""Models whose weights are rounded or kept in low precision: every kind of mixer, MLP and table, on
one device and on meshes."""

import math

import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from tiny import ATTENTION, DELTA, GATED, MOE

from maxstack.config.compose import plain, presets_dir, read_file
from maxstack.errors import ConfigError
from maxstack.schema.optimizer import OptimizerConfig
from maxstack.state import flat, tree
from maxstack.weights.rewrite import Rewrite

MLA = tiny.MLA | {"q_lora": 24, "rope_dim": 8}
KINDS = {
    "attention": {"layers": 4, "pattern": ["local", "global"]},
    "latent, experts, further": {
        "layers": 2,
        "prefix": ["dense"],
        "pattern": ["moe"],
        "mtp": {"block": "dense"},
        "blocks": {
            "dense": {"mixer": MLA, "mlp": GATED},
            "moe": {"mixer": MLA, "mlp": MOE | {"shared": {"hidden": 32}}},
        },
    },
    "delta, dense, parallel, per layer, tied": {
        "layers": 2,
        "pattern": ["a", "b"],
        "per_layer": {"vocab": tiny.VOCAB, "size": 8},
        "head": {"tied": True},
        "blocks": {
            "a": {
                "mixer": ATTENTION | {"gate": True},
                "mlp": {
                    "kind": "parallel",
                    "dense": GATED,
                    "moe": MOE | {"bias": True},
                },
            },
            "b": {"mixer": DELTA, "mlp": {"kind": "dense", "hidden": 64}},
        },
    },
}
MESHES = {
    "latent, experts, further": {"fsdp": 2, "expert": 2, "tensor": 2},
    "delta, dense, parallel, per layer, tied": {"fsdp": 4, "tensor": 2},
    "attention": {"stage": 2, "fsdp": 2},
}
SGD = {"schedule": None, "chain": [{"kind": "sgd", "learning_rate": 1.0}]}
FAR = {"int8": 0.1, "int4": 0.4}
"""Root mean square of what logits change by, over their deviation, in models of random weights with
everything quantized, embedding and head too."""
W8A8, W4 = {"weight_qtype": "int8", "act_qtype": "int8"}, {"weight_qtype": "int4", "tile_size": 8}


def recipe(mode: str, **rule: object) -> dict:
    return {"mode": mode, "rules": [rule]}


def config(kind: str, quantization: dict, mesh: dict | None = None):
    return tiny.config(
        model=tiny.model(**KINDS[kind], remat={"policy": "full"}),
        quantization=quantization,
        mesh=mesh or {},
    )


def nll(run, params, seed: int = 0) -> float:
    placed = tiny.place(run, seed)
    return float(run.eval_step(params, placed | {"bytes": placed["mask"]})["nll"])


def logits(run, params) -> np.ndarray:
    """Logits of the first batch; where experts are, a token near a tie goes elsewhere."""
    batch = tiny.batch(run.cfg)

    def of(params):
        model = nnx.merge(run.graph, nnx.State(params))
        return model.logits(model.hidden(batch))

    return np.asarray(jax.jit(of)(params))


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("attention", W8A8),
        pytest.param("latent, experts, further", W8A8, marks=pytest.mark.release),
        pytest.param("latent, experts, further", W4, marks=pytest.mark.release),
        pytest.param("delta, dense, parallel, per layer, tied", W8A8, marks=pytest.mark.release),
    ],
)
def test_weights_trained_for_low_precision_compute_what_quantized_ones_do(kind, rule):
    trained, kept = (tiny.make_run(config(kind, recipe(mode, **rule))) for mode in ("qat", "ptq"))
    floats = trained.init().params
    assert nll(trained, floats) == pytest.approx(
        nll(kept, Rewrite(kept.cfg).apply(floats)), rel=1e-6
    )
    plain = tiny.make_run(config(kind, {}))
    assert nll(trained, floats) != nll(plain, floats)
    exact, low = (
        logits(run, params)
        for run, params in ((plain, floats), (kept, Rewrite(kept.cfg).apply(floats)))
    )
    assert 0 < np.sqrt(np.square(low - exact).mean()) < FAR[rule["weight_qtype"]] * exact.std()


def test_what_is_exported_after_qat_is_what_was_evaluated_and_else_the_line_says_so():
    rule = {"weight_qtype": "int4"}
    run = tiny.make_run(config("attention", recipe("qat", **rule)))
    rewrite, floats = run.weights.rewrite, flat(run.init().params)
    rounded, as_trained = (
        tree({path: rewrite.original(path, floats, evaluated) for path in floats})
        for evaluated in (True, False)
    )
    plain = tiny.make_run(config("attention", {}))
    wanted = nll(run, tree(floats))
    assert nll(plain, rounded) == pytest.approx(wanted, rel=1e-6)
    assert abs(nll(plain, as_trained) - wanted) > 1e-3 and not rewrite.unlike
    low = Rewrite(config("attention", recipe("qt", **W8A8)))
    assert [words.partition(" ")[0] for words in low.unlike] == ["weights", "activations"]


@pytest.mark.parametrize(("kind", "mode"), [*zip(MESHES, ["qt", "ptq", "qt"], strict=True)])
@pytest.mark.release
def test_a_mesh_computes_what_one_device_does(kind, mode):
    quantization = recipe(mode, **(W8A8 if mode == "qt" else W4))
    runs = (
        tiny.make_run(config(kind, quantization, mesh), devices)
        for mesh, devices in ((None, 1), (MESHES[kind], math.prod(MESHES[kind].values())))
    )
    (alone,), (spread,) = (tiny.steps(run, 1) for run in runs)
    assert spread["loss"] == pytest.approx(
        alone["loss"], rel=1e-3
    )  # a rounding that falls the other way
    near = 0.03 if kind == "attention" else 0.1
    assert spread["grad_norm"] == pytest.approx(alone["grad_norm"], rel=near)


@pytest.mark.parametrize(
    ("weight", "rest"),
    [
        ("int8", {"act_qtype": "int8", "tile_size": 8, "bwd_qtype": "int8"}),
        pytest.param(
            "float8_e4m3fn",
            {"act_qtype": "float8_e4m3fn", "bwd_qtype": "float8_e5m2"},
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_quantized_training_follows_full_precision(weight, rest):
    low = recipe("qt", module_path="blocks/.*", weight_qtype=weight, **rest)
    exact, ours = (
        tiny.steps(tiny.make_run(config("attention", quantization)), 8)
        for quantization in ({}, low)
    )
    for row, known in zip(ours, exact, strict=True):
        assert row["loss"] != known["loss"]
        assert row["loss"] == pytest.approx(known["loss"], rel=0.02)


@pytest.mark.slow
def test_weights_that_are_kept_in_low_precision_are_not_trained_and_have_no_optimizer_state():
    run = tiny.make_run(config("attention", recipe("ptq", module_path="blocks/.*", **W4)))
    before = flat(jax.device_get(run.init().params))
    after, _ = run.step(run.init(), tiny.place(run))
    now = flat(after.params)
    moved = {path for path, leaf in before.items() if not np.array_equal(leaf, now[path])}
    frozen = {
        path
        for path in before
        if f"{path.rpartition('/')[0]}/scale" in before and not path.endswith("norm/scale")
    }
    assert moved == before.keys() - frozen
    leaves = jax.tree_util.tree_leaves_with_path(run.abstract.opt)
    states = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    assert not any(name.endswith("/int4") for name in states)
    assert any(name.endswith("/embed") for name in states)


@pytest.mark.parametrize(
    ("sections", "optimizer"),
    [
        pytest.param({"lora": {"rank": 4, "dora": True}}, "muon", marks=pytest.mark.release),
        pytest.param({"quantization": recipe("ptq", **W4)}, "muon", marks=pytest.mark.release),
        pytest.param(
            {"quantization": recipe("ptq", **W4), "lora": {"rank": 4}},
            {
                "frozen": ["blocks/global/mlp/gate"],
                "groups": [
                    {"match": ["*/mixer/query", "*/mixer/*"], "chain": [{"kind": "sgd"}]},
                    {"match": ["*", "!embed"], "chain": [{"kind": "adamw"}]},
                ],
            },
            marks=pytest.mark.release,
        ),
    ],
    ids=str,
)
def test_patterns_of_optimizers_fit_models_whose_weights_are_kept_in_another_way(
    sections, optimizer
):
    chosen = optimizer
    if isinstance(optimizer, str):
        chosen = plain(read_file(presets_dir() / "optimizers" / f"{optimizer}.yml"))
    changed = OptimizerConfig(**chosen | {"learning_rate": 1e-2, "schedule": None})
    run = tiny.make_run(tiny.config(**sections).model_copy(update={"optimizer": changed}))
    state, placed, losses = run.init(), tiny.place(run), []
    frozen = jax.device_get(state.params["blocks"]["global"]["mlp"]["gate"])
    for _ in range(6):
        state, scalars = run.step(state, placed)
        losses.append(float(scalars["loss"]))
    assert losses[-1] < losses[0]
    if "frozen" in chosen:
        gate = state.params["blocks"]["global"]["mlp"]["gate"]
        jax.tree.map(np.testing.assert_array_equal, frozen, gate)


def test_four_bit_weights_take_half_a_byte():
    run = tiny.make_run(
        config("attention", recipe("ptq", module_path=".*/gate", weight_qtype="nf4"))
    )
    leaf = run.abstract.params["blocks"]["global"]["mlp"]["gate"]["nf4"]
    assert (leaf.dtype, leaf.shape) == (np.uint8, (2, 32, 32))


@pytest.mark.slow
def test_tiles_of_experts_divide_over_the_devices_that_share_them():
    model = tiny.one_block(mlp=MOE | {"hidden": 48}, layers=1)
    rule = recipe("qt", module_path=".*/mlp", tile_size=16, **W8A8)
    run = tiny.make_run(tiny.config(model=model, quantization=rule, mesh={"tensor": 2}), 2)
    said = (
        "3 scales along the hidden units of experts' down do not divide over the mesh's tensor of 2"
    )
    with pytest.raises(ConfigError, match=said):
        tiny.steps(run, 1)


@pytest.mark.release
def test_tiles_of_positions_lie_along_a_sequence_on_a_mesh_and_on_one_device():
    types = {"weight_qtype": "int8", "bwd_qtype": "int4", "bwd_weight_grad_tile_size": 16}
    rule, weights = recipe("qt", module_path=".*/head|.*/mlp/down", **types), []
    for mesh, devices in (({}, 1), ({"fsdp": 4}, 4)):
        sections = {"quantization": rule, "mesh": mesh, "optimizer": SGD}
        run = tiny.make_run(tiny.config(model=tiny.model(layers=2), **sections), devices)
        state, _ = run.step(run.init(), tiny.place(run))
        weights.append(np.asarray(state.params["blocks"]["global"]["mlp"]["down"]))
    # in four bits, a rounding that falls the other way is seen
    assert np.isclose(*weights, rtol=1e-4, atol=1e-5).mean() > 0.5
