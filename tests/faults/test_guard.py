"""Poisoned batches in real steps: what is refused, what stays as it was, and what goes on."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from maxstack import optim, run, sharding
from maxstack.faults import guard
from maxstack.kernels.backends import Device
from maxstack.objectives.next_token import NextToken
from maxstack.schema import optimizer
from maxstack.schema.faults import FaultsConfig

MARKS = {"loss": 311, "gradient of one leaf": 312, "norm too large": 313}
ONE_LAYER = tiny.model(layers=1, pattern=["local"])
FSDP_TENSOR = {"data": 2, "fsdp": 2, "tensor": 2}
ADAMW = {
    "learning_rate": 1e-2,
    "ema": {"decay": 0.9},
    "chain": [{"kind": "clip_by_global_norm", "max_norm": 1.0}, {"kind": "adamw"}],
}
honest = NextToken.loss


def poisoned(objective, models, batch):
    """The loss, spoiled as the first token of the batch says."""
    loss, mark = honest(objective, models, batch), batch["tokens"][0, 0]
    marks = [mark == MARKS["loss"], mark == MARKS["norm too large"]]
    scale = jnp.select(marks, [jnp.nan, 1e30], 1.0)
    here = mark == MARKS["gradient of one leaf"]
    root = jnp.sqrt(jnp.where(here, 0.0 * models.policy.norm.scale.get_value().sum(), 1.0))
    return loss._replace(total=loss.total * scale + jnp.where(here, root, 0.0))


@pytest.fixture(scope="module")
def make():
    """Assembles runs with the loss that can be spoiled; it is looked up when the step is traced, so
    for the whole module."""
    patch, runs = pytest.MonkeyPatch(), {}
    patch.setattr(NextToken, "loss", poisoned)

    def made(devices=1, **sections):
        cfg = tiny.config(**{"model": ONE_LAYER, "optimizer": ADAMW} | sections)
        key = cfg.model_dump_json(), devices
        runs[key] = runs.get(key) or run.assemble(
            cfg, sharding.make_mesh(cfg.mesh, jax.devices()[:devices])
        )
        return runs[key]

    yield made
    patch.undo()


def placed(ours, seed, mark=0):
    data = tiny.batch(ours.cfg, seed)
    data["tokens"] = data["tokens"].copy()
    data["tokens"][0, 0] = mark
    return ours.batches.place(data, ours.cfg.train.batch_size)


def numbers(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))]


def assert_same(ours, theirs):
    for a, b in zip(numbers(ours), numbers(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("holds", [True, False])
def test_update_if_selects_a_tree_in_the_old_types(monkeypatch, platform, holds):
    monkeypatch.setattr(guard.Device, "here", lambda: Device(platform, ""))
    old = {"a": jnp.float32(1.5), "b": jnp.int32(2)}
    new = {"a": jnp.bfloat16(jnp.nan), "b": jnp.int32(3)}
    taken = jax.jit(lambda holds: guard.update_if(holds, lambda: new, old))(holds)
    assert_same(taken, {"a": jnp.float32(jnp.nan), "b": new["b"]} if holds else old)
    assert [leaf.dtype for leaf in taken.values()] == [leaf.dtype for leaf in old.values()]


@pytest.mark.slow
def test_a_step_on_a_cpu_copies_nothing_of_the_optimizers_state(make):
    ours = make(1)
    text = ours.lower().compile().as_text()
    assert "state_opt_" in text
    assert not re.findall(r"f32\[[\d,]+\]\S* copy\(%state_opt_\S+", text)


@pytest.mark.parametrize("fault", ["loss", "gradient of one leaf", "norm too large"])
@pytest.mark.parametrize("good", [0, 3], ids=["in the first step", "later"])
@pytest.mark.parametrize(
    ("devices", "sections"),
    [
        (1, {}),
        (1, {"train": {"batch_size": 8, "steps": 20, "accumulate": 2}}),
        (8, {"mesh": FSDP_TENSOR}),
    ],
    ids=["one device", "accumulated", "fsdp and tensor"],
)
def test_a_poisoned_batch_changes_nothing_but_the_step(make, fault, good, devices, sections):
    ours = make(devices, **sections)
    state = ours.init()
    for seed in range(good):
        state, _ = ours.step(state, placed(ours, seed))
    before = jax.device_get(state)
    state, scalars = ours.step(state, placed(ours, 99, MARKS[fault]))
    assert (
        scalars["skipped"] == guard.NOT_FINITE
        and scalars["refused"] == 1
        and not np.isfinite(scalars["grad_norm"])
    )
    assert np.isfinite(scalars["loss"])
    assert_same((state.params, state.opt), (before.params, before.opt))
    assert_same(state.guard, before.guard._replace(refused=1, refused_in_all=1))
    assert state.step == good + 1
    passed = ours.skip_batch(
        jax.device_put(before, jax.tree.map(lambda leaf: leaf.sharding, ours.abstract))
    )
    (after, row), (expected, wanted) = (
        ours.step(begin, placed(ours, 100)) for begin in (state, passed)
    )
    assert (
        row["skipped"] == guard.ACCEPTED
        and row["refused"] == 0
        and all(np.isfinite(leaf).all() for leaf in numbers(after))
    )
    assert_same(
        (after.step, after.params, after.opt, row),
        (expected.step, expected.params, expected.opt, wanted),
    )


def judged(cfg, values):
    """Kinds, and the guard after the last, of (loss, norm) or (loss, norm, weight)."""
    state, kinds, judge = guard.initial(), [], jax.jit(lambda *inputs: guard.judge(cfg, *inputs))
    for loss, norm, *weight in values:
        kind, state = judge(
            state, jnp.float32(loss), jnp.float32(norm), jnp.float32(weight[0] if weight else 1.0)
        )
        kinds.append(int(kind))
    return kinds, state


def test_statistics_cover_accepted_updates_only():
    losses = np.random.default_rng(0).normal(3.0, 0.1, 40)
    cfg, heights = FaultsConfig.model_validate({"spike": {"warm_up": 10}}), np.log(losses**2)
    values = [(loss, loss**2) for loss in losses]
    odd = [(np.inf, np.nan), (1.0, np.inf), (9.0, 9.0), (0.0, 0.0, 0.0)]
    given = [(np.nan, 1.0), *values[:20], *odd, *values[20:], (2.0, 90.0)]
    kinds, state = judged(cfg, given)
    refused = {i: kind for i, kind in enumerate(kinds) if kind}
    assert [*refused] == [0, 21, 22, 23, 45]
    assert [*refused.values()] == [guard.NOT_FINITE] * 3 + [guard.SPIKE] * 2
    for mean, variance, wanted in (
        (state.loss_mean, state.loss_variance, losses),
        (state.norm_mean, state.norm_variance, heights),
    ):
        assert mean == pytest.approx(wanted.mean(), rel=1e-5)
        assert variance == pytest.approx(wanted.var(), rel=1e-4)
    assert (state.updates, state.measured, state.refused, state.refused_in_all) == (41, 40, 1, 5)


def test_nothing_is_a_spike_before_the_warm_up_is_over():
    noise = [(1.0, 1.0), (1.1, 1.1)] * 5
    cfg = FaultsConfig.model_validate({"spike": {"warm_up": 11}})
    assert judged(cfg, [*noise, (50.0, 50.0)])[0][-1] == guard.ACCEPTED
    assert judged(cfg, [*noise, (1.0, 1.0), (50.0, 50.0)])[0][-1] == guard.SPIKE


CHAINS = {
    "muon": {"chain": [{"kind": "muon"}]},
    "noise": {
        "chain": [{"kind": "add_noise", "eta": 0.1, "gamma": 0.5, "key": 0}, {"kind": "sgd"}]
    },
    "several steps": {
        "chain": [{"kind": "MultiSteps", "every_k_schedule": 2, "opt": {"kind": "adamw"}}]
    },
    "schedule-free": {"schedule": None, "chain": [{"kind": "schedule_free_adamw"}]},
    "lookahead": {
        "chain": [
            {
                "kind": "lookahead",
                "fast_optimizer": {"kind": "sgd"},
                "sync_period": 2,
                "slow_step_size": 0.5,
            }
        ]
    },
}


@pytest.mark.parametrize("chain", CHAINS)
def test_any_optimizers_state_is_selected_bit_for_bit(chain):
    params = {"a": jnp.linspace(-1.0, 1.0, 32).reshape(4, 8), "b": jnp.ones(8)}
    info = {
        name: optim.ParamInfo(x.shape, x.dtype, ("embed", "mlp")[-x.ndim :], False)
        for name, x in params.items()
    }
    tx = optax.with_extra_args_support(
        optim.build(optimizer.OptimizerConfig(**{"learning_rate": 0.1} | CHAINS[chain]), 20, info)
    )

    @jax.jit
    def guarded(accepted, state):
        _, after = tx.update(params, state, params, value=jnp.float32(1.0), grad=params)
        return after, guard.where(accepted, after, state)

    state = tx.init(params)
    for _ in range(3):
        made, taken = guarded(jnp.array(True), state)
        _, left = guarded(jnp.array(False), state)
        for a, b in ((taken, made), (left, state)):
            assert jax.tree.structure(a) == jax.tree.structure(b)
            assert [leaf.dtype for leaf in _values(a)] == [leaf.dtype for leaf in _values(b)]
            assert_same(_values(a), _values(b))
        state = taken


def _values(tree):
    keys = [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves(tree)
    ]
    return numbers(keys)
