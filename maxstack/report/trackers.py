"""Experiment trackers, which get a run's metrics beside metrics.jsonl: a class each, under its name
in run.trackers.

trackers.json of the run's folder keeps their ids, so that a resumed run goes on in the same run of
each. Steps that are done again after a restart or a rewind are written again.
"""

import importlib.util
import json
import os
import queue
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from maxstack import config
from maxstack.config import atomic
from maxstack.errors import ConfigError, installing, shortened

if TYPE_CHECKING:
    from PIL.Image import Image

    from maxstack.schema.config import Config

KEPT = "trackers.json"
PROJECT = "maxstack"
_UNUSED = ("boto3", "google.cloud.storage")
"""What tensorboardX imports where it is installed, for URLs: 0.8 s."""
WAITING = 10_000
"""Calls that may wait for a slow tracker; one more waits until there is room."""


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
    TensorBoard drop what older files hold from there on."""

    def __init__(self, folder: Path, cfg: "Config"):
        stores = {name: None for name in _UNUSED if name not in sys.modules}
        sys.modules.update(stores)  # type: ignore[arg-type]
        try:
            from tensorboardX import SummaryWriter
        finally:
            for name in stores:
                del sys.modules[name]

        self._writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)
        self._last: int | None = None

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._mark(step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def texts(self, step: int, name: str, texts: Sequence[str]) -> None:
        self._mark(step)
        self._writer.add_text(name, "\n\n---\n\n".join(texts), step)

    def image(self, step: int, name: str, picture: "Image") -> None:
        self._mark(step)
        pixels = np.asarray(picture.convert("RGB"))
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()

    def _mark(self, step: int) -> None:
        """Note that events of this step and later ones, written before, do not count."""
        if self._last is None or step < self._last:
            from tensorboardX.proto.event_pb2 import Event, SessionLog

            start = SessionLog(status=SessionLog.START)
            self._writer.file_writer.add_event(Event(session_log=start), step)
        self._last = step


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

    def __init__(self, folder: Path, cfg: "Config"):
        import mlflow

        uri, place = os.environ.get("MLFLOW_TRACKING_URI"), None
        if uri is None:
            own = (folder / "mlflow").resolve()
            own.mkdir(exist_ok=True)
            uri, place = f"sqlite:///{own / 'mlflow.db'}", own.as_uri()
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
        client.update_run(self._id, "RUNNING")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        now = round(time.time() * 1000)
        metrics = [
            self._metric(self.REFUSED.sub("_", name), value, now, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics)

    def texts(self, step: int, name: str, texts: Sequence[str]) -> None:
        text = "\n\n---\n\n".join(texts)
        self._client.log_text(self._id, text, f"{name}/{step:08}.txt")

    def image(self, step: int, name: str, picture: "Image") -> None:
        self._client.log_image(self._id, picture, f"{name}/{step:08}.png")

    def close(self) -> None:
        self._client.update_run(self._id, "FINISHED")


TRACKERS: dict[str, tuple[str, type[Tracker]]] = {
    "tensorboard": ("tensorboardX", TensorBoard),
    "trackio": ("trackio", Trackio),
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
}
"""By their names in run.trackers: the package that each imports, and its class."""


class Trackers:
    """The trackers of a run, fed by a thread, so that no step waits for them. A tracker that fails
    is reported once, and goes on with what comes next."""

    def __init__(self, folder: Path, cfg: "Config"):
        """ConfigError where one cannot start."""
        self._folder, self._trackers = folder, dict[str, Tracker]()
        self.cut_short = bool(_kept(folder).get("open"))
        """Those of the process before were not closed, and may have lost what they kept back."""
        self._failed: set[str] = set()
        for name in dict.fromkeys(cfg.run.trackers):
            try:
                self._trackers[name] = TRACKERS[name][1](folder, cfg)
            except Exception as error:
                self._each("close")
                raise ConfigError(
                    f"run.trackers: {name} cannot start: {shortened(str(error), 500)}; mend that, "
                    "or leave it out"
                ) from error
        _keep(folder, "open", True)
        self._calls: queue.Queue[tuple[Any, ...] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._feed, daemon=True, name="trackers")
        self._thread.start()

    def add(self, call: str, *arguments: Any) -> None:
        """Hand a call of Tracker to all of them."""
        self._calls.put((call, *arguments))

    def close(self) -> None:
        """Wait until they have all, and end them; once."""
        if not self._thread.is_alive():
            return
        self._calls.put(None)
        self._thread.join()
        self._each("close")
        _keep(self._folder, "open", False)

    def _feed(self) -> None:
        while (call := self._calls.get()) is not None:
            self._each(*call)

    def _each(self, call: str, *arguments: Any) -> None:
        for name, tracker in self._trackers.items():
            try:
                getattr(tracker, call)(*arguments)
            except Exception as error:
                if name not in self._failed:
                    print(
                        f"run.trackers: {name}: {shortened(str(error), 500)}; the run goes on, and "
                        "metrics.jsonl has everything",
                        file=sys.stderr,
                    )
                self._failed.add(name)


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
        _keep(folder, name, make())
    return _kept(folder)[name]


def _kept(folder: Path) -> dict[str, Any]:
    path = folder / KEPT
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _keep(folder: Path, name: str, value: Any) -> None:
    with atomic.writing(folder / KEPT) as unfinished:
        text = json.dumps(_kept(folder) | {name: value}, indent=1)
        unfinished.write_text(f"{text}\n", encoding="utf-8")
