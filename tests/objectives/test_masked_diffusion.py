"""Masked diffusion: the bound, what it is a sum over, its random numbers, and samples."""

import json

import jax
import numpy as np
import processes
import pytest
import tiny
import trees
from flax import nnx

from maxstack.inference.diffusion import ORDERS, sample
from maxstack.load import load
from maxstack.objectives.objective import Models

MASK = tiny.VOCAB - 1
SGD = {"learning_rate": 1.0, "chain": [{"kind": "sgd"}], "schedule": None}
MESH = {"data": 2, "context": 2, "tensor": 2, "context_kind": "ulysses"}


def config(**changes):
    model = tiny.model(**tiny.ONE_KIND)
    for block in model["blocks"].values():
        block["mixer"] |= {"causal": False}
    objective = {"kind": "masked_diffusion"} | changes.pop("objective", {})
    return tiny.config(**{"model": model, "objective": objective} | changes)


def batch(cfg):
    """Tokens that are never the mask's."""
    rows = tiny.batch(cfg)
    return rows | {name: np.minimum(rows[name], MASK - 1) for name in ("tokens", "targets")}


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.slow
def test_the_loss_is_the_sum_over_hidden_tokens_of_their_cross_entropy_over_t(shift):
    run = tiny.make_run(config(objective={"shift": shift}))
    rows, params = batch(run.cfg), run.init().params
    model = nnx.merge(run.graph, nnx.State(params))
    prepared = run.objective.prepare(rows, jax.random.key(3))
    time, draw = np.asarray(prepared["time"]), np.asarray(prepared["draw"])
    assert sorted(np.floor((time - 1e-3) / (1 - 1e-3) * len(time))) == list(range(len(time)))
    found = run.objective.loss(Models(model), prepared)

    known, segments = rows["mask"] > 0, rows["segments"]
    if shift:
        known[:, 0] = False
        known[:, 1:] &= segments[:, 1:] == segments[:, :-1]
    hidden = known & (draw < time[:, None])
    clean = rows["tokens"] if shift else rows["targets"]
    logits = model.logits(model.hidden(rows | {"tokens": np.where(hidden, MASK, clean)}))
    logits = np.asarray(logits, np.float64)[..., :MASK]  # the mask is never predicted
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    total = 0.0
    for row, column in zip(*np.nonzero(hidden), strict=True):
        state = column - 1 if shift else column
        total -= log_p[row, state, clean[row, column]] / time[row]
    assert float(found.total) == pytest.approx(total, rel=1e-5)
    assert float(found.weight) == known.sum()


@pytest.mark.release
def test_a_step_is_the_same_in_microbatches_and_on_a_mesh():
    whole, *others = (
        stepped(config(train={"accumulate": pieces}, mesh=mesh, optimizer=SGD), devices)
        for pieces, mesh, devices in ((1, {}, 1), (4, {}, 1), (1, MESH, 8))
    )
    for (loss, norm), params in others:
        assert (loss, norm) == pytest.approx(whole[0], rel=1e-5)
        trees.close(params, whole[1], atol=2e-5)


def stepped(cfg, devices):
    """Loss and norm, and the weights after a step."""
    run = tiny.make_run(cfg, devices)
    state, scalars = run.step(run.init(), run.batches.place(batch(cfg), 8))
    return (float(scalars["loss"]), float(scalars["grad_norm"])), state.params


@pytest.mark.slow
def test_evaluation_hides_by_a_rows_content_whatever_batch_it_is_in():
    run = tiny.make_run(config(objective={"eval_times": 2}))
    rows, params = batch(run.cfg), run.init().params
    rows |= {"bytes": rows["mask"]}
    whole = run.eval_step(params, run.batches.place(rows, 8))
    order = np.random.default_rng(0).permutation(8)
    moved = run.eval_step(params, run.batches.place({k: v[order] for k, v in rows.items()}, 8))
    for name, value in whole.items():
        assert float(moved[name]) == pytest.approx(float(value), rel=1e-5), name
    assert 0 < whole["hidden_accuracy/weight"] < 0.3 * whole["weight"]
    untrained = float(whole["nll"] / whole["weight"])
    assert untrained == pytest.approx(np.log(MASK), rel=0.2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.slow
def test_samples_keep_what_is_given_fill_the_rest_and_depend_on_no_mesh(order):
    one, eight = tiny.make_run(config()), tiny.make_run(config(mesh={"fsdp": 8}), 8)
    params = jax.tree.map(np.asarray, one.init().params)
    tokens = np.full((2, 16), 7, np.int32)
    given = np.broadcast_to(np.arange(16) < 3, tokens.shape)
    rows = [
        sample(run, params, tokens, given, steps=5, order=order, temperature=1.0, seed=1)
        for run in (one, eight)
    ]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert (rows[0][:, :3] == 7).all() and (rows[0] < MASK).all()
    assert (rows[0][0] != rows[0][1]).any()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.blocks.local.mixer.causal=true", "set model.blocks.local.mixer.causal=false"),
        ("objective.mask_token=320", "mask_token=320 is not a row of model.vocab=320; use 319"),
        ("objective.mask_token=256", "is an id of data.tokenizer kind bytes; use 257"),
        (
            "model.vocab=257",
            "257 ids beside 1 of objective.kind=masked_diffusion; use model.vocab=258",
        ),
        ("objective.kind=next_token", "use causal: true, or objective.kind=masked_diffusion"),
        ("model.mtp={block: local}", "predicts further tokens"),
    ],
)
def test_a_model_that_the_objective_cannot_be_of_is_refused_by_key(tmp_path, override, says):
    path = tiny.write(tmp_path, config(data=text(tmp_path)))
    with pytest.raises(ValueError, match="causal|mask|mtp") as caught:
        load(path, [override])
    assert says in str(caught.value)


def text(folder):
    """Data of one file."""
    (folder / "a.txt").write_text("some text, and more of it. " * 20)
    return {"sources": [{"kind": "text", "files": [str(folder / "a.txt")]}], "seq_len": 32}


def test_a_model_of_next_tokens_is_not_sampled(tmp_path, maxstack):
    run = tiny.make_run(tiny.config())
    tokens = np.zeros((1, 4), np.int32)
    with pytest.raises(ValueError, match="only a model trained by masked_diffusion"):
        sample(run, None, tokens, tokens > 0, steps=1, order="random", temperature=1.0, seed=0)
    assert "no such folder" in maxstack(f"sample {tmp_path / 'nothing'}", code=1)


@pytest.mark.slow
def test_a_sample_begins_with_the_prompt_as_training_has_it_and_the_run_is_not_scored(
    tmp_path, maxstack
):
    (tmp_path / "prompts.jsonl").write_text('{"text": "ab"}\n')
    run = {"name": "md", "output_dir": str(tmp_path), "tensorboard": False}
    short = {"train": {"steps": 1, "batch_size": 2}, "checkpoint": {"every": 1}}
    cfg = config(data=text(tmp_path), run=run, eval={"every": 0}, **short)
    processes.train(tiny.write(tmp_path, cfg))
    out, trained = tmp_path / "out.jsonl", tmp_path / "md"
    asked = f"sample {trained} --prompt ab --count 1 --length 8"
    maxstack(f"{asked} --out {out}")
    tokens = json.loads(out.read_text())["tokens"]
    assert len(tokens) == 8 and tokens[:2] == [*b"ab"]  # no BOS: targets never hold one
    scores = f"--data {tmp_path}/prompts.jsonl --out {tmp_path}/s.npz"
    for words, says in (
        (f"score {trained} {scores}", "was trained with objective.kind=masked_diffusion"),
        (f"{asked} objective.shift=true", "a trained model's objective cannot be changed"),
        (f"{asked} --temperature nan", "nan is not a number from 0 to 1000"),
        (f"sample {trained}d", "has md; did you mean md?"),
        (f"export {trained} --out {tmp_path}/hf", "cannot be exported"),
        (f"export {trained} --out gs://bucket/hf", "gs://bucket/hf: must be on this machine"),
    ):
        assert says in maxstack(words, code=1)
