"""Trackers as their own packages read them, offline, of a run that was killed, went back and was
resumed."""

import collections
import importlib.util
import json
import math
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import types

import processes
import pytest
import spiked

from maxstack import cli, load, train
from maxstack.cluster.exit_codes import RETRY
from maxstack.errors import ConfigError, installing
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


def configured(*names):
    """What Trackers reads of a configuration."""
    return types.SimpleNamespace(run=types.SimpleNamespace(trackers=names))


class Failing:
    """A tracker that takes no texts."""

    got = None

    def __init__(self, folder, cfg):
        Failing.got = self.got = []

    def scalars(self, step, values):
        self.got.append((step, values))

    def texts(self, step, name, texts):
        raise OSError("no connection")

    def close(self):
        self.got.append("closed")


class Stuck:
    """A tracker whose server has gone away: a call of the name `at` does not return."""

    at = "scalars"

    def __init__(self, folder, cfg):
        trackers._id(folder, "mlflow")
        self._take("start")

    def scalars(self, step, values):
        self._take("scalars")

    def texts(self, step, name, texts):
        self._take("texts")

    def close(self):
        self._take("close")

    def _take(self, call):
        if call == self.at:
            threading.Event().wait()


@pytest.fixture
def stuck(monkeypatch):
    """`mlflow` is a tracker that gets stuck, `wandb` one that takes all scalars."""
    monkeypatch.setitem(TRACKERS, "mlflow", ("json", Stuck))
    monkeypatch.setitem(TRACKERS, "wandb", ("json", Failing))
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    monkeypatch.setattr(trackers, "STARTING", 0.2)
    monkeypatch.setattr(trackers, "WAITING", 3)
    return monkeypatch


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TRACKERS, "wandb", ("json", Failing))
    writer = Writer(tmp_path, True, Trackers(tmp_path, configured("wandb")))
    for step in (1, 2):
        writer.write({"step": step, "loss": 0.5, "samples": ["text"]})
    writer.close()
    assert Failing.got == [(1, {"train/loss": 0.5}), (2, {"train/loss": 0.5}), "closed"]
    error = capsys.readouterr().err
    assert error.count("wandb: no connection") == 1 and error.count("\n") == 1


def test_a_tracker_that_takes_no_calls_is_dropped_and_the_others_go_on(tmp_path, stuck, capsys):
    writer = Writer(tmp_path, True, Trackers(tmp_path, configured("mlflow", "wandb")))
    for step in range(1, 11):
        writer.write({"step": step, "loss": 0.5})
    writer.close()
    assert [step for step, _ in Failing.got[:-1]] == [*range(1, 11)]
    assert capsys.readouterr().err == (
        "run.trackers: mlflow: dropped because it takes no calls, and 3 are queued; the run "
        "continues, and metrics.jsonl has everything\n"
    )


@pytest.mark.parametrize("at", ["scalars", "texts", "close"])
def test_the_end_of_a_run_waits_only_so_long_for_all_trackers(tmp_path, stuck, capsys, at):
    stuck.setattr(Stuck, "at", at)
    writer = Writer(tmp_path, True, Trackers(tmp_path, configured("mlflow", "wandb")))
    writer.write({"step": 1, "loss": 0.5, "samples": ["text"]})
    began = time.monotonic()
    writer.close()
    assert 0.2 <= time.monotonic() - began < 2
    assert Failing.got == [(1, {"train/loss": 0.5}), "closed"]
    assert "mlflow: dropped because it has not ended in 0 s" in capsys.readouterr().err
    assert Trackers(tmp_path, configured()).cut_short


def test_a_tracker_that_does_not_answer_at_a_resume_is_dropped(tmp_path, stuck, capsys):
    stuck.setattr(Stuck, "at", "start")
    with pytest.raises(ConfigError, match="mlflow cannot start: no answer in 0 s; fix that"):
        Trackers(tmp_path, configured("mlflow"))
    stuck.setattr(Stuck, "at", "")
    Trackers(tmp_path, configured("mlflow")).close()
    stuck.setattr(Stuck, "at", "start")
    for _ in range(2):
        Trackers(tmp_path, configured("mlflow", "wandb")).close()
        assert Failing.got == ["closed"]
    assert capsys.readouterr().err.count("mlflow: dropped because it has not ended in 0 s") == 2


def test_a_tracker_that_refuses_at_a_resume_is_dropped(tmp_path, stuck, capsys):
    stuck.setattr(Stuck, "at", "")
    Trackers(tmp_path, configured("mlflow")).close()
    stuck.setattr(Stuck, "_take", lambda self, call: 1 / 0)
    writer = Writer(tmp_path, True, Trackers(tmp_path, configured("mlflow")))
    for step in range(10):
        writer.write({"step": step, "loss": 0.5})
    writer.close()
    assert capsys.readouterr().err.count("mlflow: dropped because it cannot start: division") == 1
    assert Trackers(tmp_path, configured()).cut_short


HELD = """
import atexit, sys, threading, types
from pathlib import Path
from maxstack import cli, train
from maxstack.report import trackers

class Stuck:
    def __init__(self, folder, cfg):
        threading.Thread(target=threading.Event().wait).start()
        atexit.register(threading.Event().wait)

    def close(self):
        threading.Event().wait()

trackers.TRACKERS["mlflow"] = "json", Stuck
trackers.PATIENCE = 0.2

def main(argv):
    cfg = types.SimpleNamespace(run=types.SimpleNamespace(trackers=["mlflow"]))
    trackers.Trackers(Path(sys.argv[1]), cfg).close()
    print("done")
    return int(sys.argv[2])

train.main, train.GRACE = main, 1.0
sys.exit(cli.run(train.program, []))
"""
"""A run with a stuck tracker whose package leaves a thread and a handler that never end."""


@pytest.mark.slow
def test_a_process_ends_although_a_trackers_package_holds_it(tmp_path):
    words = [sys.executable, "-c", HELD, str(tmp_path), str(RETRY)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (RETRY, "done\n")


STUCK = """
import sys, threading
from maxstack import cli, train
from maxstack.report import trackers

class Stuck:
    def __init__(self, folder, cfg):
        pass

    def scalars(self, step, values):
        threading.Event().wait()

trackers.TRACKERS["mlflow"] = "json", Stuck
trackers.WAITING, trackers.PATIENCE = 5, 0.5
sys.exit(cli.run(train.program, sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_goes_on_beside_a_stuck_tracker_and_saves_at_sigterm(tmp_path):
    config = processes.write_config(
        tmp_path, run={"trackers": ["mlflow", "tensorboard"]}, train={"steps": 100_000}
    )
    words = [sys.executable, "-c", STUCK, str(config)]
    with (tmp_path / "said").open("w") as said:
        run = subprocess.Popen(words, env=processes.environment(), stdout=said, stderr=said)
    try:
        processes.until(lambda: len(processes.rows(tmp_path / "run")) > 20)
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == RETRY
    finally:
        run.kill()
    assert (tmp_path / "said").read_text().count("mlflow: dropped") == 1
    last = processes.rows(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / str(last)).is_dir()


FULL = """
import resource, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from maxstack.report.metrics import Writer
from maxstack.report.trackers import Trackers
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
cfg = SimpleNamespace(run=SimpleNamespace(trackers=["tensorboard"]))
tracked = Trackers(Path(sys.argv[1]), cfg)
writer = Writer(Path(sys.argv[1]), True, tracked)
for step in range(1, 201):
    if step == 100:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    if step == 190:
        while tracked._feeders[0]._calls.qsize():
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, [resource.RLIM_INFINITY] * 2)
    writer.write({"step": step, "loss": step / 2})
writer.close()
"""
"""A disk that is full for 90 steps: writes beyond 4 KiB fail."""


def events(path):
    """The events of a file: records of a length, its checksum, data and theirs."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data, at = path.read_bytes(), 0
    while at < len(data):
        length, check = struct.unpack("<QI", data[at : at + 12])
        body, end = data[at + 12 : at + 12 + length], at + 12 + length
        assert check == masked_crc32c(data[at : at + 8])
        assert struct.unpack("<I", data[end : end + 4]) == (masked_crc32c(body),)
        yield Event.FromString(body)
        at = end + 4


def test_tensorboard_has_all_steps_of_a_run_whose_disk_was_full(tmp_path):
    words = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    (file,) = (tmp_path / "tensorboard").iterdir()
    found = [(event.step, v.simple_value) for event in events(file) for v in event.summary.value]
    assert found == [(step, step / 2) for step in range(1, 201)]
    assert done.stderr.count(f"{file}: ") == 1 and "the run continues" in done.stderr


def test_an_event_files_name_follows_those_before_wherever_the_clock_is(tmp_path, monkeypatch):
    names = []
    for now in (2e9, 2e9, 1.7e9, 2.1e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        Trackers(tmp_path, configured("tensorboard")).close()
        names += {path.name for path in (tmp_path / "tensorboard").iterdir()} - {*names}
    assert names == sorted(names) and len(names) == 4 and all("tfevents" in name for name in names)


def ids(folder):
    """The ids that a run's folder keeps."""
    return {name: json.loads((folder / trackers.KEPT).read_text()).get(name) for name in TRACKERS}


def test_a_copied_folder_begins_runs_of_its_own_and_says_so(tmp_path, stuck, capsys):
    stuck.setattr(Stuck, "at", "")
    first, copy = tmp_path / "first", tmp_path / "copy"
    first.mkdir()
    Trackers(first, configured("mlflow")).close()
    shutil.copytree(first, copy)
    before = ids(first)
    for folder in (first, copy, copy):
        Trackers(folder, configured("mlflow")).close()
    assert ids(first) == before and ids(copy)["mlflow"] not in (None, before["mlflow"])
    assert capsys.readouterr().err == (
        f"run.trackers: {copy} is a copy of {first}, which keeps its runs in mlflow; this one "
        "starts its own\n"
    )


def test_a_moved_folder_goes_on_in_its_runs(tmp_path, stuck, capsys):
    stuck.setattr(Stuck, "at", "")
    first, moved, link = tmp_path / "first", tmp_path / "moved", tmp_path / "link"
    first.mkdir()
    Trackers(first, configured("mlflow")).close()
    before = ids(first)
    first.rename(moved)
    link.symlink_to(moved)
    for folder in (moved, link):
        Trackers(folder, configured("mlflow")).close()
    assert ids(moved) == before and not capsys.readouterr().err


MLFLOW = """
import sys
from pathlib import Path
from maxstack.load import load
from maxstack.report.trackers import Trackers
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
tracked = Trackers(folder, load("quickstart", ["run.trackers=[mlflow]"]))
tracked.add("texts", int(sys.argv[2]), "samples", ["text"])
tracked.add("scalars", int(sys.argv[2]), {"loss": 0.5})
tracked.close()
"""


@needs("mlflow", "sqlalchemy", "alembic")
@pytest.mark.slow
def test_mlflow_writes_the_files_of_a_copied_and_of_a_moved_folder_into_it(tmp_path):
    from mlflow import MlflowClient

    def write(name, step):
        words = [sys.executable, "-c", MLFLOW, str(tmp_path / name), str(step)]
        subprocess.run(words, check=True, timeout=120)

    write("first", 1)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    write("copy", 2)
    (tmp_path / "copy").rename(tmp_path / "moved")
    write("moved", 3)
    moved, first = (
        sorted(path.name for path in (tmp_path / name).rglob("*.txt"))
        for name in ("moved", "first")
    )
    assert not (tmp_path / "copy").exists() and first == ["00000001.txt"]
    assert moved == [f"0000000{step}.txt" for step in (1, 2, 3)]
    client = MlflowClient(f"sqlite:///{tmp_path / 'moved' / 'mlflow' / 'mlflow.db'}")
    found = client.search_runs([client.get_experiment_by_name("maxstack").experiment_id])
    steps = [
        [point.step for point in client.get_metric_history(run.info.run_id, "loss")]
        for run in found
    ]
    assert sorted(steps) == [[1], [2, 3]]
    for run in found:
        assert client.list_artifacts(run.info.run_id, "samples")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["run.tensorboard=false"], ()),
        (["run.tensorboard=true"], ("tensorboard",)),
        (["run.tensorboard=true", "run.trackers=[wandb]"], ("tensorboard", "wandb")),
        (["run.tensorboard=false", "run.trackers=[tensorboard]"], ()),
    ],
)
def test_the_older_key_goes_on_working(words, names):
    assert load.load("quickstart", words).run.trackers == names
