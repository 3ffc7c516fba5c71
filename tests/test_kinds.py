"""A mixer and an objective of a test's own (toys.py) go through everything that the built-in ones
do."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import processes
import pytest
import yaml
from forked import Forked

RUN = {
    "run": {"name": "toy", "output_dir": "runs", "tensorboard": False, "virtual_devices": 8},
    "model": {
        "vocab": 64,
        "embed": 32,
        "layers": 2,
        "dtype": "float32",
        "blocks": {
            "block": {
                "mixer": {"kind": "toys:MeanConfig", "heads": 4, "head_dim": 8},
                "mlp": {"kind": "gated", "hidden": 64},
            }
        },
        "remat": {"policy": "save", "names": ["averaged"]},
    },
    "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
    "data": {
        "sources": [
            {
                "kind": "synthetic",
                "documents": 64,
                "length": 40,
                "ragged": True,
                "vocab": 64,
                "holdout": 0.2,
            }
        ],
        "seq_len": 32,
    },
    "objective": {"kind": "toys:NearConfig"},
    "train": {"steps": 60, "batch_size": 8, "accumulate": 2},
    "checkpoint": {"every": 2},
    "eval": {"every": 30},
}


@pytest.fixture
def toys(tmp_path):
    """`maxstack`, in a folder that holds the toys and run.yml."""
    shutil.copy(Path(__file__).with_name("toys.py"), tmp_path)
    (tmp_path / "run.yml").write_text(yaml.safe_dump(RUN))

    def call(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "maxstack.cli", *words]
        return processes.run(command, processes.environment(), code, cwd=tmp_path)

    return call


def losses(folder):
    rows = [row for row in processes.rows(folder) if "loss" in row]
    assert {row["rows"] for row in rows} == {RUN["train"]["batch_size"]}  # counted before the cut
    return {row["step"]: (row["loss"], row["distance"]) for row in rows}


@pytest.mark.release
def test_a_kind_of_each_trains_on_a_mesh_and_resumes_from_a_kill_to_the_same_bits(toys, tmp_path):
    toys("train", "run.yml")
    command = [sys.executable, "-m", "maxstack.cli", "train", "run.yml", "run.name=killed"]
    env, folder = processes.environment(), tmp_path / "runs" / "killed"
    killed = Forked(command, env, Path(os.devnull), cwd=tmp_path)
    while not any(row["step"] >= 3 for row in processes.rows(folder)):
        assert killed.poll() is None, "ended before it was killed"
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    toys("train", "run.yml", "run.name=killed")
    whole = losses(tmp_path / "runs" / "toy")
    assert len(whole) == RUN["train"]["steps"] and losses(folder) == whole
    assert whole[60][1] > whole[20][1] > 0  # away from the weights that the run began with


@pytest.mark.slow
def test_they_give_on_one_device_what_they_give_on_a_mesh_in_microbatches(toys, tmp_path):
    one = ("run.virtual_devices=1", "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1")
    toys("train", "run.yml", "train.steps=3")
    toys("train", "run.yml", "run.name=alone", "train.accumulate=1", "train.steps=3", *one)
    mesh = losses(tmp_path / "runs" / "toy")
    for step, found in losses(tmp_path / "runs" / "alone").items():
        assert found == pytest.approx(mesh[step], rel=2e-4)


@pytest.mark.release
def test_a_reference_beside_adapters_shares_the_base_and_costs_no_more_than_they_do(toys, tmp_path):
    lora = ("lora.rank=2", "lora.targets=[.*value]")
    toys("train", "run.yml", "train.steps=6", "optimizer.learning_rate=0.01", *lora)
    distances = [distance for _, distance in losses(tmp_path / "runs" / "toy").values()]
    assert distances[0] == 0 < distances[-1]
    toys("plan", "run.yml", "--json", "plan.json", *lora)
    state = json.loads((tmp_path / "plan.json").read_text())["memory"]
    assert 0 < state["reference"] < state["parameters"] / 4


@pytest.mark.slow
def test_plan_counts_the_weights_and_flops_that_a_mixer_declares(toys, tmp_path):
    toys("plan", "run.yml", "--json", "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())
    tokens, layers, matrices, each = 8 * 32, 2, 2 * 32 * 32, 6 + 2  # the reference's forward pass
    assert found["flops"]["projections"]["causal"] == each * matrices * layers * tokens
    assert found["flops"]["mean"]["causal"] == pytest.approx(each * 32 * 33 / 2 * layers * tokens)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_a_mixer_is_split_over_the_context_only_where_it_says_so(toys, kind):
    mesh = ("mesh.data=1", "mesh.context=2", f"mesh.context_kind={kind}")
    said = toys("config", "show", "run.yml", *mesh, code=1)
    assert f"(kind toys:MeanConfig) cannot be split by {kind}; use mesh.context=1" in said
