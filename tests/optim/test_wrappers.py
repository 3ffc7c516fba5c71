"""Lookahead, accumulation, averages of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_trees import SMALL, built, first, of_whole, train, tree

from maxstack.optim import build, ema_params, eval_params
from maxstack.schema.optimizer import EmaConfig, OptimizerConfig


def close(left, right, **tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **({"rtol": 1e-6, "atol": 1e-6} | tolerance)),
        left,
        right,
    )


@pytest.mark.parametrize("steps, reset_state", [(2, False), (3, True), (7, False), (7, True)])
def test_lookahead_has_the_fast_and_slow_weights_of_optax(steps, reset_state):
    arguments = {"sync_period": 3, "slow_step_size": 0.5, "reset_state": reset_state}
    cfg = OptimizerConfig(
        learning_rate=0.1,
        schedule=None,
        chain=[{"kind": "lookahead", "inner": [{"kind": "adam"}], **arguments}],
    )
    fast, _, state = train(build(cfg, 10, SMALL), SMALL, steps)
    by_hand = optax.lookahead(optax.adam(0.1), **arguments)
    pair = optax.LookaheadParams.init_synced(tree(SMALL))
    hand_state = by_hand.init(pair)
    for step in range(steps):
        updates, hand_state = by_hand.update(tree(SMALL, seed=100 + step), hand_state, pair)
        pair = optax.apply_updates(pair, updates)
    close(fast, pair.fast)
    close(eval_params(cfg, state, fast), pair.slow)


def test_multisteps_updates_once_with_the_mean_gradient():
    tx = built(
        of=SMALL,
        learning_rate=0.1,
        chain=[{"kind": "MultiSteps", "every_k_schedule": 3, "inner": [{"kind": "sgd"}]}],
    )
    two, three = train(tx, SMALL, 2)[0], train(tx, SMALL, 3)[0]
    mean = jax.tree.map(
        lambda *grads: sum(grads) / 3, *(tree(SMALL, seed=100 + step) for step in range(3))
    )
    close(two, tree(SMALL))
    close(three, jax.tree.map(lambda p, g: p - 0.1 * g, tree(SMALL), mean))


def test_multisteps_can_skip_gradients_that_are_not_finite():
    chain = [
        {
            "kind": "MultiSteps",
            "every_k_schedule": 1,
            "inner": [{"kind": "sgd"}],
            "should_skip_update_fn": "skip_not_finite",
        }
    ]
    tx, params = built(of=SMALL, learning_rate=0.1, chain=chain), tree(SMALL)
    updates = first(tx, jax.tree.map(lambda p: p * jnp.nan, params), params)
    close(updates, jax.tree.map(jnp.zeros_like, params))


def test_the_average_of_the_weights_follows_its_formula_from_its_start_on():
    cfg = OptimizerConfig(
        learning_rate=0.1,
        schedule=None,
        chain=[{"kind": "sgd"}],
        ema=EmaConfig(decay=0.9, start="20%"),
    )
    tx, params = build(cfg, 10, SMALL), tree(SMALL)
    state, update, expected = tx.init(params), jax.jit(tx.update), params
    for step in range(5):
        updates, state = update(tree(SMALL, seed=step), state, params)
        params = optax.apply_updates(params, updates)
        expected = (
            params if step < 2 else jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, expected, params)
        )
        close(ema_params(state, params), expected)
    close(eval_params(cfg, state, params), expected)


def test_evaluation_uses_the_weights_themselves_when_asked_or_when_there_is_no_average():
    for ema in (None, EmaConfig(decay=0.9, eval=False)):
        cfg = OptimizerConfig(ema=ema, schedule=None, chain=[{"kind": "sgd"}])
        params, _, state = train(build(cfg, 10, SMALL), SMALL)
        close(eval_params(cfg, state, params), params, rtol=0, atol=0)
    assert ema_params(built(of=SMALL).init(params), params) is None


def test_the_average_fills_in_frozen_parameters():
    params, _, state = train(
        built(of=SMALL, learning_rate=0.1, frozen=["norm"], ema={"decay": 0.5}), SMALL
    )
    average = ema_params(state, params)
    assert np.array_equal(average["norm"], params["norm"]) and not np.allclose(
        average["w"], params["w"]
    )


@pytest.mark.parametrize("frozen", [None, ["norm"]])
def test_schedule_free_is_evaluated_at_its_mean(frozen):
    cfg = OptimizerConfig(
        learning_rate=0.1, schedule=None, frozen=frozen, chain=[{"kind": "schedule_free_sgd"}]
    )
    params, _, state = train(of_whole(cfg, 10, SMALL), SMALL)
    by_hand = optax.contrib.schedule_free_sgd(0.1)
    expected, hand_state = tree(SMALL), by_hand.init(tree(SMALL))
    for step in range(3):
        updates, hand_state = by_hand.update(tree(SMALL, seed=100 + step), hand_state, expected)
        expected = optax.apply_updates(expected, updates)
    mean = optax.contrib.schedule_free_eval_params(hand_state, expected)
    got = eval_params(cfg, state, params)
    close(
        {name: got[name] for name in ("w", "stack")}, {name: mean[name] for name in ("w", "stack")}
    )
    close(got["norm"], mean["norm"] if frozen is None else tree(SMALL)["norm"])
