"""Optimizers of a configuration equal hand-written Optax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_trees import EMBED, INFO, MLP, SMALL, built, first, info, train, tree

from maxstack.errors import ConfigError
from maxstack.optim import build, trained_mask
from maxstack.optim.wrappers import leaves_by_path
from maxstack.schema.optimizer import OptimizerConfig
from maxstack.schema.optimizer.arguments import transform_kinds
from maxstack.schema.optimizer.signatures import lookup

ALL = [{"path": "*", "ndim": 2}]


def same(left, right, **tolerance):
    right = leaves_by_path(right)
    for path, a in leaves_by_path(left).items():
        tolerances = {"rtol": 1e-6, "atol": 1e-7} | tolerance
        np.testing.assert_allclose(a, right[path], **tolerances, err_msg=path)


def minimal(name):
    """An item of this kind with what it needs."""
    special = {
        "lbfgs": {"linesearch": None},
        "add_noise": {"key": 0, "eta": 0.1, "gamma": 0.5},
        "noisy_sgd": {"key": 0},
        "galore": {"rank": 2},
        "scale_by_galore": {"rank": 2},
        "flatten": {"inner": [{"kind": "adam"}]},
        "lookahead": {"inner": [{"kind": "sgd"}], "sync_period": 2, "slow_step_size": 0.5},
        "scale_by_schedule": {"step_size_fn": {"kind": "constant", "value": -0.1}},
        "freeze": {"mask": ["norm"]},
        "selective_transform": {"inner": {"kind": "sgd"}, "freeze_mask": ["norm"]},
    }
    needed = {"transform": [{"kind": "sgd"}], "mask": ["*"], "flag": True, "whole": 2, "rate": 0.1}
    required = {
        key: needed.get(argument.sort, 0.5)
        for key, argument in lookup("transform", name).arguments.items()
        if argument.required and key != "learning_rate"
    }
    return {"kind": name} | special.get(name, required)


@pytest.mark.parametrize("name", transform_kinds())
def test_every_transform_of_optax_builds_and_keeps_shapes_and_state_through_two_updates(name):
    of = {path: leaf for path, leaf in SMALL.items() if name != "scale_by_muon" or leaf.ndim == 2}
    items = [minimal(name)]
    try:
        cfg = OptimizerConfig(learning_rate=0.1, schedule=None, chain=items)
    except ValueError:
        cfg = OptimizerConfig(
            learning_rate=0.1, schedule=None, chain=[*items, {"kind": "scale_by_learning_rate"}]
        )
    tx = build(cfg, 10, of)

    def run(params):
        start = tx.init(params)
        updates, second = tx.update(params, start, params, value=jnp.float32(1.0), grad=params)
        updates, third = tx.update(params, second, params, value=jnp.float32(1.0), grad=params)
        return start, third, updates

    start, third, updates = jax.eval_shape(run, tree(of))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (start, updates))
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (third, tree(of)))


@pytest.mark.slow
def test_the_default_is_clipped_adamw_that_decays_matrices_under_a_warm_up_and_a_cosine():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 2, 100, 3e-5)
    decayed = jax.tree.map(lambda leaf: leaf.ndim == 2, INFO)
    by_hand = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed),
    )
    same(
        train(build(OptimizerConfig(), 100, INFO), INFO)[0],
        train(optax.with_extra_args_support(by_hand), INFO)[0],
    )


def test_decay_patterns_replace_the_default_mask():
    chain = [{"kind": "adamw", "weight_decay": 0.5}]
    tx = built(learning_rate=0.1, chain=chain, decay=["blocks/*", "!*_bias"])
    updates = leaves_by_path(first(tx, jax.tree.map(jnp.zeros_like, tree(INFO)), tree(INFO)))
    assert {path for path, leaf in updates.items() if np.any(leaf)} == {
        path for path in updates if path.startswith("blocks/") and not path.endswith("_bias")
    }


def test_grouped_optimizers_equal_hand_written_partition_after_shared_clipping():
    groups = [
        {"match": ALL, "chain": [{"kind": "lion", "b2": 0.98, "weight_decay": 0.0}]},
        {"match": ["*"], "chain": [{"kind": "adam", "learning_rate": 0.01}]},
    ]
    labels = jax.tree.map(lambda leaf: "m" if leaf.ndim == 2 else "v", INFO)
    parts = {"m": optax.lion(0.1, b2=0.98, weight_decay=0.0), "v": optax.adam(0.01)}
    by_hand = optax.chain(optax.clip_by_global_norm(1.0), optax.partition(parts, labels))
    same(
        train(built(learning_rate=0.1, groups=groups), INFO)[0],
        train(optax.with_extra_args_support(by_hand), INFO)[0],
    )


@pytest.mark.parametrize(
    "optimizer, words",
    [
        ({"groups": [{"match": ["embed"], "chain": [{"kind": "sgd"}]}]}, "no group matches"),
        (
            {"groups": [{"match": ["embed", "block/*"], "chain": [{"kind": "sgd"}]}]},
            "groups.0.match.1: 'block/*' matches no parameter; nearest paths: blocks/",
        ),
        (
            {"decay": [{"path": "norm/*", "ndim": 2}]},
            "decay.0: 'norm/*' with ndim 2 matches no parameter; parameters on that path "
            "have ndim 1",
        ),
        ({"frozen": ["embd"]}, "nearest paths: embed"),
        ({"frozen": ["*"]}, "no parameter is left to train"),
        (
            {"chain": [{"kind": "adamw", "mask": ["hed"]}]},
            "chain.0.mask.0: 'hed' matches no parameter; nearest paths: head",
        ),
        (
            {
                "groups": [
                    {"match": ["head"], "chain": [{"kind": "adamw", "mask": ["embed"]}]},
                    {"match": ["*"], "chain": [{"kind": "sgd"}]},
                ]
            },
            "groups.0.chain.0.mask.0: 'embed' matches no parameter",
        ),
        ({"chain": [{"kind": "scale_by_muon"}, {"kind": "sgd"}]}, "takes matrices only"),
        (
            {"chain": [{"kind": "reduce_on_plateau", "factor": 2.0}, {"kind": "sgd"}]},
            "chain.0: optax refuses these arguments",
        ),
        ({"schedule": {"kind": "warmup_cosine", "warmup_steps": 500}}, "schedule.warmup_steps"),
    ],
)
def test_what_does_not_fit_the_parameters_is_explained(optimizer, words):
    with pytest.raises(ConfigError, match=r"^optimizer") as caught:
        built(**optimizer)
    assert words in str(caught.value)


def test_a_pattern_may_be_allowed_to_match_nothing():
    assert built(frozen=["embed", {"path": "lm_head", "optional": True}])


@pytest.mark.parametrize(
    "optimizer", [{"frozen": ["embed", "*_bias"]}, {"trainable": ["*", "!embed", "!*_bias"]}]
)
def test_frozen_parameters_never_change_and_have_no_state(optimizer):
    params, _, state = train(built(learning_rate=0.1, ema={"decay": 0.9}, **optimizer), INFO)
    for leaf in ("embed", "query_bias"):
        assert not [path for path in leaves_by_path(state) if leaf in path.split("/")]
    assert np.array_equal(params["embed"], tree(INFO)["embed"]) and not np.allclose(
        params["head"], tree(INFO)["head"]
    )


def test_patterns_name_weights_by_their_path_in_the_model_and_those_that_are_not_trained():
    leaf = dataclasses.replace(SMALL["w"], weight="gate")
    frozen = dataclasses.replace(SMALL["w"], frozen=True)
    of = {
        "gate": {
            "base": dataclasses.replace(frozen, weight="gate"),
            "lora_a": leaf,
            "lora_b": leaf,
        },
        "embed": frozen,
    }
    groups = [
        {"match": ["embed"], "chain": [{"kind": "lion"}]},
        {"match": ["*", "!gate", "!embed"], "chain": [{"kind": "lion"}]},
        {"match": ["gate", "!*/lora_b"], "chain": [{"kind": "scale", "step_size": -2.0}]},
        {"match": ["*"], "chain": [{"kind": "adamw", "mask": ["gate", "!embed"]}]},
    ]
    tx = built(of=of, chain=[], groups=groups, decay=["gate"])
    params, grads = tree(of), tree(of, seed=1)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["gate"]["lora_a"], -2 * grads["gate"]["lora_a"])
    assert (
        not np.any(updates["gate"]["base"])
        and not np.any(updates["embed"])
        and np.any(updates["gate"]["lora_b"])
    )
    assert [
        *jax.tree.leaves(trained_mask(OptimizerConfig(frozen=["gate"]), of | {"head": SMALL["w"]}))
    ] == [False, False, False, False, True]


def test_frozen_parameters_do_not_count_in_the_clipped_norm():
    tx = built(
        of=SMALL,
        learning_rate=1.0,
        chain=[{"kind": "clip_by_global_norm", "max_norm": 1.0}, {"kind": "sgd"}],
        frozen=["stack", "norm"],
    )
    updates = train(tx, SMALL, steps=1)[1]
    assert np.linalg.norm(updates["w"]) == pytest.approx(1.0, rel=1e-5)


def matrices(leaf, of):
    """The stacked tensors of a leaf as matrices: layers x rows x columns."""
    return np.asarray(leaf).reshape(
        -1, *(int(np.prod([of.shape[i] for i in factor])) for factor in of.factors)
    )


@pytest.mark.parametrize(
    "kind, by_hand, tolerance",
    [
        ("muon", lambda: optax.contrib.muon(0.1, consistent_rms=0.2), 1e-4),
        ("adafactor", lambda: optax.adafactor(0.1, min_dim_size_to_factor=2), 1e-5),
        (
            "adaptive_grad_clip",
            lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
            1e-5,
        ),
        ("lamb", lambda: optax.lamb(0.1), 1e-5),
        ("galore", lambda: optax.contrib.galore(0.1, rank=2), 1e-3),
    ],
)
def test_stacked_weights_with_heads_are_treated_as_one_matrix_a_layer(kind, by_hand, tolerance):
    mixer = {
        "mixer": {
            "query": INFO["blocks"]["block"]["mixer"]["query"],
            "out": INFO["blocks"]["block"]["mixer"]["out"],
        }
    }
    arguments = {
        "muon": {"consistent_rms": 0.2},
        "adafactor": {"min_dim_size_to_factor": 2},
        "adaptive_grad_clip": {"clipping": 0.01},
        "galore": {"rank": 2},
        "lamb": {},
    }
    chain = [{"kind": kind, **arguments[kind]}] + (
        [{"kind": "sgd"}] if kind == "adaptive_grad_clip" else []
    )
    stacked = train(built(of=mixer, learning_rate=0.1, chain=chain), mixer)[0]
    for name, of in mixer["mixer"].items():
        params = list(matrices(tree(mixer)["mixer"][name], of))
        init, update = jax.jit(by_hand().init), jax.jit(by_hand().update)
        state = [init(layer) for layer in params]
        for step in range(3):
            grads = matrices(tree(mixer, seed=100 + step)["mixer"][name], of)
            for i in range(len(params)):
                updates, state[i] = update(grads[i], state[i], params[i])
                params[i] = params[i] + updates
        np.testing.assert_allclose(
            matrices(stacked["mixer"][name], of), np.stack(params), rtol=tolerance, atol=tolerance
        )


def test_experts_are_a_batch_of_matrices_for_muon():
    of = {"w": info("layers", "expert", "embed", "mlp")}
    moved = train(built(of=of, learning_rate=0.1, chain=[{"kind": "muon"}]), of, steps=1)[1]["w"]
    grads = tree(of, seed=100)["w"]
    one = {"w": info("embed", "mlp")}
    tx = built(of=one, learning_rate=0.1, chain=[{"kind": "muon"}])
    alone = first(tx, {"w": grads[1, 2]}, {"w": jnp.zeros((EMBED, MLP))})
    np.testing.assert_allclose(moved[1, 2], alone["w"], rtol=1e-4, atol=1e-6)


def test_the_number_in_an_item_is_the_peak_of_the_shared_schedule():
    cfg = OptimizerConfig(
        schedule={"kind": "linear", "end_value": 0.0}, chain=[{"kind": "sgd", "learning_rate": 8.0}]
    )
    params, updates, _ = train(build(cfg, 4, SMALL), SMALL, steps=4)
    np.testing.assert_allclose(updates["w"], -2.0 * tree(SMALL, seed=103)["w"], rtol=1e-6)


def test_a_weight_decay_may_follow_a_schedule():
    decay = {"kind": "linear", "init_value": 1.0, "end_value": 0.0}
    tx = built(
        of=SMALL,
        steps=2,
        learning_rate=1.0,
        chain=[{"kind": "add_decayed_weights", "weight_decay": decay}, {"kind": "sgd"}],
    )
    zero, params = jax.tree.map(jnp.zeros_like, tree(SMALL)), tree(SMALL)
    whole, state = tx.update(zero, tx.init(params), params)
    half, _ = tx.update(zero, state, params)
    np.testing.assert_allclose(half["w"], whole["w"] / 2)
    assert np.any(whole["w"]) and not np.any(whole["norm"])
