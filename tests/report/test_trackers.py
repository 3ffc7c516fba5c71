"""Trackers as their own packages read them, offline, of a run that was killed, went back and was
resumed."""

import collections
import importlib.util
import json
import math
import sqlite3
import struct
import subprocess
import sys
import types

import processes
import pytest
import spiked

from maxstack import cli, load, train
from maxstack.errors import installing
from maxstack.report import trackers
from maxstack.report.metrics import Writer
from maxstack.report.trackers import TRACKERS, Trackers

TEXT, STEP = "abab", 37
PICTURE = """
import sys
from pathlib import Path
from PIL import Image
from maxstack.load import load
from maxstack.report.metrics import Writer
from maxstack.report.trackers import Trackers
folder = Path(sys.argv[1])
writer = Writer(folder, True, Trackers(folder, load(folder / "config.yml")))
writer.image("samples", 37, Image.new("RGB", (8, 8), "red"))
writer.write({"step": 37, "tasks/arc/acc": 0.25, "f(x)": float("nan"), "samples": ["abab"]})
writer.close()
"""
"""A third session of the same run."""


def needs(*packages):
    """Skips a test where an extra is not installed; `make test-all` installs all."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with every tracker that is installed."""
    names = [name for name, (package, _) in TRACKERS.items() if importlib.util.find_spec(package)]
    trackers = f"run.trackers=[{','.join(names)}]"
    folder = spiked.make(tmp_path_factory.mktemp("tracked"), "run", trackers)
    subprocess.run([sys.executable, "-c", PICTURE, str(folder)], check=True, timeout=120)
    return folder


def losses(run):
    """Step -> the loss that counts."""
    return {step: row["loss"] for step, row in processes.numbers(run).items()}


def written_again(run):
    """Steps with several rows."""
    counts = collections.Counter(row["step"] for row in processes.rows(run))
    return {step for step, count in counts.items() if count > 1}


@needs("tensorboard")
@pytest.mark.release
def test_tensorboard_shows_each_step_once(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard"), {"scalars": 0}).Reload()
    events = {event.step: event.value for event in board.Scalars("train/loss")}
    assert len(events) == len(board.Scalars("train/loss")) and written_again(run)
    passed_over = {row["step"] for row in processes.rows(run, "passed_over")}
    counted = {step: loss for step, loss in losses(run).items() if step not in passed_over}
    assert events == pytest.approx(counted) and len(events) == 32
    assert board.Scalars("tasks/arc/acc")[0].value == 0.25
    assert [event.step for event in board.Images("samples")] == [STEP]
    assert TEXT in board.Tensors("samples/text_summary")[-1].tensor_proto.string_val[0].decode()


@needs("trackio")
def test_trackio_goes_on_in_one_run_without_a_gap(run):
    with sqlite3.connect(run / "trackio" / "maxstack.db") as database:
        rows = database.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ).fetchall()
    assert len({name for name, _, _ in rows}) == 1 and rows[0][0].startswith("run-")
    found = [(step, json.loads(metrics)) for _, step, metrics in rows]
    last = {step: metrics["train/loss"] for step, metrics in found if "train/loss" in metrics}
    assert last == losses(run)
    kinds = {metrics["samples"]["_type"] for _, metrics in found if "samples" in metrics}
    assert kinds == {"trackio.table", "trackio.image"}
    assert found[-1][1]["tasks/arc/acc"] == 0.25


def records(path):
    """The records of a file of wandb: after a header of 7 bytes LevelDB's log, whose blocks of 32
    KiB hold pieces of a checksum, their length, and a kind: whole, first, middle or last."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32768) and left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@needs("wandb")
@pytest.mark.slow
def test_wandb_goes_on_under_one_id_without_a_gap(run):
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 3 and len({path.name for path in files}) == 1
    rows, axes = [], set()
    for path in files:
        for record in map(Record.FromString, records(path)):
            if record.HasField("metric") and record.metric.glob_name:
                axes.add((record.metric.glob_name, record.metric.step_metric))
            rows.append(
                {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    assert axes == {("*", "step")}
    found = [row for row in rows if "train/loss" in row]
    assert {row["step"]: row["train/loss"] for row in found} == losses(run)
    kinds = {row["samples._type"] for row in rows if "samples._type" in row}
    assert kinds == {"table-file", "image-file"}


@needs("mlflow", "sqlalchemy", "alembic")
@pytest.mark.slow
def test_mlflow_goes_on_in_one_run_of_a_database_in_the_runs_folder(run):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("maxstack")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert {point.step: point.value for point in history} == losses(run)
    assert found.info.status == "FINISHED" and found.data.metrics["tasks/arc/acc"] == 0.25
    assert math.isnan(found.data.metrics["train/f_x_"])
    artifacts = {path.relative_to(run / "mlflow").name for path in (run / "mlflow").rglob("*.*")}
    assert {"config.json", f"{STEP:08}.txt", f"{STEP:08}.png"} <= artifacts


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_made(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(TRACKERS, "wandb", ("wandb_that_is_not_there", TRACKERS["wandb"][1]))
    config = processes.write_config(tmp_path, run={"trackers": ["wandb"]})
    assert cli.run(train.main, [str(config)]) == 1
    assert f"wandb needs the wandb_that_is_not_there package: {installing('wandb')}" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists() or not (tmp_path / "run" / "metrics.jsonl").exists()


class Failing:
    """A tracker that takes no texts."""

    def __init__(self, folder, cfg):
        self.got = []

    def scalars(self, step, values):
        self.got.append((step, values))

    def texts(self, step, name, texts):
        raise OSError("no connection")

    def close(self):
        self.got.append("closed")


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TRACKERS, "wandb", ("json", Failing))
    cfg = types.SimpleNamespace(run=types.SimpleNamespace(trackers=("wandb",)))
    opened = Trackers(tmp_path, cfg)
    writer = Writer(tmp_path, True, opened)
    for step in (1, 2):
        writer.write({"step": step, "loss": 0.5, "samples": ["text"]})
    writer.close()
    got = opened._trackers["wandb"].got
    assert got == [(1, {"train/loss": 0.5}), (2, {"train/loss": 0.5}), "closed"]
    error = capsys.readouterr().err
    assert error.count("wandb: no connection") == 1 and error.count("\n") == 1


def test_a_tracker_that_cannot_start_is_a_mistake_of_the_configuration(tmp_path, monkeypatch):
    def refuse(folder, cfg):
        raise RuntimeError("no key")

    monkeypatch.setitem(TRACKERS, "wandb", ("json", refuse))
    cfg = types.SimpleNamespace(run=types.SimpleNamespace(trackers=("wandb",)))
    with pytest.raises(trackers.ConfigError, match="run.trackers: wandb cannot start: no key"):
        Trackers(tmp_path, cfg)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ("tensorboard",)),
        (["run.tensorboard=false"], ()),
        (["run.tensorboard=true"], ("tensorboard",)),
        (["run.tensorboard=false", "run.trackers=[wandb]"], ("wandb",)),
        (["run.tensorboard=true", "run.trackers=[wandb]"], ("tensorboard", "wandb")),
        (["run.tensorboard=false", "run.trackers=[tensorboard]"], ()),
    ],
)
def test_the_older_key_goes_on_working(words, names):
    assert load.load("quickstart", words).run.trackers == names
