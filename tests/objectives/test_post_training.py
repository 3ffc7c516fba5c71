"""Objectives of post-training on real rows: their gradients, and that neither microbatches, nor
devices, nor packing, nor the kind of reference change them."""

import contextlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
import tiny
from flax import nnx

from maxstack import startup
from maxstack.data.feed import Feed
from maxstack.meter import Meter
from maxstack.objectives.objective import Models

PEOPLE = "maxstack.data.people"
SGD = {"learning_rate": 0.3, "chain": [{"kind": "sgd"}], "schedule": None}
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
RING = {"context": 4, "data": 2}
AROUND_A_RING = "sft of sequences", "kto", "distill"
RECORDS = {
    "sft": "chat",
    "preference": "pairs",
    "unpaired": "labelled",
    "reward": "pairs",
    "distill": "chat",
}
KINDS = {
    "sft": {"kind": "sft"},
    "sft of sequences": {"kind": "sft", "weigh": "sequence", "dft": True, "statistics": True},
    "dpo": {"kind": "preference"},
    "sum": {"kind": "preference", "loss": {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1}},
    "wpo": {"kind": "preference", "weigh": True, "desensitize": 0.5},
    "aot": {"kind": "preference", "loss": "aot"},
    "orpo": {"kind": "preference", "loss": {"orpo": 1, "sft": 1}, "sft_on": "sequence"},
    "kto": {"kind": "unpaired"},
    "bco": {"kind": "unpaired", "loss": "bco"},
    "reward": {"kind": "reward", "centre": 0.01},
    "distill": {"kind": "distill", "next_token": 0.5},
}


def config(objective, **changes):
    """A tiny model on made-up people, several records in a row."""
    record = RECORDS[objective["kind"]]
    model = tiny.model(**tiny.ONE_KIND, head={"scores": objective["kind"] == "reward"})
    source = {"kind": "function", "documents": 64, "holdout": 0.25}
    source |= {"call": f"{PEOPLE}:{record}", "record": {"kind": record}}
    data = {"tokenizer": {"kind": "bytes"}, "template": "plain", "packing": "fit", "seq_len": 96}
    data |= {"sources": [source]} | changes.pop("data", {})
    teacher = {"teacher": model | {"layers": 1}} if objective["kind"] == "distill" else {}
    sections = {"model": model, "data": data, "objective": objective, "optimizer": SGD}
    return tiny.config(**sections | teacher | changes)


def losses(cfg, devices=1, steps=3):
    """The scalars of the first steps."""
    run, size = tiny.make_run(cfg, devices), cfg.train.batch_size
    state, beside, found = run.init(), startup.frozen_weights(run), []
    feed = Feed(cfg.data, range(size), size, fields=run.objective.fields)
    with contextlib.closing(feed):
        for _ in range(steps):
            batch = run.batches.place(next(feed), size)
            state, scalars = run.step(state, batch, *beside)
            found.append({name: float(value) for name, value in scalars.items()})
    return found


def first_batch(run):
    """A batch of a run's feed, before it is placed."""
    with contextlib.closing(Feed(run.cfg.data, range(8), 8, fields=run.objective.fields)) as feed:
        return next(feed)


def placed(run):
    return run.batches.place(first_batch(run), 8)


def same(first, second, tolerance=1e-5):
    for one, other in zip(first, second, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(
    ("name", "mesh"),
    tiers.of(
        [*((name, MESH) for name in KINDS), *((name, RING) for name in AROUND_A_RING)],
        ("kto", MESH),
        slow=[("sft of sequences", MESH), ("reward", MESH), ("sft of sequences", RING)],
    ),
)
def test_microbatches_and_devices_change_nothing(name, mesh):
    """Losses, norms of gradients and metrics of three steps."""
    alone = losses(config(KINDS[name]))
    assert all(row["grad_norm"] > 0 for row in alone)
    pieces = {"accumulate": 1 if mesh is RING else 2}
    same(losses(config(KINDS[name], train=pieces, mesh=mesh), 8), alone)


def test_a_batch_without_answers_of_a_kind_has_no_figure_of_them():
    """It is not 0, which a reward may be."""
    run = tiny.make_run(config(KINDS["kto"]))
    with contextlib.closing(Feed(run.cfg.data, range(8), 8, fields=run.objective.fields)) as feed:
        batch = next(feed)
        meter = Meter(run, feed)
        placed = run.batches.place({**batch, "label": np.abs(batch["label"])}, 8)
        meter.add(1, run.step(run.init(), placed, *startup.frozen_weights(run))[1])
        row = meter.flush()
    assert {"rewards/chosen", "logps/chosen", "kl", "grad_norm"} <= {*row}
    assert not [name for name in row if "rejected" in name or "weight" in name]


@pytest.mark.parametrize("name", ["sft", "sft of sequences"])
@pytest.mark.slow
def test_messages_of_the_same_small_weight_are_as_those_of_weight_one(name):
    """Losses are means by weight, however small the weights of a batch are in all."""
    run, found = tiny.make_run(config(KINDS[name])), []
    batch = first_batch(run)
    for weight in (1.0, 2.0**-12):
        placed = run.batches.place({**batch, "mask": batch["mask"] * np.float32(weight)}, 8)
        _, scalars = run.step(run.init(), placed)
        means = [name for name in scalars if "weight" not in name]
        found.append({name: float(scalars[name]) for name in means})
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("name", ["sft", "sft of sequences", "dpo", "wpo", "reward", "distill"])
@pytest.mark.slow
def test_packing_changes_no_sum(name):
    """Over all held-out records, of losses that are sums over them: others are means over a
    batch."""
    found = []
    for packing in ("fit", "none"):
        cfg = config(KINDS[name], data={"packing": packing})
        run, size = tiny.make_run(cfg), cfg.train.batch_size
        params, beside, sums = run.init().params, startup.frozen_weights(run), Counter()
        feed = Feed(cfg.data, range(size), size, evaluation=True, fields=run.objective.fields)
        with contextlib.closing(feed):
            while (batch := next(feed))["segments"].any():
                scalars = run.eval_step(params, run.batches.place(batch, size), *beside)
                sums.update(jax.tree.map(float, scalars))
        found.append(sums)
    first, second = found
    assert first["weight"] > 0 and first == pytest.approx(second, rel=2e-5)


@pytest.mark.parametrize("name", tiers.of(["dpo", "sum", "wpo", "orpo", "kto"], "kto"))
@pytest.mark.slow
def test_the_gradient_is_that_of_the_loss_by_logits(name):
    """Weights of a linear cross-entropy stand for the derivative of the loss."""
    run = tiny.make_run(config(KINDS[name]))
    params, objective = run.init().params, run.objective
    changed = jax.tree.map(lambda x: x * 1.1, params)
    batch = objective.prepare(placed(run), jax.random.key(0))

    def model(params):
        return nnx.merge(run.graph, nnx.State(params))

    def ours(params):
        frozen = {"reference": model(changed)} if objective.frozen else {}
        return objective.loss(Models(model(params), frozen), batch).total

    def logps(params):
        logits_BTV = model(params).logits(model(params).hidden(batch))
        logps_BTV = jax.nn.log_softmax(logits_BTV)
        picked = jnp.take_along_axis(logps_BTV, batch["targets"][..., None], -1)[..., 0]
        sharpness = jax.nn.logsumexp(2 * logps_BTV, axis=-1)
        return picked * (batch["segments"] > 0), jax.lax.stop_gradient(sharpness)

    def direct(params):
        (own, sharpness), (other, _) = logps(params), logps(changed)
        known = {"logps": own, "sharpness": sharpness, "reference_logps": other}
        return objective.terms({**batch, **known}).total.sum()

    (value, gradient), (wanted, expected) = (
        jax.jit(jax.value_and_grad(f))(params) for f in (ours, direct)
    )
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * float(jnp.abs(other).max()) + 1e-7)


@pytest.mark.parametrize(
    ("name", "dora"),
    tiers.of(
        [("dpo", True), ("kto", False), ("dpo", False), ("kto", True)],
        slow=[("kto", False)],
    ),
)
def test_a_reference_by_switching_the_adapter_off_is_the_one_that_is_kept(name, dora):
    lora = {"rank": 2, "dora": dora}
    rows = [
        losses(config(KINDS[name] | {"reference": reference}, lora=lora))
        for reference in ("start", "adapter_off")
    ]
    for row in (*rows[0], *rows[1]):
        row.pop("rewards/accuracies", None)  # at first all rewards are 0, but for rounding
    same(*rows)
    assert rows[0][0]["loss"] != rows[0][-1]["loss"]


@pytest.mark.slow
def test_a_score_is_trained_beside_adapters():
    cfg = config(KINDS["reward"], lora={"rank": 2})
    run = tiny.make_run(cfg)
    assert run.changed["score"] and not run.changed["norm"]["scale"]
    assert losses(cfg)[0]["grad_norm"] > 0


@pytest.mark.slow
def test_noise_of_embeddings_is_the_same_in_any_microbatch_and_none_in_evaluation():
    noisy = {"kind": "sft", "neftune": 5.0}
    alone = losses(config(noisy))
    same(losses(config(noisy, train={"accumulate": 4})), alone)
    assert abs(alone[0]["loss"] - losses(config(KINDS["sft"]))[0]["loss"]) > 1e-4
    run = tiny.make_run(config(noisy))
    batch = placed(run)
    params = run.init().params
    plain = tiny.make_run(config(KINDS["sft"]))
    assert float(run.eval_step(params, batch)["nll"]) == pytest.approx(
        float(plain.eval_step(params, batch)["nll"])
    )


def test_statistics_are_those_of_the_whole_distribution():
    run = tiny.make_run(config(KINDS["sft"]))
    batch = placed(run)
    params = run.init().params
    model = nnx.merge(run.graph, nnx.State(params))
    logits = np.asarray(model.logits(model.hidden(batch)), np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    mask = np.asarray(batch["mask"])
    found = run.eval_step(params, batch)
    assert float(found["entropy"]) == pytest.approx((-(p * np.log(p)).sum(-1) * mask).sum(), 1e-5)
    right = (logits.argmax(-1) == np.asarray(batch["targets"])) * mask
    assert float(found["token_accuracy"]) == right.sum()
    assert float(found["entropy/weight"]) == mask.sum()
