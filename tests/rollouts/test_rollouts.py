"""Rollouts of real runs: what is sampled depends on seed, weights and prompts alone, and the step
that learns from it gives the same numbers on any mesh."""

import contextlib
from pathlib import Path

import jax
import numpy as np
import pytest
import tiers
import tiny

from maxstack import startup
from maxstack.errors import DataError

SGD = {"learning_rate": 0.3, "chain": [{"kind": "sgd"}], "schedule": None}
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
COUNTED = {"kind": "function", "call": "letters:vowels"}
KINDS = {
    "grpo": {},
    "gspo in two epochs": {
        "objective": {"loss": {"ratio": "sequence"}, "kl": {"weight": 0.1}},
        "rollout": {"prompts": 16, "minibatches": 2, "epochs": 2},
    },
    "ppo": {
        "objective": {
            "aggregate": "token",
            "advantage": {"baseline": "value", "scale": "none", "whiten": True},
            "kl": {"weight": 0.05, "estimate": "k1", "where": "reward"},
            "entropy": 0.01,
        },
    },
    "ppo in two epochs": {
        "objective": {
            "aggregate": "token",
            "advantage": {"baseline": "value", "scale": "none", "whiten": True},
        },
        "rollout": {"epochs": 2},
    },
    "rloo, one rollout behind": {
        "objective": {
            "loss": {"ratio": "product"},
            "advantage": {"baseline": "others", "scale": "none"},
            "kl": {"weight": 0.05, "estimate": "k1", "where": "return"},
            "correction": {"high": 2.0},
        },
        "rollout": {"ahead": 1, "temperature": 0.7},
    },
    "distillation on its own samples": {
        "objective": {"distil": 1.0, "aggregate": "token"},
        "teacher": tiny.model(**tiny.ONE_KIND | {"layers": 1}),
        "rewards": [],
    },
}
TRAINED = [name for name in KINDS if name != "ppo"]  # the same in two epochs is more


@pytest.fixture(autouse=True)
def _letters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)


def config(name, **changes):
    """A tiny run whose reward has signal from random weights on."""
    sections = {"rewards": [COUNTED], "train": {"batch_size": 8}, "optimizer": SGD} | KINDS[name]
    for key, value in changes.items():
        sections[key] = sections.get(key, {}) | value
    return tiny.with_rollouts(**sections)


def played(cfg, folder, devices=1, steps=3):
    """The scalars of the first steps, and the batches."""
    run, found, batches = tiny.make_run(cfg, devices), [], []
    frozen = startup.frozen_weights(run)
    with contextlib.ExitStack() as ending:
        feed, _ = startup.open_feed(run, folder, ending)
        state = run.init()
        for _ in range(steps):
            feed.refresh(state, frozen)
            batch = next(feed)
            batches.append(batch)
            placed = run.batches.place(batch, cfg.train.batch_size)
            state, scalars = run.step(state, placed, *frozen)
            figures = feed.metrics() | {name: float(value) for name, value in scalars.items()}
            found.append({k: v for k, v in figures.items() if not k.endswith(("seconds", "wait"))})
    return found, batches


def test_records_without_prompts_are_told_before_anything_is_compiled(tmp_path):
    (tmp_path / "wrong.jsonl").write_text('{"text": "a"}\n')
    source = {"kind": "jsonl", "files": ["wrong.jsonl"], "record": {"kind": "prompts"}}
    run = tiny.make_run(config("grpo", data={"sources": [source]}))
    with contextlib.ExitStack() as ending, pytest.raises(DataError, match="wrong.jsonl: line 1"):
        startup.open_feed(run, tmp_path, ending)


@pytest.mark.parametrize("name", tiers.of(TRAINED, slow=["grpo"]))
def test_devices_and_microbatches_change_nothing(name, tmp_path):
    """The same samples in microbatches on eight devices, and losses within 1e-5."""
    alone, rows = played(config(name), tmp_path)
    assert all(row["grad_norm"] > 0 for row in alone)
    spread = config(name, train={"accumulate": 2}, mesh=MESH)
    others, again = played(spread, tmp_path, 8)
    for one, other in zip(rows, again, strict=True):
        for key in ("tokens", "targets", "segments", "mask", "group", "reward"):
            np.testing.assert_array_equal(one[key], other[key])
        np.testing.assert_allclose(one["sampler"], other["sampler"], rtol=3e-6, atol=1e-5)
    for one, other in zip(alone, others, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_engine_and_trainer_agree_on_every_sampled_token(tmp_path):
    """In float32, at another temperature than 1, where the logits have a cap: to 1e-5 for each
    token; the metric shows it."""
    model = tiny.model(head={"soft_cap": 5.0})
    cfg = config("grpo", model=model, rollout={"temperature": 0.6, "epochs": 2})
    found, batches = played(cfg, tmp_path, steps=1)
    batch = batches[0]
    gap = np.abs(batch["old_logps"] - batch["sampler"]) * batch["mask"]
    assert 0 < batch["mask"].sum() and gap.max() < 1e-5
    assert found[0]["sampler/difference"] == pytest.approx(
        gap.sum() / batch["mask"].sum(), abs=1e-7
    )


@pytest.mark.release
def test_samples_depend_on_the_seed_only(tmp_path):
    """Fewer requests at a time, and rows of a step: the same samples to the bit; another seed:
    others."""
    _, (usual,) = played(config("grpo"), tmp_path, steps=1)
    few = config("grpo", serve={"max_requests": 3, "rows": 16})
    _, (narrow,) = played(few, tmp_path, steps=1)
    _, (other,) = played(config("grpo", train={"seed": 1}), tmp_path, steps=1)
    for key in usual:
        np.testing.assert_array_equal(usual[key], narrow[key])
    assert (usual["tokens"] != other["tokens"]).any()


@pytest.mark.release
def test_weights_that_move_are_counted_and_change_no_sample(tmp_path):
    """rollout.tensor: the engine has a mesh of its own."""
    _, (usual,) = played(config("grpo", mesh=MESH), tmp_path, 8, steps=1)
    cfg = config("grpo", mesh=MESH, rollout={"tensor": 1})
    _, (moved,) = played(cfg, tmp_path, 8, steps=1)
    np.testing.assert_array_equal(usual["tokens"], moved["tokens"])
    with contextlib.ExitStack() as ending:
        feed, maker = startup.open_feed(tiny.make_run(cfg, 8), tmp_path, ending)
        run = tiny.make_run(cfg, 8)
        held = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(run.init().params)
            for shard in leaf.addressable_shards
        )
        whole = 8 * sum(leaf.nbytes for leaf in jax.tree.leaves(run.init().params))
        assert maker.generator.moved == whole - held
        assert any("MiB of weights move" in line for line in feed.describe())


@pytest.mark.release
def test_adapters_learn_on_a_quantized_base(tmp_path):
    """GRPO with LoRA: the reference is the model without its adapter, whose distance is 0 at the
    first step; and the engine answers as the trainer does."""
    objective = {"kl": {"weight": 0.1}, "reference": "adapter_off"}
    cfg = config(
        "grpo",
        objective=objective,
        lora={"rank": 2},
        quantization={
            "mode": "ptq",
            "rules": [{"module_path": ".*/(mixer|mlp)/.*", "weight_qtype": "nf4", "tile_size": 32}],
        },
    )
    found, _ = played(cfg, tmp_path)
    assert found[0]["kl"] == pytest.approx(0, abs=1e-6) and found[-1]["kl"] > 0
    assert all(row["sampler/difference"] < 1e-4 for row in found)
