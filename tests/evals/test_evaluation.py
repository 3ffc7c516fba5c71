"""Evaluation by tasks in training, and what is decided by it: real runs."""

import json
import signal
import sys

import asked
import processes
import pytest
from processes import rows, train, write_config

from maxstack.checkpoint import manifest
from maxstack.evals.evaluation import StopEarly
from maxstack.schema.config import StopEarlyConfig
from maxstack.schema.metrics import direction

METRIC = "+tasks/rolling/bits_per_byte"
"""What falls while a model learns, taken for what is to rise."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A configuration with tasks and its folder, and what an uninterrupted run of it said."""
    folder = tmp_path_factory.mktemp("base")
    names = [name for name in asked.write_tasks(folder) if "rolling" in name or "generate" in name]
    config = write_config(
        folder,
        eval={"every": 4, "steps": 1, "tasks": names},
        train={
            "steps": 40,
            "batch_size": 8,
            "stop_early": {"metric": METRIC, "patience": 3},
        },
        checkpoint={"every": 2, "keep": 1, "keep_best": METRIC},
    )
    return config, folder, train(config, "run.name=base")


def bits(folder):
    return {
        row["step"]: row["tasks/rolling/bits_per_byte"] for row in rows(folder, "tasks_seconds")
    }


@pytest.mark.slow
def test_a_run_ends_where_a_metric_gets_no_better_and_keeps_its_best_checkpoint(base):
    _, folder, said = base
    found = bits(folder / "base")
    last = max(found, key=found.__getitem__) + 3 * 4
    assert [*found] == [*range(0, last + 1, 4)] and last < 40
    assert f"stopping at step {last}: tasks/rolling/bits_per_byte has got no better" in said
    assert "done:" in said
    kept = manifest.steps(folder / "base" / "checkpoints")
    saved = {step: value for step, value in found.items() if step}
    assert kept == sorted({max(saved, key=saved.__getitem__), last})
    facts, _ = manifest.read(folder / "base" / "checkpoints" / f"{last}")
    assert facts["evaluated"]["tasks/rolling/bits_per_byte"] == found[last]
    assert facts["eval_loss"] == facts["evaluated"]["eval_loss"]


@pytest.mark.release
def test_a_run_that_ended_early_stays_so_until_it_is_given_more_patience(base):
    config, folder, _ = base
    last = max(bits(folder / "base"))
    assert "nothing left to do: tasks/rolling/bits_per_byte" in train(config, "run.name=base")
    train(config, "run.name=base", "train.stop_early.patience=9", f"train.steps={last + 2}")
    assert rows(folder / "base")[-1]["step"] == last + 2


@pytest.mark.release
def test_a_killed_run_ends_where_the_other_did(base):
    config, folder, _ = base
    given = "run.name=killed", "checkpoint.keep_best=0"
    assert (
        processes.interrupt(config, folder / "killed", 6, signal.SIGKILL, *given) == -signal.SIGKILL
    )
    assert "stopping at step" in train(config, *given)
    found, other = bits(folder / "base"), bits(folder / "killed")
    assert {step: found[step] for step in other} == other


@pytest.mark.slow
def test_a_metric_that_evaluations_do_not_give_is_named_before_the_first_step(base):
    config, _, _ = base
    for metric, says in (
        ("tasks/roling/bits_per_byte", "did you mean tasks/rolling/bits_per_byte?"),
        ("eval_accuracy", "evaluations give no eval_accuracy; they give eval_loss"),
    ):
        said = train(config, "run.name=odd", f"checkpoint.keep_best={metric}", code=1)
        assert f"checkpoint.keep_best: no {metric}" in said or "give no" in said
        assert says in said


@pytest.mark.parametrize(
    ("metric", "sign"),
    {
        "eval_loss": -1,
        "eval_bits_per_byte": -1,
        "eval_accuracy": 1,
        "tasks/a/acc_norm": 1,
        "tasks/a/exact_match,strict": 1,
        "tasks/a/word_perplexity": -1,
        "tasks/a/acc_stderr": 0,
        "eval_reward": 1,
        "eval_reward/format": 1,
        "eval_length": 0,
        "-eval_length": -1,
        "+eval_length": 1,
    }.items(),
)
def test_names_of_metrics_say_which_way_is_better(metric, sign):
    assert direction(metric) == sign


def test_early_stopping_goes_on_where_a_checkpoint_left_it():
    cfg = StopEarlyConfig(metric="eval_accuracy", patience=2, min_delta=0.1)
    figures = [0.5, 0.55, 0.7, 0.79, 0.75]
    whole = StopEarly(cfg, {})
    said = [whole.read(step, {"eval_accuracy": value}) for step, value in enumerate(figures)]
    assert [bool(each) for each in said] == [False] * 4 + [True]
    assert "eval_accuracy has got no better than 0.7 of step 2 by more than 0.1 in 2" in said[-1]
    first = StopEarly(cfg, {})
    for step, value in enumerate(figures[:4]):
        first.read(step, {"eval_accuracy": value})
    saved = json.loads(json.dumps(first.to_json()))
    assert StopEarly(cfg, saved).read(4, {"eval_accuracy": 0.75}) and not first.over


@pytest.mark.release
def test_eight_devices_and_two_processes_score_tasks_in_training_as_one_device_does(tmp_path):
    names = [name for name in asked.write_tasks(tmp_path) if "generate" not in name]
    config = write_config(
        tmp_path,
        eval={"every": 2, "steps": 1, "tasks": names},
        train={"steps": 2, "batch_size": 8},
    )
    environment = processes.environment() | {"XDG_STATE_HOME": f"{tmp_path}/state"}
    eight = "run.virtual_devices=8", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"
    spread = "run.virtual_devices=2", "mesh.data=1", "mesh.fsdp=-1"
    several = "--target", "local", "--processes", "2"
    found = {}
    for name, words in (
        ("one", ["train", str(config)]),
        ("eight", ["train", str(config), *eight]),
        ("two", ["submit", str(config), *several, *spread]),
    ):
        command = [sys.executable, "-m", "maxstack.cli", *words, f"run.name={name}"]
        processes.run(command, environment)
        found[name] = rows(tmp_path / name, "tasks_seconds")
    assert len(found["one"]) == 2
    for other in ("eight", "two"):
        for ours, theirs in zip(found["one"], found[other], strict=True):
            for key in ours.keys() - {"tasks_seconds"}:
                assert theirs[key] == pytest.approx(ours[key], rel=1e-5), f"{other} {key}"
