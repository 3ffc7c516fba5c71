"""Terms of the loss beside the cross-entropy: further tokens within a document, routers, and
the selection bias that follows their load."""

import jax
import numpy as np
import pytest
import tiny
import trees
from flax import nnx

from maxstack.models.model import abstract
from maxstack.objectives.objective import Models, objective_of

BLOCK = {"mixer": tiny.ATTENTION | {"kv_heads": 4}, "mlp": {"kind": "gated", "hidden": 32}}
ROUTER = {
    "score": "sigmoid",
    "selection_bias": True,
    "bias_update": 0.25,
    "balance_loss": 0.1,
    "z_loss": 0.01,
}
EXPERTS = BLOCK | {"mlp": tiny.MOE | {"hidden": 16, "router": ROUTER}}


def config(block, train=None, objective=None, more=None, **changes):
    return tiny.config(
        objective=objective or {},
        model={"layers": 1, "pattern": [], "blocks": {"block": block}} | changes,
        train=train or {},
        optimizer={
            "learning_rate": 1.0,
            "chain": [{"kind": "sgd"}],
            "schedule": None,
            **(more or {}),
        },
    )


def further_loss(data, depth, weight):
    """`mtp_loss` of a model whose logits are all zero: each counted token costs ln(vocab), so the
    sum says how many are counted."""
    cfg = config(BLOCK, mtp={"block": "block", "depth": depth, "loss": weight})
    graph, state = abstract(cfg.model)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    loss = objective_of(cfg).loss
    found = jax.jit(lambda state, data: loss(Models(nnx.merge(graph, state)), data))(zeros, data)
    return found.metrics["mtp_loss"]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_further_token_counts_where_it_is_in_the_same_document(depth):
    data, counted = tiny.batch(config(BLOCK)), 0
    for mask, segments in zip(data["mask"], data["segments"], strict=True):
        for k in range(1, depth + 1):
            for t in range(len(mask) - k):
                same = len({*segments[t : t + k + 1]}) == 1
                counted += bool(mask[t : t + k + 1].all() and same)
    wanted = 0.5 / depth * counted * np.log(tiny.VOCAB)
    assert further_loss(data, depth, 0.5) == pytest.approx(wanted, rel=1e-5)


def test_no_further_token_is_predicted_over_the_end_of_a_document_that_is_seen():
    """Documents of one segment, as with data.across_documents: after the second token of each row
    comes the third of another one, whose second token does not follow the first's end."""
    data = tiny.batch(config(BLOCK))
    data |= {"segments": np.ones_like(data["segments"]), "mask": np.ones_like(data["mask"])}
    data["tokens"] = data["tokens"].copy()
    data["tokens"][:, 2] = (data["targets"][:, 1] + 1) % tiny.VOCAB
    counted = 8 * (47 - 1)
    assert further_loss(data, 1, 1.0) == pytest.approx(counted * np.log(tiny.VOCAB), rel=1e-5)


@pytest.mark.slow
def test_a_step_moves_the_selection_bias_towards_balance_and_the_optimizer_leaves_it():
    run = tiny.make_run(config(EXPERTS))
    data, before = tiny.place(run), run.init()

    @jax.jit
    def reports(params, data):
        return run.objective.loss(Models(nnx.merge(run.graph, nnx.State(params))), data).reports

    found = reports(jax.tree.map(np.asarray, before.params), data)
    after, scalars = run.step(before, data)
    ((path, load),) = found.items()
    assert path == ("blocks", "block", "mlp", "load")
    assert load.shape == (1, 4) and load.sum() == 2 * 8 * 48
    bias = np.asarray(after.params["blocks"]["block"]["mlp"]["selection_bias"])
    np.testing.assert_array_equal(bias, 0.25 * np.sign(load.mean(-1, keepdims=True) - load))
    assert scalars["expert_load"] == pytest.approx((load.max(-1) / load.mean(-1)).max())


@pytest.mark.parametrize("patterns", [{"frozen": ["*selection_bias"]}, {"trainable": ["*down"]}])
def test_a_selection_bias_that_is_frozen_never_changes(patterns):
    """By a pattern that names it, and by a list of what is trained without it."""
    run = tiny.make_run(config(EXPERTS, more=patterns))
    data, before = tiny.place(run), run.init()
    start = jax.tree.map(np.asarray, before.params)["blocks"]["block"]["mlp"]
    after = run.step(before, data)[0].params["blocks"]["block"]["mlp"]
    np.testing.assert_array_equal(after["selection_bias"], start["selection_bias"])
    assert (np.asarray(after["down"]) != start["down"]).any()


@pytest.mark.slow
def test_experts_under_accumulation_and_on_a_mesh_are_those_of_one_batch():
    names, found = ("loss", "router_loss", "grad_norm", "expert_load"), []
    for pieces, devices in ((1, 1), (4, 1), (1, 8)):
        run = tiny.make_run(config(EXPERTS, {"accumulate": pieces}), devices)
        state, scalars = run.step(run.init(), tiny.place(run))
        found.append(([float(scalars[name]) for name in names], state.params))
    (figures, params), *others = found
    for other, moved in others:
        assert other == pytest.approx(figures, rel=1e-5)
        trees.close(moved, params, atol=2e-5)


def added(objective, block, **changes):
    """What the model's parts add to the loss of a batch, beside the objective's own."""
    cfg = config(block, objective=objective, **changes)
    data = tiny.batch(cfg)
    ends = (np.diff(data["segments"], append=0) != 0).astype(np.float32)
    some = (np.arange(48) % 7 < 3).astype(np.float32)
    data |= {"ends": ends, "mask": np.maximum(ends, some)}
    made, (graph, state) = objective_of(cfg), abstract(cfg.model)
    state = jax.tree.map(
        lambda leaf: 0.1 * np.random.default_rng(leaf.size).normal(size=leaf.shape), state
    )

    @jax.jit
    def loss(state, data):
        data = made.prepare(data, jax.random.key(0))
        return made.loss(Models(nnx.merge(graph, state)), data | made.factors(data))

    found = loss(state, data)
    return float((found.total - found.metrics["loss"]) / found.weight)


SEQUENCES = {"kind": "sft", "weigh": "sequence"}
PAIRS = {"kind": "preference", "loss": "simpo"}


@pytest.mark.parametrize("objective", [{"kind": "sft"}, SEQUENCES, PAIRS, {"kind": "reward"}])
def test_routers_add_the_same_mean_to_every_objective(objective):
    """Of real tokens, whatever the objective masks, weighs and counts."""
    head = {"head": {"scores": True}} if objective["kind"] == "reward" else {}
    assert added(objective, EXPERTS, **head) == pytest.approx(
        added({"kind": "next_token"}, EXPERTS), rel=1e-4
    )


def test_further_tokens_add_the_same_mean_to_sequences():
    further = {"mtp": {"block": "block", "depth": 1, "loss": 0.5}}
    assert added(SEQUENCES, BLOCK, **further) == pytest.approx(
        added({"kind": "next_token"}, BLOCK, **further), rel=1e-4
    )
