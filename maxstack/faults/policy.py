"""The host's decision about refused updates: go on, go back before a row of spikes, or end the
run."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxstack.errors import ConfigError
from maxstack.schema.faults import FaultsConfig

ACCEPTED, NOT_FINITE, SPIKE = 0, 1, 2
REMEDY = (
    "lower optimizer.learning_rate or add clip_by_global_norm to optimizer.chain, and "
    "run again from the last checkpoint, "
    "which holds no refused value, or from an earlier one by checkpoint.restore=STEP"
)


class Rewind(NamedTuple):
    """Go on from the newest checkpoint before batch `first`, and pass over the batches `first` to
    `last`."""

    first: int
    last: int


class Policy:
    """Reads the numbers of every step, in order, and decides by them and its own past alone: every
    process, and every replay, decides alike."""

    def __init__(self, cfg: FaultsConfig):
        self._cfg = cfg
        self.skipped: list[list[int]] = []
        """[first, last] of the batches that the run passes over, ascending and apart."""
        self.rewinds = 0
        self._spikes: list[int] = []

    def read(self, row: Mapping[str, float]) -> Rewind | None:
        """What follows from a step's numbers: step, skipped, refused, loss, grad_norm. ConfigError
        where the run is to end.

        After a Rewind the run restores, but not this object: its ranges already hold what is to be
        passed over.
        """
        if row["skipped"] == ACCEPTED:
            self._spikes = []
            return None
        if row["skipped"] == SPIKE:
            self._spikes.append(int(row["step"]))
        spike = self._cfg.spike
        if spike and spike.rewind_after and len(self._spikes) >= spike.rewind_after:
            return self._go_back(
                max(self._spikes[0] - spike.before, 1), self._spikes[-1], spike.max_rewinds
            )
        if row["refused"] > self._cfg.max_skips:
            raise ConfigError(
                f"step {row['step']:.0f}: {_wrong(row)}; {row['refused']:.0f} updates in "
                "a row are refused, and "
                f"faults.max_skips={self._cfg.max_skips}; {REMEDY}"
            )
        return None

    def skips(self, step: int) -> bool:
        """Whether the batch of this step is passed over."""
        return any(first <= step <= last for first, last in self.skipped)

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the state, as plain JSON values."""
        return {"skipped": self.skipped, "rewinds": self.rewinds, "spikes": self._spikes}

    @classmethod
    def from_json(cls, cfg: FaultsConfig, saved: Mapping[str, Any]) -> "Policy":
        """As it was when `to_json` gave `saved`."""
        policy = cls(cfg)
        policy.restore(saved)
        return policy

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Back to what it was when `to_json` gave `saved`; the beginning, where that is empty."""
        self.skipped = [list(span) for span in saved.get("skipped", [])]
        self.rewinds, self._spikes = saved.get("rewinds", 0), list(saved.get("spikes", []))

    def _go_back(self, first: int, last: int, bound: int) -> Rewind:
        if self.rewinds == bound:
            raise ConfigError(
                f"step {last}: {len(self._spikes)} spikes of the loss or the gradient "
                f"norm in a row, {self.rewinds} rewinds in this "
                f"run before, and faults.spike.max_rewinds={bound}; {REMEDY}"
            )
        self.rewinds, self._spikes = self.rewinds + 1, []
        merged: list[list[int]] = []
        for span in sorted([*self.skipped, [first, last]]):
            if merged and span[0] <= merged[-1][1] + 1:
                merged[-1][1] = max(merged[-1][1], span[1])
            else:
                merged.append([*span])
        self.skipped = merged
        return Rewind(first, last)


def _wrong(row: Mapping[str, float]) -> str:
    """What was refused in a step."""
    if row["skipped"] == SPIKE:
        return f"loss {row['loss']:.6g}, gradient norm {row['grad_norm']:.6g}: a spike"
    wrong = [
        f"{name} {row[key]}"
        for name, key in (("loss", "loss"), ("gradient norm", "grad_norm"))
        if not math.isfinite(row[key])
    ]
    return (
        f"{' and '.join(wrong) or 'a part of the objective beside the loss'} "
        f"{'are' if len(wrong) > 1 else 'is'} not finite"
    )
