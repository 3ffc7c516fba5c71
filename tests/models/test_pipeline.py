"""Pipelines over the stages of a mesh: the schedule, where weights go, what is kept, and the
numbers of one device."""

import jax
import numpy as np
import pytest
import tiny
import trees
from flax import nnx

from maxstack import sharding
from maxstack.models import pipeline
from maxstack.objectives.objective import Models
from maxstack.startup import introduce

GRID = [
    (1, 1),
    (2, 1),
    (2, 2),
    (3, 2),
    (2, 3),
    (4, 2),
    (4, 4),
    (4, 6),
    (6, 4),
    (5, 7),
    (8, 3),
    (16, 8),
]
ATTENTION = {"kind": "attention", "heads": 2, "head_dim": 8, "backend": "reference"}
MLP, MOE = (
    {"kind": "gated", "hidden": 32},
    {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 16, "router": {"balance_loss": 0.1}},
)
TABLE = {"rules": {"vocab": ["tensor", "fsdp", "expert", "stage"]}}


def model(layers, pattern, blocks, **changes):
    return tiny.model(embed=16, layers=layers, pattern=pattern, blocks=blocks, **changes)


DENSE = model(8, ["a"], {"a": {"mixer": ATTENTION, "mlp": MLP}})
MIXED = model(
    10,
    ["b", "a"],
    {
        "a": {"mixer": ATTENTION | {"window": 4}, "mlp": MOE},
        "b": {"mixer": ATTENTION | {"share_kv": "p"}, "mlp": MLP},
        "p": {"mixer": ATTENTION, "mlp": MLP},
    },
    prefix=["p"],
    per_layer={"vocab": tiny.VOCAB, "size": 4},
)
MESH = {"stage": 2, "rounds": 2, "microbatches": 4, "data": 2, "expert": 2}


def run_of(spec, mesh, devices):
    sizes = {"train": {"batch_size": 16}, "data": {"seq_len": 8}, "objective": {"z_loss": 1e-3}}
    return tiny.make_run(tiny.config(model=spec, mesh=mesh | TABLE, **sizes), devices)


def total(run):
    """(weights, batch) -> (loss, everything the loss is made of)."""

    def of(params, batch):
        with sharding.use(run.mesh, run.cfg.mesh):
            loss = run.objective.loss(Models(nnx.merge(run.graph, nnx.State(params))), batch)
        return loss.total, loss

    return of


def loss_and_gradients(run):
    """Loss and gradients of drawn weights and packed rows, as numpy."""
    rng, weights = np.random.default_rng(0), run.abstract.params
    shardings = jax.tree.map(lambda leaf: leaf.sharding, weights)
    drawn = jax.tree.map(lambda leaf: rng.normal(0.0, 0.2, leaf.shape).astype(leaf.dtype), weights)
    compute = jax.jit(jax.value_and_grad(total(run), has_aux=True), out_shardings=(None, shardings))
    found = compute(jax.device_put(drawn, shardings), tiny.place(run))
    return jax.tree.map(np.asarray, found)


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_one_device_and_nothing_is_rematerialized(capfd):
    """Of a model with experts, shared keys and embeddings for every layer, in two rounds;
    tests/test_meshes.py has other meshes with stages."""
    ours, theirs = (loss_and_gradients(run_of(MIXED, *on)) for on in ((MESH, 8), ({}, 1)))
    for (path, got), wanted in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        name, most = jax.tree_util.keystr(path), np.abs(wanted).max()
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * most, err_msg=name)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def kept(policy, rounds):
    """Shapes of the floats that a forward pass keeps of every period that a stage does."""
    mesh = {"stage": 4, "data": 2, "rounds": rounds, "microbatches": 8}
    run = run_of(DENSE | {"layers": 16, "remat": policy}, mesh, 8)
    periods = pipeline.ticks(4, rounds, 8) * 4 // rounds
    gradient = jax.make_jaxpr(jax.grad(total(run), has_aux=True))
    found = []
    for each in trees.equations(gradient(run.abstract.params, run.batches.abstract()).jaxpr):
        if each.primitive.name == "scan" and each.params["length"] == periods:
            outs = [out.aval for out in each.outvars if out.aval.dtype == np.float32]
            found += [out.shape[1:] for out in outs if out.shape[:1] == (periods,)]
    return found


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.slow
def test_a_stage_keeps_what_the_policy_says_and_no_copy_of_weights(rounds):
    assert kept({"policy": "full"}, rounds) == [(1, 8, 16)]
    assert {shape[:2] for shape in kept({"policy": "none"}, rounds) if len(shape) > 2} == {
        (1, 8),
        (1, 2),
    }


@pytest.mark.parametrize(("stages", "rounds"), GRID)
def test_every_chunk_of_weights_comes_to_its_stage_in_as_many_moves_as_rounds(stages, rounds):
    permutations, sent, kept = pipeline.moves(stages, rounds)
    assert len(permutations) == rounds
    held = [[*range(s * rounds, (s + 1) * rounds)] for s in range(stages)]
    came = {}
    for move, targets in enumerate(permutations):
        assert sorted(targets) == [*range(stages)]
        came |= {(target, move): held[s][sent[s, move]] for s, target in enumerate(targets)}
    assert {(s, v): came[s, kept[s, v]] for s in range(stages) for v in range(rounds)} == {
        (s, v): v * stages + s for s in range(stages) for v in range(rounds)
    }


@pytest.mark.parametrize(("stages", "rounds"), GRID)
@pytest.mark.parametrize("groups", [1, 3])
def test_the_bubble_is_that_of_a_simulated_schedule(stages, rounds, groups):
    work, free, done = groups * stages * rounds, [0] * stages, {}
    for step in range(
        work
    ):  # each stage takes its tasks in order, as soon as it and the microbatch are free
        group, turn, member = pipeline.work_at(step, stages, rounds)
        for stage in range(stages):
            chunk = turn * stages + stage
            begin = max(free[stage], done.get((group, member, chunk - 1), 0))
            assert begin == step + stage and (chunk == 0 or (group, member, chunk - 1) in done)
            free[stage] = done[group, member, chunk] = begin + 1
    assert len(done) == work * stages
    assert max(free) == pipeline.ticks(stages, rounds, groups * stages)
    assert pipeline.bubble(stages, rounds, groups * stages) == pytest.approx(1 - work / max(free))


def test_a_run_says_how_much_its_stages_idle():
    said = []
    introduce(
        run_of(DENSE, {"stage": 4, "data": 2, "microbatches": 8}, 8),
        [],
        type("Log", (), {"say": said.append}),
    )
    assert any("4 stages, a bubble of 27.3%" in line for line in said)  # 3 of 11
