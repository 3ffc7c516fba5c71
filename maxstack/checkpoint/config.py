"""The checkpoints' configuration."""

from typing import Literal

from pydantic import Field

from maxstack.config import Section


class CheckpointConfig(Section):
    """Model, optimizer, data position and step, saved together."""

    every: int = Field(1000, ge=0)
    """Steps between saves; 0: never, not even at the end or on SIGTERM."""
    keep: int = Field(3, ge=1)
    """The newest checkpoints that stay."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints at multiples of this step stay for good; null: none."""
    keep_best: int = Field(0, ge=0)
    """This many checkpoints with the lowest eval_loss stay too."""
    restore: Literal["none", "latest"] | int | str = "latest"
    """Where to start: none (from scratch; refused if the run already has checkpoints), latest, a step of this run, or the path of another run or of
    one of its steps, which is read only while this run has no checkpoint of its own."""
