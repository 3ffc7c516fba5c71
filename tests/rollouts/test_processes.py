"""Rollouts of several processes: each answers its share of the prompts on its own devices."""

import json
import os
import sys
from pathlib import Path

import processes
import pytest
import tiny

from maxstack.config import dump


@pytest.mark.release
def test_two_processes_sample_what_one_does(tmp_path):
    """Rewards and lengths are those of all samples, losses and norms agree to 1e-5, and both
    processes evaluate."""
    cfg = tiny.with_rollouts(
        rewards=[{"kind": "function", "call": "letters:vowels"}],
        mesh={"data": 1, "fsdp": -1},
        train={"steps": 2, "batch_size": 8},
        eval={"every": 2, "steps": 1, "baselines": False},
        run={
            "output_dir": str(tmp_path),
            "tensorboard": False,
            "virtual_devices": 2,
            "compilation_cache": processes.COMPILED or None,
        },
    )
    (tmp_path / "rl.yml").write_text(dump(cfg))
    environment = processes.environment() | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path.cwd())]),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    several = ["--target", "local", "--processes", "2"]
    for name, words in (("one", ["train"]), ("two", ["submit"])):
        command = [sys.executable, "-m", "maxstack.cli", *words, str(tmp_path / "rl.yml")]
        command += [f"run.name={name}", *(several if name == "two" else [])]
        processes.run(command, environment)
    figures = {"reward", "length", "loss", "grad_norm", "eval_reward", "entropy"}
    one, two = (
        [  # goodput has rows of its own now and then
            row
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            if figures & {*(row := json.loads(line))}
        ]
        for name in ("one", "two")
    )
    compared = 0
    for row, other in zip(one, two, strict=True):
        names = {*row} & figures
        compared += len(names)
        for key in names:
            assert other[key] == pytest.approx(row[key], rel=1e-5, abs=1e-5)
    assert compared == 2 * 5 + 2
    assert "MiB of weights move" in (tmp_path / "two" / "log.txt").read_text()
