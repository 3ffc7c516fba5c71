"""Figures of a run's rollouts for `maxstack plan`: what the engine needs beside the steps, and the
least time of both. rollouts/capacity.py counts them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from maxstack.report.table import table

ONLY_UPDATE = "batch", "padding", "code", "activations", "temporaries"
"""Parts of a step's memory that are free while samples are made."""


@dataclasses.dataclass(frozen=True)
class Least:
    """Least time of a part of a rollout, and what would have to be faster."""

    seconds: float
    limit: str


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A rollout whose samples all have the same length, and the steps that learn from it. Bytes of
    one device."""

    prompts: int
    """Prompts that are answered."""
    samples: int
    """Answers to each."""
    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Tokens of an answer."""
    requests: int
    """Answers at a time on each replica of the engine."""
    replicas: int
    steps: int
    """Steps that learn from it."""
    number: float
    """Rollouts of the whole run."""
    in_update: Mapping[str, int]
    """What the engine keeps while a step is computed, by part."""
    in_rollout: Mapping[str, int]
    """The same while samples are made."""
    sampling: Mapping[str, Least]
    """Making the samples, by part; empty where the chip is not known."""
    learning: Mapping[str, Least]
    """Learning from them, by part; empty where the step has no bound."""

    @property
    def seconds(self) -> float | None:
        """Least time of a rollout and its steps, one part after the other."""
        if not (self.sampling and self.learning):
            return None
        return sum(part.seconds for part in (*self.sampling.values(), *self.learning.values()))

    @property
    def share(self) -> float | None:
        """Part of that time in which samples are made."""
        made = sum(part.seconds for part in self.sampling.values())
        return made / self.seconds if self.seconds else None

    @property
    def samples_per_second(self) -> float | None:
        """Samples that are learned from, of all devices together."""
        return self.prompts * self.samples / self.seconds if self.seconds else None

    def json(self) -> dict[str, Any]:
        """Every figure, as JSON takes it."""
        return dataclasses.asdict(self) | {
            "seconds": self.seconds,
            "share": self.share,
            "samples_per_second": self.samples_per_second,
        }


def phases(memory: Mapping[str, int], rollout: Rollout) -> dict[str, dict[str, int]]:
    """Name of a time -> what a device holds then, by part; `memory` is that of a step alone."""
    state = {name: size for name, size in memory.items() if name not in ONLY_UPDATE}
    return {
        "update": {**memory, **rollout.in_update},
        "rollout": {**state, **rollout.in_rollout},
    }


def lines(rollout: Rollout, devices: int, chips: float) -> Iterator[str]:
    """Lines of the screen."""
    yield (
        f"a rollout: {rollout.prompts:,} prompts x {rollout.samples:,} samples of "
        f"{rollout.prompt:,} + {rollout.answer:,} tokens, {rollout.requests:,} at a time on each "
        f"of {rollout.replicas:,} replica{'s' * (rollout.replicas > 1)} of the engine; then "
        f"{rollout.steps:,} step{'s' * (rollout.steps > 1)}"
    )
    parts = {**rollout.sampling, **rollout.learning}
    if not parts:
        yield "this device has no figures in chips.yml, so its speed has no bound"
        return
    whole = rollout.seconds
    rows = [
        (
            name,
            _milliseconds(part.seconds),
            f"{part.seconds / whole:.1%}" if whole else "",
            f"limited by {part.limit}",
        )
        for name, part in parts.items()
    ]
    yield "ms at the least, one part after the other"
    yield table("lrrl", rows)
    if not whole:
        yield "a step that does not fit has no bound on speed, and so has the whole"
        return
    rate, hours = rollout.samples_per_second, whole * rollout.number / 3600
    assert rate and rollout.share is not None
    yield (
        f"at most {rate:,.2f} samples/s ({rate / devices:,.2f} a device), "
        f"{_milliseconds(whole)} ms a rollout and its steps, of which {rollout.share:.1%} makes "
        "the samples; rewards, environments and the host's work are not counted"
    )
    yield (
        f"the run's {rollout.number:,.0f} rollouts take at least {hours:,.3g} hours, "
        f"{hours * chips:,.3g} chip-hours"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds >= 1e-3 else f"{seconds * 1e3:.2g}"
