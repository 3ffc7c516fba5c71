"""Experiment trackers, which get a run's metrics beside metrics.jsonl: a class each, under its name
in run.trackers.

trackers.json of the run's folder keeps their ids, so that a resumed run goes on in the same run of
each. Steps that are done again after a restart or a rewind are written again.
"""

import contextlib
import functools
import importlib.util
import json
import os
import queue
import re
import secrets
import socket
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from maxstack import config, strict_json
from maxstack.config import atomic
from maxstack.errors import ConfigError, installing, shortened
from maxstack.report.append import Appender

if TYPE_CHECKING:
    from PIL.Image import Image

    from maxstack.schema.config import Config

KEPT = "trackers.json"
PROJECT = "maxstack"
_UNUSED = ("boto3", "google.cloud.storage")
"""What tensorboardX imports where it is installed, for URLs: 0.8 s."""
WAITING = 10_000
"""Calls that may wait for a slow tracker."""
STARTING = 30.0
"""Seconds in which a tracker must start; a run that had it before goes on meanwhile."""
PATIENCE = 3.0
"""Seconds that a run waits for a tracker that takes no call, and at its end for all."""
FAULTY: set[str] = set()
"""Trackers of this process that failed or were dropped: their packages may hold its end."""
_KEPT_LOCK = threading.Lock()


class Tracker(Protocol):
    """A run of a tracker; a step that is below the one before it begins a piece that replaces what
    was written from there on."""

    def __init__(self, folder: Path, cfg: "Config") -> None: ...

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Figures of a step, by name."""

    def texts(self, step: int, name: str, texts: Sequence[str]) -> None:
        """Texts of a step."""

    def image(self, step: int, name: str, picture: "Image") -> None:
        """A picture of a step."""

    def close(self) -> None:
        """Write what is still kept back, and end."""


class TensorBoard:
    """Event files in tensorboard/ of the run's folder. A mark before a step that is done again lets
    TensorBoard drop what older files hold from there on.

    It reads them in the order of their names, so a new one's comes last, wherever the clock is.
    tensorboardX makes the events; its own writer keeps them from a thread that ends at a full disk.
    """

    def __init__(self, folder: Path, cfg: "Config"):
        stores = {name: None for name in _UNUSED if name not in sys.modules}
        sys.modules.update(stores)  # type: ignore[arg-type]
        try:
            from tensorboardX import record_writer, summary
            from tensorboardX.proto import event_pb2
        finally:
            for name in stores:
                del sys.modules[name]

        self._summary, self._proto = summary, event_pb2
        self._checksum = record_writer.masked_crc32c
        board = folder / "tensorboard"
        board.mkdir(exist_ok=True)
        seconds = re.findall(r"tfevents\.(\d{10})\.", " ".join(os.listdir(board)))
        number = max(int(time.time()), *(int(older) + 1 for older in ("0", *seconds)))
        name = f"events.out.tfevents.{number:010}.{socket.gethostname()}"
        self._file = Appender(board / name, lines=False)
        self._add(0, file_version="brain.Event:2")
        self._last: int | None = None

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._mark(step)
        self._add(step, *(self._summary.scalar(name, value) for name, value in values.items()))

    def texts(self, step: int, name: str, texts: Sequence[str]) -> None:
        self._mark(step)
        self._add(step, self._summary.text(name, "\n\n---\n\n".join(texts)))

    def image(self, step: int, name: str, picture: "Image") -> None:
        self._mark(step)
        pixels = np.asarray(picture.convert("RGB"))
        self._add(step, self._summary.image(name, pixels, dataformats="HWC"))

    def close(self) -> None:
        """Nothing is kept back."""

    def _mark(self, step: int) -> None:
        """Note that events of this step and later ones, written before, do not count."""
        if self._last is None or step < self._last:
            log = self._proto.SessionLog
            self._add(step, session_log=log(status=log.START))
        self._last = step

    def _add(self, step: int, *summaries: Any, **fields: Any) -> None:
        """Append an event: its length and itself, each with a checksum."""
        event = self._proto.Event(step=step, wall_time=time.time(), **fields)
        for each in summaries:
            event.summary.MergeFrom(each)
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = (struct.pack("<I", self._checksum(part)) for part in (length, data))
        self._file.add(b"".join((length, next(sums), data, next(sums))))


class Trackio:
    """A run of Trackio, in trackio/ of the run's folder unless TRACKIO_DIR names another; it keeps
    both rows of a step that is done again."""

    def __init__(self, folder: Path, cfg: "Config"):
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
        import trackio

        self._api = trackio
        name = f"{cfg.run.name}-{_id(folder, 'trackio')}"
        self._run = trackio.init(
            PROJECT, name=name, resume="allow", config=config.plain_data(cfg), embed=False
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step)

    def texts(self, step: int, name: str, texts: Sequence[str]) -> None:
        table = self._api.Table(columns=["text"], data=[[text] for text in texts])
        self._run.log({name: table}, step)

    def image(self, step: int, name: str, picture: "Image") -> None:
        self._run.log({name: self._api.Image(picture)}, step)

    def close(self) -> None:
        self._run.finish()


class WandB:
    """A run of Weights & Biases: offline, in wandb/ of the run's folder, unless WANDB_MODE says
    otherwise. Its own counter cannot go back, so rows carry `step`, the axis of every chart."""

    def __init__(self, folder: Path, cfg: "Config"):
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        quiet = wandb.Settings(
            console="off", disable_git=True, disable_code=True, silent=mode == "offline"
        )
        self._api = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=_id(folder, "wandb"),
            name=cfg.run.name,
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
            dir=str(folder),
            config=config.plain_data(cfg),
            settings=quiet,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def texts(self, step: int, name: str, texts: Sequence[str]) -> None:
        table = self._api.Table(columns=["text"], data=[[text] for text in texts])
        self._run.log({"step": step, name: table})

    def image(self, step: int, name: str, picture: "Image") -> None:
        self._run.log({"step": step, name: self._api.Image(picture)})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, in mlflow/ of the run's folder unless MLFLOW_TRACKING_URI names a server or
    another database; it keeps both values of a step that is done again."""

    REFUSED = re.compile(r"[^\w\-. :/]")
    """Characters that no name may have."""
    BATCH = 1000
    """Figures that MLflow takes at once."""

    def __init__(self, folder: Path, cfg: "Config"):
        import mlflow

        uri, place = os.environ.get("MLFLOW_TRACKING_URI"), None
        if uri is None:
            own = (folder / "mlflow").resolve()
            own.mkdir(exist_ok=True)
            uri, place = f"sqlite:///{own / 'mlflow.db'}", own.as_uri()
            if (own / "mlflow.db").exists():
                _correct_places(own / "mlflow.db", place)
        client = self._client = mlflow.MlflowClient(uri)
        self._metric = mlflow.entities.Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)

        def begin() -> str:
            known = client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else client.create_experiment(name, place)
            run = client.create_run(experiment, run_name=cfg.run.name).info.run_id
            client.log_dict(run, config.plain_data(cfg), "config.json")
            return run

        self._id = _id(folder, "mlflow", begin)
        self._metrics: list[Any] = []
        self._written = 0.0
        client.update_run(self._id, "RUNNING")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        now = round(time.time() * 1000)
        self._metrics += [
            self._metric(self.REFUSED.sub("_", name), value, now, step)
            for name, value in values.items()
        ]
        if time.monotonic() > self._written + 1:
            self._write()

    def texts(self, step: int, name: str, texts: Sequence[str]) -> None:
        text = "\n\n---\n\n".join(texts)
        self._client.log_text(self._id, text, f"{name}/{step:08}.txt")

    def image(self, step: int, name: str, picture: "Image") -> None:
        self._client.log_image(self._id, picture, f"{name}/{step:08}.png")

    def close(self) -> None:
        self._write()
        self._client.update_run(self._id, "FINISHED")

    def _write(self) -> None:
        """Hand on the figures of a second together: 15 ms of a database, however many they are."""
        metrics, self._metrics = self._metrics, []
        for at in range(0, len(metrics), self.BATCH):
            self._client.log_batch(self._id, metrics[at : at + self.BATCH])
        self._written = time.monotonic()


TRACKERS: dict[str, tuple[str, type[Tracker]]] = {
    "tensorboard": ("tensorboardX", TensorBoard),
    "trackio": ("trackio", Trackio),
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
}
"""By their names in run.trackers: the package that each imports, and its class."""


class _Feeder(threading.Thread):
    """The thread of a tracker: makes it, hands it its calls, and closes it."""

    def __init__(self, name: str, make: Callable[[], Tracker], known: bool):
        """`known`: the run had it before, and goes on without it."""
        super().__init__(daemon=True, name=name)
        self._make, self._known, self._ready = make, known, threading.Event()
        self._calls: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
        self._latest = 0.0
        """When it took its last call."""
        self.error: Exception | str | None = f"no answer in {STARTING:.0f} s"
        """Why it has not started, or what failed first."""
        self.lost = False
        """It is dropped."""
        self._until = time.monotonic() + STARTING
        self.start()

    def begin(self) -> None:
        """Wait until it is there, or should be."""
        self._ready.wait(max(0.0, self._until - time.monotonic()))

    def add(self, *call: Any) -> None:
        """Hand on a call of Tracker."""
        began = time.monotonic()
        while self._calls.qsize() >= WAITING and not self.lost:
            if time.monotonic() > max(began, self._latest) + PATIENCE:
                self._drop(f"takes no calls, and {WAITING:,} wait")
            time.sleep(0.01)
        if not self.lost:
            self._calls.put(call)

    def end(self) -> None:
        """Let it end after the calls that wait."""
        self._calls.put(None)

    def wait(self, until: float) -> None:
        """Wait for its end until a moment of the steady clock."""
        if not self.lost:
            self.join(max(0.0, until - time.monotonic()))
        if self.is_alive() and not self.lost:
            self._drop(f"has not ended in {PATIENCE:.0f} s, and {self._calls.qsize():,} calls wait")

    def run(self) -> None:
        try:
            tracker, self.error = self._make(), None
        except Exception as error:
            self.error = error
            if self._known:
                self._drop(f"cannot start: {error}")
            return
        finally:
            self._ready.set()
        while (call := self._calls.get()) is not None:
            self._try(getattr(tracker, call[0]), *call[1:])
        self._try(tracker.close)

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        self._latest = time.monotonic()
        try:
            call(*arguments)
        except Exception as error:
            if not self.error:
                _tell(self.name, error)
            self.error = error

    def _drop(self, why: str) -> None:
        self.lost = True
        self.end()
        _tell(self.name, f"dropped, as it {why}")


class Trackers:
    """The trackers of a run, each fed by a thread, so that neither a step nor another waits for it.
    One that fails is reported once, and goes on with what comes next; one that takes no calls any
    more is dropped."""

    def __init__(self, folder: Path, cfg: "Config"):
        """ConfigError where one cannot start that the run did not have before."""
        self._folder, self._feeders = folder, list[_Feeder]()
        _claim(folder)
        kept = _kept(folder)
        self.cut_short = bool(kept.get("open"))
        """Those of the process before were not closed, and may have lost what they kept back."""
        for name in dict.fromkeys(cfg.run.trackers):
            known = name in kept.get("started", ())
            feeder = _Feeder(name, functools.partial(TRACKERS[name][1], folder, cfg), known)
            if not known:
                feeder.begin()
            if feeder.error and not known:
                self.close()
                _keep(folder, open=self.cut_short)
                raise ConfigError(
                    f"run.trackers: {name} cannot start: {shortened(str(feeder.error), 500)}; mend "
                    "that, or leave it out"
                )
            self._feeders.append(feeder)
        _keep(folder, started=cfg.run.trackers, open=True)

    def add(self, call: str, *arguments: Any) -> None:
        """Hand a call of Tracker to all of them."""
        for feeder in self._feeders:
            feeder.add(call, *arguments)

    def close(self) -> None:
        """Wait until they have all and have ended, PATIENCE seconds in all, or STARTING from their
        beginning."""
        for feeder in self._feeders:
            feeder.begin()
            feeder.end()
        until = time.monotonic() + PATIENCE
        for feeder in self._feeders:
            feeder.wait(until)
        with contextlib.suppress(OSError):  # a full disk: the next process hands on the last rows
            _keep(self._folder, open=any(feeder.lost for feeder in self._feeders))


def _tell(name: str, why: Exception | str) -> None:
    FAULTY.add(name)
    print(
        f"run.trackers: {name}: {shortened(str(why), 500)}; the run goes on, and metrics.jsonl has "
        "everything",
        file=sys.stderr,
    )


def check_installed(names: Sequence[str]) -> None:
    """ConfigError where the package of a tracker is not installed."""
    for name in names:
        package = TRACKERS[name][0]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"run.trackers: {name} needs the {package} package: {installing(name)}"
            )


def _id(folder: Path, name: str, make: Callable[[], str] = lambda: secrets.token_hex(4)) -> str:
    """The id of the run in a tracker, made once."""
    if name not in _kept(folder):
        _keep(folder, **{name: make()})
    return _kept(folder)[name]


def _claim(folder: Path) -> None:
    """Note whose the ids are. A copy of a folder that still has them gets new ones; a folder that
    was moved takes them along."""
    kept, own = _kept(folder), folder.resolve()
    other, ids = Path(kept.get("run", own)), kept.keys() & TRACKERS
    try:
        is_copy = not other.samefile(own) and any(_kept(other).get(n) == kept[n] for n in ids)
    except (FileNotFoundError, NotADirectoryError):
        is_copy = False
    except OSError:  # somebody else's
        is_copy = True
    if is_copy:
        print(
            f"run.trackers: {folder} is a copy of {other}, which goes on in its runs of "
            f"{', '.join(sorted(ids))}; this one begins its own",
            file=sys.stderr,
        )
        (folder / KEPT).unlink()
    _keep(folder, run=str(own))


def _correct_places(database: Path, place: str) -> None:
    """Let MLflow's database name the files that lie beside it, in a folder moved or copied."""
    beside = "artifact_location LIKE 'file://%/mlflow'"
    with contextlib.closing(sqlite3.connect(database, timeout=PATIENCE)) as opened, opened:
        opened.execute(
            "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, 1 + length((SELECT "
            "artifact_location FROM experiments AS e WHERE e.experiment_id = runs.experiment_id "
            f"AND {beside}))) WHERE experiment_id IN (SELECT experiment_id FROM experiments WHERE "
            f"{beside})",
            [place],
        )
        opened.execute(f"UPDATE experiments SET artifact_location = ? WHERE {beside}", [place])


def _kept(folder: Path) -> dict[str, Any]:
    path = folder / KEPT
    return strict_json.read_object(path) if path.exists() else {}


def _keep(folder: Path, **values: Any) -> None:
    with _KEPT_LOCK, atomic.writing(folder / KEPT) as unfinished:
        text = json.dumps(_kept(folder) | values, indent=1)
        unfinished.write_text(f"{text}\n", encoding="utf-8")
