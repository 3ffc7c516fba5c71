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


def maxstack(*words: object) -> list[str]:
    return [sys.executable, "-m", "maxstack.cli", *map(str, words)]


def test_a_detached_run_is_watched_and_stopped_by_its_name(tmp_path, capsys):
    config, name = write_config(tmp_path, checkpoint={"every": 1000}), "long-run-c0ffee"
    options = "--target local train.steps=100000 data.workers=0 run.name=Long_Run --detach"
    words = ["submit", str(config), *options.split()]
    assert cli.main(words) == 0
    name = capsys.readouterr().out.split(":")[0]
    assert name.startswith("long-run-") and PLAIN.fullmatch(name)
    assert (
        cli.main(words) == 1
        and f"{name}: is running already on this machine; see maxstack status"
        in capsys.readouterr().err
    )
    until(lambda: rows(tmp_path / "Long_Run"))
    assert cli.main(["status"]) == 0 and f"{name}: running, step " in capsys.readouterr().out
    assert cli.main(["stop", "Long_Run"]) == 0  # by the run's name too
    assert f"{name}: stopped; submit it again to resume, step " in capsys.readouterr().out
    assert list((tmp_path / "Long_Run" / "checkpoints").glob("[0-9]*"))
    assert cli.main(["logs", name, "--follow"]) == 0
    text = capsys.readouterr().out
    assert "[0] step 1/100000" in text and "SIGTERM was passed on, and no restart follows" in text
    assert cli.main(["stop", name]) == 0 and f"{name}: is not running" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--processes", "3", "run.virtual_devices=4"],
            "--processes 3: does not divide run.virtual_devices=4; give a divisor",
        ),
        (
            ["--processes", "2", "mesh.data=4"],
            "mesh: data=4 is 4 devices, but this machine has 2; set one axis to -1",
        ),
        (["--name", "My Run"], "such as my-run-"),
        (
            ["distributed={coordinator: 'h:1', processes: 2, process: 0}"],
            "leave it out of the configuration",
        ),
    ],
)
def test_mistakes_are_refused_before_a_process_starts(words, says, tmp_path, capsys):
    config = write_config(tmp_path)
    assert cli.main(["submit", str(config), "--target", "local", *words]) == 1
    assert says in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_whose_submission_is_killed_saves_and_leaves(tmp_path, capfd):
    config = write_config(tmp_path, checkpoint={"every": 100000})
    options = "--target local --processes 2 train.steps=100000 data.workers=0"
    words = maxstack("submit", config, *options.split())
    submitted = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL)
    until(lambda: rows(tmp_path / "run"))
    assert (
        cli.main(["submit", str(config), "--target", "local", "--name", "other"]) == 1
    )  # the same folder
    assert f"another submission is writing to {tmp_path}/run" in capfd.readouterr().err
    trained = [processes.training(submitted.pid, i) for i in range(2)]
    submitted.kill()
    submitted.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in trained), 60)
    assert [
        path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdecimal()
    ]
    assert "stopped; run the same command to resume" in (tmp_path / "run" / "log.txt").read_text()
    assert cli.main(["status", "run"]) == 0 and "run: killed, step " in capfd.readouterr().out


def test_files_outside_the_bucket_are_listed(tmp_path, monkeypatch, capfd):
    source = {"kind": "text", "files": ["notes/*.md", "/gcs/corpus/*.txt", "{stdlib}/*.py"]}
    config = write_config(
        tmp_path,
        data={"sources": [source]},
        eval={"every": 0},
        train={"batch_size": 64, "steps": 10},
    )
    options = "--target gke --cluster tpu-v5e --dry-run run.output_dir=/gcs/runs"
    words = ["submit", str(config), *options.split()]
    assert cli.main(words) == 0
    assert (
        "not in the bucket, so every host must have them, in its image or on a disk "
        "that all see: notes/*.md\n" in capfd.readouterr().err
    )


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


def test_an_unknown_name_is_an_error(capsys):
    assert cli.main(["status", "nobody"]) == 1
    said = capsys.readouterr().err
    assert "nobody: no such run was submitted from this machine; nothing was submitted" in said
