"""`maxstack submit --target local`, and what looks after its processes."""

import subprocess
import sys
from pathlib import Path

import processes
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import environment, rows, until, write_config

from maxstack import cli
from maxstack.submit import local
from maxstack.submit.names import LONGEST, PLAIN, safe_name


@pytest.fixture(autouse=True)
def records(tmp_path, monkeypatch):
    """Records of this test alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_detached_run_is_watched_and_stopped_by_its_name(tmp_path, maxstack):
    config, folder = write_config(tmp_path, checkpoint={"every": 1000}), tmp_path / "Long_Run"
    options = "train.steps=100000 data.workers=0 run.name=Long_Run --detach"
    words = f"submit {config} --target local {options}"
    name = maxstack(words).split(":")[0]
    assert name.startswith("long-run-") and PLAIN.fullmatch(name)
    running = f"{name}: is running already on this machine; see maxstack status"
    assert running in maxstack(words, code=1)
    until(lambda: rows(folder))
    assert f"{name}: running, step " in maxstack("status")
    stopped = f"{name}: stopped; submit it again to resume, step "
    assert stopped in maxstack("stop Long_Run")  # by the run's name too
    assert list((folder / "checkpoints").glob("[0-9]*"))
    text = maxstack(f"logs {name} --follow")
    assert "[0] step 1/100000" in text and "SIGTERM was passed on, and no restart follows" in text
    assert f"{name}: is not running" in maxstack(f"stop {name}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "--processes 3 run.virtual_devices=4",
            "--processes 3: does not divide run.virtual_devices=4; give a divisor",
        ),
        (
            "--processes 2 mesh.data=4",
            "mesh: data=4 is 4 devices, but this machine has 2; set one axis to -1",
        ),
        ("--name My_Run", "such as my-run-"),
        (
            "distributed.coordinator=h:1 distributed.processes=2 distributed.process=0",
            "leave it out of the configuration",
        ),
    ],
)
def test_mistakes_are_refused_before_a_process_starts(words, says, tmp_path, maxstack):
    config = write_config(tmp_path)
    assert says in maxstack(f"submit {config} --target local {words}", code=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_whose_submission_is_killed_saves_and_leaves(tmp_path, maxstack):
    config, run = write_config(tmp_path, checkpoint={"every": 100000}), tmp_path / "run"
    options = "--target local --processes 2 train.steps=100000 data.workers=0"
    words = [sys.executable, "-m", "maxstack.cli", "submit", str(config), *options.split()]
    submitted = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL)
    until(lambda: rows(run))
    said = maxstack(f"submit {config} --target local --name other", code=1)
    assert f"another submission is writing to {run}" in said
    trained = [processes.training(submitted.pid, i) for i in range(2)]
    submitted.kill()
    submitted.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in trained), 60)
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name.isdecimal()]
    assert "stopped; run the same command to resume" in (run / "log.txt").read_text()
    assert "run: killed, step " in maxstack("status run")


def test_files_outside_the_bucket_are_listed(tmp_path, capsys):
    source = {"kind": "text", "files": ["notes/*.md", "/gcs/corpus/*.txt", "{stdlib}/*.py"]}
    sections = {"eval": {"every": 0}, "train": {"batch_size": 64, "steps": 10}}
    config = write_config(tmp_path, data={"sources": [source]}, **sections)
    options = "--target gke --cluster tpu-v5e --dry-run run.output_dir=/gcs/runs"
    assert cli.main(["submit", str(config), *options.split()]) == 0
    said = (
        "not in the bucket, so every host must have them, in its image or on a disk "
        "that all see: notes/*.md\n"
    )
    assert said in capsys.readouterr().err


@given(st.text(max_size=80), st.text(max_size=80))
@pytest.mark.slow
def test_safe_names_are_valid_and_stay_distinct(one, other):
    first, second = safe_name(one), safe_name(other)
    assert PLAIN.fullmatch(first) and len(first) <= LONGEST and safe_name(first) == first
    assert first != second or one == other or other == first or one == second


def test_a_failed_process_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "PATIENCE", 0.2)
    code = "import os, time; time.sleep(0 if os.environ['NUMBER'] == '1' else 60); exit(3)"
    with local.Group(tmp_path / "log") as group:
        left = group.run([sys.executable, "-c", code], [{"NUMBER": "0"}, {"NUMBER": "1"}])
    text = (tmp_path / "log").read_text()
    assert left == 143 and text == "submit: process 1 left with 3; the others get SIGTERM\n"
    assert local._code([143, 2, 0]) == 2, "a mistake before others"


def test_an_unknown_name_is_an_error(maxstack):
    said = "nobody: no such run was submitted from this machine; nothing was submitted"
    assert said in maxstack("status nobody", code=1)
