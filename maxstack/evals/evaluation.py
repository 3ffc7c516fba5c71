"""Evaluates a run during training, and stops it early.

An evaluation is a list of parts (held-out loss, tasks), each of which returns metrics by name; all
are computed with the weights that the optimizer chooses for evaluation. Checkpoints and early
stopping choose by these metrics."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from maxstack import optim
from maxstack.config.spelling import did_you_mean
from maxstack.errors import ConfigError
from maxstack.schema.metrics import bare, direction
from maxstack.state import State, Tree

if TYPE_CHECKING:
    from maxstack.schema.config import Config, StopEarlyConfig

Part = Callable[[int, Tree], Mapping[str, Any]]
"""A function of step and weights that writes, logs and returns metrics by name."""


class Evaluation:
    """The parts of an evaluation, by the weights that the optimizer chooses for it."""

    def __init__(self, cfg: "Config", parts: Sequence[Part], compare: Callable[[], None]):
        """`compare` logs what simple compressors reach, after the last evaluation. ConfigError
        where something is chosen by a metric that the tasks do not have."""
        self._cfg, self._parts = cfg, parts
        self.compare = compare
        self._chosen_by = {bare(metric): "checkpoint.keep_best" for metric in cfg.checkpoint.best}
        if cfg.train.stop_early:
            self._chosen_by[bare(cfg.train.stop_early.metric)] = "train.stop_early.metric"
        # Before the first step: a misspelt metric must not be found after hours, at the first
        # evaluation.
        names = [name for part in parts for name in getattr(part, "names", ())]
        for metric, key in self._chosen_by.items():
            if metric.startswith("tasks/") and metric not in names:
                there = f"there are {', '.join(names)}" if names else "eval.tasks names none"
                raise ConfigError(f"{key}: no {metric}; {there}{did_you_mean(metric, names)}")

    def __call__(self, step: int, state: State) -> dict[str, float]:
        """Return metrics by name. ConfigError where one that something is chosen by is missing."""
        cfg = self._cfg
        # Averaged, slow or schedule-free weights where the optimizer has them: these are what is
        # exported later.
        row = self.figures(step, optim.eval_params(cfg.optimizer, state.opt, state.params))
        for metric, key in self._chosen_by.items():
            # A metric may depend on the data, as bits per byte does on known sizes, so it is looked
            # for again.
            if metric not in row:
                raise ConfigError(
                    f"{key}: evaluations give no {metric}; they give {', '.join(row)}"
                )
        return row

    def figures(self, step: int, params: Tree) -> dict[str, float]:
        """Return metrics by name of these weights."""
        row: dict[str, float] = {}
        for part in self._parts:
            row |= part(step, params)
        return row


class StopEarly:
    """Decides by evaluations in their order that a run ends: every process, and every replay after
    a restart, decides alike. `saved`: an earlier result of `to_json`."""

    _best: float | None
    _at: int
    """Step of the best evaluation."""
    _since: int
    """Number of evaluations after it."""

    def __init__(self, cfg: "StopEarlyConfig | None", saved: Mapping[str, Any]):
        self._cfg = cfg
        self.restore(saved)

    @property
    def over(self) -> bool:
        """True where the run is to end."""
        return self._cfg is not None and self._since >= self._cfg.patience

    def read(self, step: int, figures: Mapping[str, float]) -> str:
        """Record an evaluation; return why the run ends after it, or ""."""
        if self._cfg is None:
            return ""
        name = self._cfg.metric
        sign, value = direction(name), figures[bare(name)]
        # Strictly better by more than min_delta, in the metric's own direction.
        if self._best is None or sign * (value - self._best) > self._cfg.min_delta:
            self._best, self._at = value, step
            self._since = 0
        else:
            self._since += 1
        return self.why if self.over else ""

    @property
    def why(self) -> str:
        """The reason, for people."""
        assert self._cfg
        by = f" by more than {self._cfg.min_delta:g}" if self._cfg.min_delta else ""
        return (
            f"{bare(self._cfg.metric)} has got no better than {self._best:.4g} of step {self._at}"
            f"{by} in {self._since} evaluations (train.stop_early)"
        )

    def to_json(self) -> dict[str, Any]:
        """Return its state as plain JSON values, for a checkpoint."""
        # Saved with each checkpoint: a run that was killed ends where the undisturbed one does.
        return {"stop_early": [self._best, self._at, self._since]} if self._cfg else {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to the state `saved`, or to the beginning if that has none."""
        self._best, self._at, self._since = saved.get("stop_early", (None, 0, 0))
