"""The checkpoints' configuration."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from maxstack.config import Fault, Items, NonNegativeInt, PositiveInt, Section
from maxstack.schema.metrics import direction_fault


class TierConfig(Section):
    """Another place for checkpoints, in a folder of the run's name below `path`."""

    path: str = Field(min_length=1)
    """A folder. Without `replicate` all processes see the same there; with it, it is on each host's
    own disk."""
    every: PositiveInt = 100
    """Steps between saves there. The last save of a run goes to every tier that all processes
    see."""
    keep: PositiveInt = 2
    """The newest checkpoints that stay there."""
    replicate: NonNegativeInt | None = None
    """On each host's own disk: how many other processes, those with the next numbers, get a copy of
    a process's shards; at least as many as a host has processes, or no copy is on another host.
    Such checkpoints are read on the mesh and by the number of processes that wrote them, each on
    the host where it was. null: a folder that all see, in a format that any mesh reads."""


Part = Literal["params", "optimizer", "data", "step"]
PARTS: tuple[Part, ...] = ("params", "optimizer", "data", "step")
"""Parts of a checkpoint."""


class CheckpointConfig(Section):
    """Model, optimizer, data position and step, saved together."""

    every: NonNegativeInt = 1000
    """Steps between saves into the run's own folder; 0: never, not even at the end or on
    SIGTERM."""
    tiers: Items[TierConfig] = ()
    """More places, each with its own pace: `{path: /local/ssd, every: 20, keep: 2, replicate: 1}`.
    A run goes on from the newest intact step of all; of equal ones, from a host's own disk, then
    from the run's folder, then from the others in their order."""
    keep: PositiveInt = 3
    """The newest checkpoints that stay."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of this step stay for good; null: none."""
    keep_best: NonNegativeInt | str | dict[str, PositiveInt] = 0
    """Checkpoints that stay for the evaluation of their step: so many with the lowest eval_loss; or
    the best by a metric, as in tasks/pairs/acc; or so many by each of several, as in {eval_loss: 2,
    tasks/pairs/acc: 1}. A sign says which way is better where the name does not: -eval_x."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Consequence of a save that fails, for want of room or a lost disk: it is logged and the run
    goes on, or it stops where the next one is due. The last save of a run, at its end or on a
    signal, must succeed."""
    restore: Literal["none", "latest"] | int | str = "latest"
    """Start of the run: none (from scratch; refused if the run already has checkpoints), latest, a
    step of this run (the first time; the same command again goes on from what was saved since), or
    the path of another run or of one of its steps, which is read only until this run has saved."""
    restore_parts: Items[Part] = PARTS
    """Parts of the checkpoint that the run goes on with, the first time; the same command again
    takes all of what it saved since. [params, data, step]: the optimizer changed, and begins
    without moments, its schedules at the step where they would be; [params]: the weights of another
    run, from its path, and nothing else."""
    weights: Literal["evaluated", "train", "average"] = "evaluated"
    """Weights of a run that model.from and commands take: those that its training evaluates
    (optimizer.ema with eval, the slow weights of lookahead, the averaged ones of schedule-free),
    those that it moves, or the moving average."""
    allow_nonfinite: bool = False
    """Take NaN and infinities among the weights of a model folder or an adapter that a fresh run
    starts from; false: such a tensor is refused by name."""

    def own_faults(self) -> Iterator[Fault]:
        parts = {*self.restore_parts}
        if parts not in ({*PARTS}, {*PARTS} - {"optimizer"}, {"params"}):
            yield (
                "restore_parts",
                "must be [params], [params, data, step] or all of [params, optimizer, data, step]",
            )
        if parts == {"params"} and not self.elsewhere:
            yield "restore_parts", "params alone are those of another run: set restore to its path"
        for metric in self.best:
            if wrong := direction_fault(metric):
                yield "keep_best", wrong

    @property
    def best(self) -> dict[str, int]:
        """How many checkpoints stay, by metric."""
        if isinstance(self.keep_best, dict):
            return self.keep_best
        if isinstance(self.keep_best, str):
            return {self.keep_best: 1}
        return {"eval_loss": self.keep_best} if self.keep_best else {}

    @property
    def elsewhere(self) -> str | None:
        """The path that `restore` names; None where it names none."""
        is_path = isinstance(self.restore, str) and self.restore not in ("none", "latest")
        return f"{self.restore}" if is_path else None
