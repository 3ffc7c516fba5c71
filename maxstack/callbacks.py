"""Callbacks: what a script hears of its run (`maxstack.train(cfg, callbacks=...)`)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from maxstack.config.spelling import did_you_mean
from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.report.log import Log
    from maxstack.report.metrics import Writer
    from maxstack.run import Run
    from maxstack.state import State


class Training:
    """The run, as callbacks see it. What they ask of it is done after the step under way."""

    def __init__(
        self, run: "Run", folder: Path, state: "Callable[[], State]", writer: "Writer", saves: bool
    ):
        self.cfg = run.cfg
        self.folder = folder
        self.step = 0
        """The step that the row at hand is of."""
        self.stopped = ""
        """Why a callback asked for the end, or ""."""
        self.asks_save = False
        """Whether a callback asked for a checkpoint."""
        self.names = set[str]()
        """Names of the run's own figures."""
        self._run = run
        self._state = state
        self._writer = writer
        self._saves = saves

    @property
    def state(self) -> "State":
        """Weights and optimizer state, with their `step`: in `on_step` of the step under way, which
        is waited for once a value is read. The next step takes over their memory, so copy what you
        keep."""
        return self._state()

    def model(self) -> Any:
        """The NNX module with the weights of `state`."""
        from flax import nnx

        return nnx.merge(self._run.graph, nnx.State(self.state.params))

    def log(self, **values: float | Sequence[str]) -> None:
        """Write numbers, or lists of texts, of this step to metrics.jsonl and trackers. ConfigError
        for anything else."""
        if taken := sorted(values.keys() & {"step", *self.names}):
            raise ConfigError(f"log({taken[0]}=...): is a figure of the run itself; name it anew")
        row: dict[str, Any] = {}
        for name, value in values.items():
            try:
                is_list = isinstance(value, list | tuple)
                row[name] = [*map(str, cast(Any, value))] if is_list else float(cast(Any, value))
            except (TypeError, ValueError):
                raise ConfigError(
                    f"log({name}=...): got a {type(value).__name__}, wanted a number or a list of "
                    "texts"
                ) from None
        self._writer.write({"step": self.step, **row})

    def save(self) -> None:
        """Ask for a checkpoint. ConfigError in a run that saves none."""
        if not self._saves:
            raise ConfigError("save(): checkpoint.every=0, so this run saves no checkpoints")
        self.asks_save = True

    def stop(self, reason: str) -> None:
        """Ask the run to save and end. Running it again goes on."""
        self.stopped = self.stopped or reason


class Callback:
    """Hears of a run; derive from it and define what you need. A callback reads, logs, and asks for
    checkpoints or the end; it cannot change what is learned. With several processes each has its
    own callbacks, and all must ask alike."""

    def on_start(self, training: Training) -> None:
        """Before the first step, or the first after a checkpoint."""

    def on_step(self, training: Training, row: Mapping[str, Any]) -> None:
        """After each step, with its row of metrics.jsonl. The next step is under way by then."""

    def on_evaluation(self, training: Training, row: Mapping[str, float]) -> None:
        """After each evaluation, with its figures by name."""

    def on_checkpoint(self, training: Training, step: int) -> None:
        """After a checkpoint of a step was begun; it is complete at the latest in `on_end`."""

    def on_end(self, training: Training) -> None:
        """After the last step, or where the run leaves; not after an error."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """ConfigError for what is no callback, or would never be called."""
    for each in callbacks:
        if not isinstance(each, Callback):
            raise ConfigError(f"callbacks: {each!r} is not made from a class derived from Callback")
        for name in {name for name in dir(each) if name.startswith("on_")} - {*dir(Callback)}:
            raise ConfigError(
                f"callbacks: {type(each).__name__}.{name} is never called"
                f"{did_you_mean(name, [each for each in dir(Callback) if each[:3] == 'on_'])}"
            )


class Callbacks:
    """The callbacks of a run. One that raises ends the run, named, or is dropped
    (train.callback_failure)."""

    def __init__(self, callbacks: Sequence[Callback], log: "Log", drops: bool):
        self._callbacks = [*callbacks]
        self._log = log
        self._drops = drops
        self.training: Training | None = None

    def tell(self, event: str, *arguments: Any, step: int | None = None) -> None:
        """Call on_EVENT of each."""
        training = self.training
        if training is None:
            return
        training.step = training.step if step is None else step
        if event in ("step", "evaluation"):
            training.names |= {*arguments[0]}
        for callback in [*self._callbacks]:
            try:
                getattr(callback, f"on_{event}")(training, *arguments)
            except Exception as error:
                name = f"callback {type(callback).__name__}.on_{event} at step {training.step}"
                if not self._drops:
                    error.add_note(
                        f"raised by {name}; train.callback_failure=drop goes on without it"
                    )
                    raise
                self._log.warn(f"{name}: dropped: {type(error).__name__}: {error}")
                self._callbacks.remove(callback)
