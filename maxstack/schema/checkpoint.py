"""The configuration of checkpoints."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from maxstack.config import Fault, Items, NonNegativeInt, PositiveInt, Section
from maxstack.schema.metrics import direction_fault


class TierConfig(Section):
    """An additional place for checkpoints: a folder named after the run, inside `path`."""

    path: str = Field(min_length=1)
    """Folder to save in. Without `replicate` it must be shared by all processes; with it, each host
    has its own disk."""
    every: PositiveInt = 100
    """Steps between saves. The last save of a run goes to every tier that all processes share."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    replicate: NonNegativeInt | None = None
    """For a tier on each host's own disk: number of other processes (the next ones by number) that
    get a copy of each process's shards. Use at least the number of processes per host, so that a
    copy is on another host. Such checkpoints can be restored only on the mesh and with the number
    of processes that wrote them, each on its original host. null: a folder that all processes
    share, in a format that any mesh can read."""


Part = Literal["params", "optimizer", "data", "step"]
PARTS: tuple[Part, ...] = ("params", "optimizer", "data", "step")
"""Parts of a checkpoint."""


class CheckpointConfig(Section):
    """Saving and restoring: weights, optimizer state, data position and step together."""

    every: NonNegativeInt = 1000
    """Steps between saves into the run's own folder; 0: never save, not even at the end or on
    SIGTERM."""
    tiers: Items[TierConfig] = ()
    """Additional places for checkpoints, each with its own interval: `{path: /local/ssd, every: 20,
    keep: 2, replicate: 1}`. A run resumes from the newest intact step in any of them; if several
    places have it, a host's own disk comes first, then the run's folder, then the other tiers in
    the order given."""
    keep: PositiveInt = 3
    """Number of newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Keep checkpoints at multiples of this step for good; null: none."""
    keep_best: NonNegativeInt | str | dict[str, PositiveInt] = 0
    """Best checkpoints to keep: a number keeps that many with the lowest eval_loss; the name of a
    metric, such as tasks/pairs/acc, keeps the best one by that metric; a mapping such as
    {eval_loss: 2, tasks/pairs/acc: 1} keeps that many for each metric. If the name does not tell
    which direction is better, prefix it with + (higher) or - (lower): -eval_x."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What to do when a save fails, for example because the disk is full or lost. continue: log it
    and go on; stop: stop the run at the next save. The last save of a run, at its end or on a
    signal, must succeed."""
    restore: Literal["none", "latest"] | int | str = "latest"
    """Where to start. latest: the newest checkpoint of this run, if any; none: from scratch, which
    is an error if the run already has checkpoints; a number: that step of this run; a path: another
    run, or one of its steps, which is only read. A number or a path applies only to the first
    start: the same command later resumes from what this run has saved since."""
    restore_parts: Items[Part] = PARTS
    """Parts of the checkpoint to restore on the first start; later starts restore everything that
    this run has saved. [params, data, step]: for a changed optimizer, which starts with empty
    moments and with its schedules at the restored step; [params]: only the weights, from the path
    of another run."""
    weights: Literal["evaluated", "train", "average"] = "evaluated"
    """Which of a run's weights model.from and the commands load. evaluated: those that training
    evaluates (optimizer.ema with eval, the slow weights of lookahead, the averaged ones of
    schedule-free); train: those that the optimizer updates; average: the moving average."""
    allow_nonfinite: bool = False
    """Accept NaN and infinities among the weights of a model folder or adapter that a new run
    starts from; false: such a tensor is an error that names it."""

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
