"""Experiment trackers: a class each, under its name in run.trackers.

Each tracker is fed by a thread through a queue, so that neither a step nor another tracker waits
for it. A call that fails is reported once; a tracker that takes no more calls is dropped.
trackers.json in the run's folder keeps their ids, so that a resumed run continues in the same run
of each tracker. Steps that are repeated after a restart or a rewind are written again."""

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
from maxstack.config.own_kinds import is_own, resolve
from maxstack.errors import ConfigError, installing, shortened
from maxstack.report.append import Appender

if TYPE_CHECKING:
    from PIL.Image import Image

    from maxstack.schema.config import Config

KEPT = "trackers.json"
PROJECT = "maxstack"
_UNUSED = ("boto3", "google.cloud.storage")
"""Packages that tensorboardX imports for URLs if they are installed, which takes 0.8 s."""
WAITING = 10_000
"""Calls that may be queued for a slow tracker."""
STARTING = 30.0
"""Seconds in which a tracker must start; a run that had it before does not wait."""
PATIENCE = 3.0
"""Seconds that a run waits for a tracker that takes no calls, and for all at its end."""
FAULTY: set[str] = set()
"""Trackers of this process that failed or were dropped: their packages may block its exit."""
_KEPT_LOCK = threading.Lock()


class Tracker(Protocol):
    """A run in a tracker. A step below the previous one replaces what was written from that step
    on."""

    def __init__(self, folder: Path, cfg: "Config") -> None: ...

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log metrics of a step by name."""

    def texts(self, step: int, name: str, texts: Sequence[str]) -> None:
        """Log texts of a step."""

    def image(self, step: int, name: str, picture: "Image") -> None:
        """Log a picture of a step."""

    def close(self) -> None:
        """Write what is still buffered, and end."""


class TensorBoard:
    """Event files in tensorboard/ of the run's folder. A mark before a repeated step makes
    TensorBoard drop what older files hold from that step on.

    TensorBoard reads files in the order of their names, so a new file's name comes last, even if
    the clock was set back. tensorboardX encodes the events; its own writer is not used, because its
    thread ends at a full disk."""

    def __init__(self, folder: Path, cfg: "Config"):
        # None in sys.modules makes an import fail at once.
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
        # With the clock set back, TensorBoard's reader showed 199 of 400 steps; two sessions of one
        # second shared a file.
        seconds = re.findall(r"tfevents\.(\d{10})\.", " ".join(os.listdir(board)))
        number = max(int(time.time()), *(int(older) + 1 for older in ("0", *seconds)))
        name = f"events.out.tfevents.{number:010}.{socket.gethostname()}"
        # Not tensorboardX's writer, whose thread ends at a full disk: Appender writes later what
        # the disk refused.
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
        """Nothing is buffered."""

    def _mark(self, step: int) -> None:
        """Mark earlier events of this step and later ones as obsolete."""
        # Without the mark TensorBoard draws both curves of a step that was repeated.
        if self._last is None or step < self._last:
            log = self._proto.SessionLog
            self._add(step, session_log=log(status=log.START))
        self._last = step

    def _add(self, step: int, *summaries: Any, **fields: Any) -> None:
        """Append an event: its length and data, each with a checksum."""
        event = self._proto.Event(step=step, wall_time=time.time(), **fields)
        for each in summaries:
            event.summary.MergeFrom(each)
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        parts = [part + struct.pack("<I", self._checksum(part)) for part in (length, data)]
        self._file.add(b"".join(parts))


class Trackio:
    """A run in Trackio, in trackio/ of the run's folder unless TRACKIO_DIR names another; it keeps
    both rows of a repeated step."""

    def __init__(self, folder: Path, cfg: "Config"):
        # setdefault: a folder that the user names wins.
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
    """A run in Weights & Biases: offline, in wandb/ of the run's folder, unless WANDB_MODE says
    otherwise. Its own counter cannot go back, so rows hold `step`, the axis of every chart."""

    def __init__(self, folder: Path, cfg: "Config"):
        import wandb

        # Offline unless asked: nothing leaves the machine by default, and no start waits for a
        # network.
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
    """A run in MLflow, in mlflow/ of the run's folder unless MLFLOW_TRACKING_URI names a server or
    another database; it keeps both values of a repeated step."""

    REFUSED = re.compile(r"[^\w\-. :/]")
    """Characters that names may not contain."""
    BATCH = 1000
    """Metrics that MLflow accepts per call."""

    def __init__(self, folder: Path, cfg: "Config"):
        import mlflow

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        place = None
        if uri is None:
            own = (folder / "mlflow").resolve()
            own.mkdir(exist_ok=True)
            uri, place = f"sqlite:///{own / 'mlflow.db'}", own.as_uri()
            # MLflow stores absolute paths; a folder that was moved or copied would write to its old
            # place.
            if (own / "mlflow.db").exists():
                _relocate_artifacts(own / "mlflow.db", place)
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
        # Once a second: a call takes MLflow's database 10 to 15 ms, which is several short steps.
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
        """Write the metrics of a second together: a call takes 15 ms, however many they are."""
        metrics = self._metrics
        self._metrics = []
        for at in range(0, len(metrics), self.BATCH):
            self._client.log_batch(self._id, metrics[at : at + self.BATCH])
        self._written = time.monotonic()


TRACKERS: dict[str, tuple[str, type[Tracker]]] = {
    "tensorboard": ("tensorboardX", TensorBoard),
    "trackio": ("trackio", Trackio),
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
}
"""Name in run.trackers -> the package that it needs, and its class."""


class _Feeder(threading.Thread):
    """The thread of a tracker, which creates it, passes calls on to it, and closes it."""

    def __init__(self, name: str, make: Callable[[], Tracker], known: bool):
        """`known`: the run had it before, and continues without it if it fails."""
        # A daemon: a tracker that hangs must not keep the process from ending.
        super().__init__(daemon=True, name=name)
        self._make = make
        self._known = known
        self._ready = threading.Event()
        self._calls: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
        self._latest = 0.0
        """Time of its last call."""
        self.error: Exception | str | None = f"no answer in {STARTING:.0f} s"
        """Why it has not started, or its first failure."""
        self.lost = False
        """True if it was dropped."""
        self._until = time.monotonic() + STARTING
        self.start()

    def begin(self) -> None:
        """Wait until it has started, or should have."""
        self._ready.wait(max(0.0, self._until - time.monotonic()))

    def add(self, *call: Any) -> None:
        """Queue a call of Tracker."""
        began = time.monotonic()
        # A full queue of a tracker that still takes calls is waited for; one that has taken none
        # for PATIENCE is dropped, because it would stop training.
        while self._calls.qsize() >= WAITING and not self.lost:
            if time.monotonic() > max(began, self._latest) + PATIENCE:
                self._drop(f"takes no calls, and {WAITING:,} are queued")
            time.sleep(0.01)
        if not self.lost:
            self._calls.put(call)

    def end(self) -> None:
        """Let it end after the queued calls."""
        self._calls.put(None)

    def wait(self, until: float) -> None:
        """Wait for its end until a time of the monotonic clock."""
        if not self.lost:
            self.join(max(0.0, until - time.monotonic()))
        if self.is_alive() and not self.lost:
            queued = self._calls.qsize()
            self._drop(f"has not ended in {PATIENCE:.0f} s, and {queued:,} calls are queued")

    def run(self) -> None:
        try:
            tracker, self.error = self._make(), None
        except Exception as error:
            self.error = error
            if self._known:
                self._drop(f"cannot start: {error}")
            return
        finally:
            # Also where it fails, or the run would wait for STARTING seconds to learn of it.
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
        # Nothing is queued from here on, and the thread may stay in its call: it is a daemon.
        self.lost = True
        self.end()
        _tell(self.name, f"dropped because it {why}")


class Trackers:
    """The trackers of a run."""

    def __init__(self, folder: Path, cfg: "Config"):
        """ConfigError if a tracker cannot start that the run did not have before."""
        self._folder = folder
        self._feeders: list[_Feeder] = []
        _claim(folder)
        kept = _kept(folder)
        # "open" is written at the start and taken back at the end, so a killed process leaves it.
        self.cut_short = bool(kept.get("open"))
        """True if those of the previous process were not closed, and may have lost what they
        buffered."""
        for name in dict.fromkeys(cfg.run.trackers):
            known = name in kept.get("started", ())
            # In its thread: MLflow takes 3.2 s to start with a new database, wandb 0.9 s.
            feeder = _Feeder(name, functools.partial(tracker_class(name), folder, cfg), known)
            # Only the first start waits: a mistake in it should stop a new run. A resumed run must
            # not fail because a server is away.
            if not known:
                feeder.begin()
            if feeder.error and not known:
                self.close()
                _keep(folder, open=self.cut_short)
                raise ConfigError(
                    f"run.trackers: {name} cannot start: {shortened(str(feeder.error), 500)}; fix "
                    "that, or leave it out"
                )
            self._feeders.append(feeder)
        _keep(folder, started=cfg.run.trackers, open=True)

    def add(self, call: str, *arguments: Any) -> None:
        """Queue a call of Tracker for all of them."""
        for feeder in self._feeders:
            feeder.add(call, *arguments)

    def close(self) -> None:
        """Wait until all have ended, PATIENCE seconds in total, or STARTING from their start."""
        for feeder in self._feeders:
            feeder.begin()
            feeder.end()
        # One deadline for all: an MLflow server that accepted and never answered once held a
        # process for 288 s.
        until = time.monotonic() + PATIENCE
        for feeder in self._feeders:
            feeder.wait(until)
        with contextlib.suppress(
            OSError
        ):  # a full disk; the next process writes the last rows again
            # "open" stays true where a tracker was dropped, so that the next process hands it the
            # last rows again.
            _keep(self._folder, open=any(feeder.lost for feeder in self._feeders))


def _tell(name: str, why: Exception | str) -> None:
    FAULTY.add(name)
    print(
        f"run.trackers: {name}: {shortened(str(why), 500)}; the run continues, and metrics.jsonl "
        "has everything",
        file=sys.stderr,
    )


def tracker_class(name: str) -> type[Tracker]:
    """The class of a tracker. ConfigError where one of one's own cannot be imported."""
    try:
        found: type[Tracker] = resolve(name) if is_own(name) else TRACKERS[name][1]
        return found
    except ConfigError as error:
        raise ConfigError(f"run.trackers: {error}") from error


def check_installed(names: Sequence[str]) -> None:
    """ConfigError if the package of a tracker is not installed."""
    for name in names:
        if is_own(name):
            tracker_class(name)
            continue
        package = TRACKERS[name][0]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"run.trackers: {name} needs the {package} package: {installing(name)}"
            )


def _id(folder: Path, name: str, make: Callable[[], str] = lambda: secrets.token_hex(4)) -> str:
    """Return the run's id in a tracker, created once."""
    if name not in _kept(folder):
        _keep(folder, **{name: make()})
    return _kept(folder)[name]


def _claim(folder: Path) -> None:
    """Record which folder the ids belong to. A copy of a folder that still has them gets new ids; a
    folder that was moved keeps them."""
    kept = _kept(folder)
    own = folder.resolve()
    other = Path(kept.get("run", own))
    ids = kept.keys() & TRACKERS
    try:
        # Two runs with one id would write two losses for one step.
        is_copy = not other.samefile(own) and any(_kept(other).get(n) == kept[n] for n in ids)
    except (FileNotFoundError, NotADirectoryError):
        is_copy = False
    except OSError:  # it belongs to someone else
        is_copy = True
    if is_copy:
        print(
            f"run.trackers: {folder} is a copy of {other}, which keeps its runs in "
            f"{', '.join(sorted(ids))}; this one starts its own",
            file=sys.stderr,
        )
        (folder / KEPT).unlink()
    _keep(folder, run=str(own))


def _relocate_artifacts(database: Path, place: str) -> None:
    """Point MLflow's database at the files beside it, in a folder that was moved or copied."""
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
    # Trackers create their ids in threads of their own, and each write replaces the whole file.
    with _KEPT_LOCK, atomic.writing(folder / KEPT) as unfinished:
        text = json.dumps(_kept(folder) | values, indent=1)
        unfinished.write_text(f"{text}\n", encoding="utf-8")
