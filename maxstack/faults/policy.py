"""The host's decision about refused updates: go on, rewind before a row of spikes, or end the run.

After `rewind_after` spikes in a row the run goes back to a checkpoint and skips, from then on, all
batches from `before` ahead of the first spike to the last one (PaLM, arXiv:2204.02311, section
5.1); the checkpoint is the newest from before these batches. More than `max_skips` refused updates
in a row, or `max_rewinds` rewinds, end the run. Decisions depend on each step's numbers, read in
order, and on earlier decisions alone, so every process and every replay decides alike; checkpoints
keep them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from maxstack.errors import ConfigError
from maxstack.schema.faults import FaultsConfig

ACCEPTED = 0
NOT_FINITE = 1
SPIKE = 2
REMEDY = (
    "lower optimizer.learning_rate or add clip_by_global_norm to optimizer.chain, and "
    "run again from the last checkpoint, "
    "which holds no refused value, or from an earlier one by checkpoint.restore=STEP"
)


class Rewind(NamedTuple):
    """Decision to go on from the newest checkpoint before batch `first`, and to skip batches
    `first` to `last`."""

    first: int
    last: int


class Policy:
    """Decides by the numbers of every step. `saved`: what `to_json` returned."""

    skipped: list[list[int]]
    """[first, last] of the batches that each rewind skips."""
    rewinds: int

    def __init__(self, cfg: FaultsConfig, saved: Mapping[str, Any] | None = None):
        self._cfg = cfg
        self.restore(saved or {})

    def read(self, row: Mapping[str, float]) -> Rewind | None:
        """Decide by a step's numbers: step, skipped, refused, loss, grad_norm. ConfigError where
        the run is to end. A Rewind restores the run's state, but not this object, which already
        has the batches to skip."""
        if row["skipped"] == ACCEPTED:
            self._spikes = []
            return None
        if row["skipped"] == SPIKE:
            # An update that is not finite neither counts as a spike nor ends a row of them.
            self._spikes.append(int(row["step"]))
        spike = self._cfg.spike
        # Before max_skips is looked at, since spikes count as refused there too: the run would end
        # where a rewind was asked for.
        if spike and spike.rewind_after and len(self._spikes) >= spike.rewind_after:
            return self._rewind(
                max(self._spikes[0] - spike.before, 1), self._spikes[-1], spike.max_rewinds
            )
        if row["refused"] > self._cfg.max_skips:
            raise ConfigError(
                f"{describe_refusal(row)}; {row['refused']:.0f} updates in a row "
                f"are refused, and faults.max_skips={self._cfg.max_skips}; {REMEDY}"
            )
        return None

    def skips(self, step: int) -> bool:
        """Return whether the batch of this step is to be skipped."""
        return any(first <= step <= last for first, last in self.skipped)

    def to_json(self) -> dict[str, Any]:
        """Return the policy's past as plain JSON values, for a checkpoint."""
        return {"skipped": self.skipped, "rewinds": self.rewinds, "spikes": self._spikes}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Return to the past that `to_json` returned; an empty one is the beginning."""
        self.skipped = [list(span) for span in saved.get("skipped", [])]
        self.rewinds = saved.get("rewinds", 0)
        self._spikes = list(saved.get("spikes", []))

    def _rewind(self, first: int, last: int, bound: int) -> Rewind:
        """Decide to rewind before batch `first`. ConfigError after `bound` rewinds."""
        if self.rewinds == bound:
            raise ConfigError(
                f"step {last}: {len(self._spikes)} spikes of the loss or the gradient "
                f"norm in a row, {self.rewinds} rewinds in this "
                f"run before, and faults.spike.max_rewinds={bound}; {REMEDY}"
            )
        self.rewinds += 1
        self._spikes = []
        # Kept for good: a replay from any checkpoint skips the same batches.
        self.skipped.append([first, last])
        return Rewind(first, last)


def describe_refusal(row: Mapping[str, float]) -> str:
    """Return a line about a step whose update was refused."""
    why = "a spike" if row["skipped"] == SPIKE else "the objective or its gradient is not finite"
    return (
        f"step {row['step']:.0f}: loss {row['loss']:.6g}, gradient norm {row['grad_norm']:.6g}: "
        f"{why}; the update was refused"
    )
