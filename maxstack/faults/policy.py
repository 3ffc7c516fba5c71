"""The host's decision about refused updates: go on, go back before a row of spikes, or end the
run."""

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
    """Decision to go on from the newest checkpoint before batch `first`, and to pass over the
    batches `first` to `last`."""

    first: int
    last: int


class Policy:
    """Decides by the numbers of every step, read in order, and its own past alone: every process,
    and every replay, decides alike. `saved`: what `to_json` returned before."""

    skipped: list[list[int]]
    """[first, last] of the batches that the run passes over, for each rewind."""
    rewinds: int

    def __init__(self, cfg: FaultsConfig, saved: Mapping[str, Any] | None = None):
        self._cfg = cfg
        self.restore(saved or {})

    def read(self, row: Mapping[str, float]) -> Rewind | None:
        """Decide by a step's numbers: step, skipped, refused, loss, grad_norm. ConfigError where
        the run is to end.

        After a Rewind the run restores its state, but not this object: its ranges already hold the
        batches to pass over.
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
                f"{describe_refusal(row)}; {row['refused']:.0f} updates in a row "
                f"are refused, and faults.max_skips={self._cfg.max_skips}; {REMEDY}"
            )
        return None

    def skips(self, step: int) -> bool:
        """True where the batch of this step is passed over."""
        return any(first <= step <= last for first, last in self.skipped)

    def to_json(self) -> dict[str, Any]:
        """The policy's past as plain JSON values, for a checkpoint."""
        return {"skipped": self.skipped, "rewinds": self.rewinds, "spikes": self._spikes}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to when `to_json` returned `saved`; to the beginning, where that is empty."""
        self.skipped = [list(span) for span in saved.get("skipped", [])]
        self.rewinds, self._spikes = saved.get("rewinds", 0), list(saved.get("spikes", []))

    def _go_back(self, first: int, last: int, bound: int) -> Rewind:
        """Decide to go back before batch `first`. ConfigError after `bound` rewinds."""
        if self.rewinds == bound:
            raise ConfigError(
                f"step {last}: {len(self._spikes)} spikes of the loss or the gradient "
                f"norm in a row, {self.rewinds} rewinds in this "
                f"run before, and faults.spike.max_rewinds={bound}; {REMEDY}"
            )
        self.rewinds, self._spikes = self.rewinds + 1, []
        self.skipped.append([first, last])
        return Rewind(first, last)


def refusal(row: Mapping[str, float]) -> str:
    """A line about a step whose update was refused."""
    why = "a spike" if row["skipped"] == SPIKE else "the objective or its gradient is not finite"
    return (
        f"step {row['step']:.0f}: loss {row['loss']:.6g}, gradient norm {row['grad_norm']:.6g}: "
        f"{why}; the update was refused"
    )
