"""Rollouts of several processes: each answers its share of the prompts on its own devices."""

import json
import os
import sys
from pathlib import Path

import processes
import pytest
import tiny

TIMES = ("_seconds", "_per_second", "_wait", "mfu")


@pytest.mark.release
@pytest.mark.parametrize("reward", ["vowels", "picky"])
def test_two_processes_sample_what_one_does(tmp_path, reward):
    """All figures are those of all samples, to 1e-5, although a reward that fails for half of the
    prompts leaves the processes unequally many; and both processes evaluate."""
    call = {"kind": "function", "call": f"letters:{reward}", "failure": "drop"}
    cfg = tiny.with_rollouts(
        rewards=[call | {"name": "own"}],
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
    path = tiny.write(tmp_path, cfg)
    environment = processes.environment() | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path.cwd())]),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    several = ["--target", "local", "--processes", "2"]
    for name, words in (("one", ["train"]), ("two", ["submit"])):
        command = [sys.executable, "-m", "maxstack.cli", *words, str(path)]
        command += [f"run.name={name}", *(several if name == "two" else [])]
        processes.run(command, environment)
    one, two = (figures(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys() and len(one) > 2 * 20
    assert {(1, "reward_std"), (2, "reward/own/std"), (2, "eval_reward_std")} <= one.keys()
    assert ((1, "reward/own/failed") in one) == (reward == "picky")
    for key, value in one.items():
        assert two[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    assert "MiB of weights move" in (tmp_path / "two" / "log.txt").read_text()


def figures(folder):
    """(step, name) -> figure, but for times."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {
        (row["step"], name): value
        for row in rows
        for name, value in row.items()
        if not name.endswith(TIMES) and ("loss" in row or "eval_prompts" in row)
    }
