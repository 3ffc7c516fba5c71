"""Stages of training: number and length of the rows of a batch, from a step on."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from maxstack.config import Fault, PositiveInt, Section


class StageConfig(Section):
    """Batch size and row length from a given step on."""

    step: PositiveInt
    """First step of the stage; 1 for the first stage."""
    batch_size: PositiveInt | None = None
    """Rows per step; null: train.batch_size."""
    seq_len: PositiveInt | None = None
    """Tokens per row; null: data.seq_len."""


class Stage(NamedTuple):
    """Shape of the batches from a step on."""

    step: int
    rows: int
    length: int


class Stages:
    """The stages of a run whose largest batch has `rows` rows of `length` tokens. A batch of fewer
    rows takes every (rows / its rows)th lane, in turn, so that as many steps together take what one
    large batch would have."""

    def __init__(self, stages: Sequence[StageConfig], rows: int, length: int):
        self.rows, self.length = rows, length
        self.all = [
            Stage(stage.step, stage.batch_size or rows, stage.seq_len or length) for stage in stages
        ] or [Stage(1, rows, length)]

    def at(self, step: int) -> Stage:
        """The stage of a step, from 1."""
        return next(stage for stage in reversed(self.all) if stage.step <= max(step, 1))

    def takes(self, step: int, lane: int) -> bool:
        """Whether the batch of a step has a row of a lane."""
        stage = self.at(step)
        cycle = self.rows // stage.rows
        return lane % cycle == (step - stage.step) % cycle

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, tokens per row) of all batches, each once, in order."""
        return list(dict.fromkeys((stage.rows, stage.length) for stage in self.all))

    def tokens(self, steps: int) -> int:
        """Tokens of the first steps, with padding."""
        ends = [stage.step - 1 for stage in self.all[1:]] + [steps]
        return sum(
            max(0, min(end, steps) - stage.step + 1) * stage.rows * stage.length
            for stage, end in zip(self.all, ends, strict=True)
        )


def stage_faults(stages: Sequence[StageConfig], rows: int, length: int) -> Iterator[Fault]:
    """Faults of the stages of a run."""
    steps = [stage.step for stage in stages]
    if stages and (steps[0] != 1 or steps != sorted({*steps})):
        yield "stages", "must begin at step: 1 and have growing steps"
        return
    for index, stage in enumerate(stages):
        own, key = stage.batch_size or rows, f"stages.{index}"
        if own > rows or rows % own:
            yield (
                f"{key}.batch_size",
                f"batch_size={own} does not divide train.batch_size={rows}, the largest; use a "
                "divisor of it",
            )
            continue
        if (stage.seq_len or length) > length:
            yield f"{key}.seq_len", f"is more than data.seq_len={length}, the longest"
        last = steps[index + 1] - 1 if index + 1 < len(steps) else None
        if last and (last - stage.step + 1) % (rows // own):
            yield (
                f"{key}.batch_size",
                f"{last - stage.step + 1} steps of batch_size={own} do not make whole batches of "
                f"train.batch_size={rows}; give a multiple of {rows // own} steps",
            )
