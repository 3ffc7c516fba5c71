"""A run's rollouts in `maxstack plan`: the memory of the engine beside the steps, and the minimum
time of both, which rollouts/capacity.py computes."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from maxstack.report.table import table

ONLY_UPDATE = "batch", "padding", "code", "activations", "temporaries"
"""Parts of a step's memory that are free during sampling."""


@dataclasses.dataclass(frozen=True)
class Least:
    """Minimum time of a part of a rollout, and the resource that limits it."""

    seconds: float
    limit: str


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A rollout whose samples have the same length, and the steps that learn from it. Bytes are per
    device."""

    prompts: int
    """Number of prompts."""
    samples: int
    """Samples per prompt."""
    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Tokens of an answer."""
    requests: int
    """Concurrent requests on each replica of the engine."""
    replicas: int
    steps: int
    """Steps that learn from it."""
    number: float
    """Rollouts of the whole run."""
    in_update: Mapping[str, int]
    """What the engine holds during a training step, by part."""
    in_rollout: Mapping[str, int]
    """What it holds during sampling, by part."""
    sampling: Mapping[str, Least]
    """Time of sampling by part; empty if the chip is unknown."""
    learning: Mapping[str, Least]
    """Time of training by part; empty if the step has no speed bound."""

    @property
    def seconds(self) -> float | None:
        """Minimum time of a rollout and its steps, one part after the other."""
        if not (self.sampling and self.learning):
            return None
        # The parts follow each other: samples must be there before a step learns from them.
        return sum(part.seconds for part in (*self.sampling.values(), *self.learning.values()))

    @property
    def share(self) -> float | None:
        """Share of that time spent on sampling."""
        made = sum(part.seconds for part in self.sampling.values())
        return made / self.seconds if self.seconds else None

    @property
    def samples_per_second(self) -> float | None:
        """Samples trained on per second, of all devices together."""
        return self.prompts * self.samples / self.seconds if self.seconds else None

    def json(self) -> dict[str, Any]:
        """Return every value as plain data."""
        return dataclasses.asdict(self) | {
            "seconds": self.seconds,
            "share": self.share,
            "samples_per_second": self.samples_per_second,
        }


def phases(memory: Mapping[str, int], rollout: Rollout) -> dict[str, dict[str, int]]:
    """Return what a device holds during `update` and `rollout`, by part. `memory`: that of a
    step."""
    # Between steps their activations and temporaries are free for the engine; state stays.
    state = {name: size for name, size in memory.items() if name not in ONLY_UPDATE}
    return {
        "update": {**memory, **rollout.in_update},
        "rollout": {**state, **rollout.in_rollout},
    }


def lines(rollout: Rollout, devices: int, chips: float) -> Iterator[str]:
    """Yield the lines of the screen."""
    yield (
        f"a rollout: {rollout.prompts:,} prompts x {rollout.samples:,} samples of "
        f"{rollout.prompt:,} "
        f"+ {rollout.answer:,} tokens; engine replicas: {rollout.replicas:,}, each with "
        f"{rollout.requests:,} requests at a time; training steps: {rollout.steps:,}"
    )
    parts = {**rollout.sampling, **rollout.learning}
    if not parts:
        yield "this device has no figures in chips.yml, so there is no speed bound"
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
    yield "minimum ms, one part after the other"
    yield table("lrrl", rows)
    if not whole:
        yield "the step does not fit, so there is no speed bound of the whole"
        return
    rate = rollout.samples_per_second
    hours = whole * rollout.number / 3600
    assert rate and rollout.share is not None
    yield (
        f"at most {rate:,.2f} samples/s ({rate / devices:,.2f} per device), "
        f"{_milliseconds(whole)} ms per rollout and its steps, of which {rollout.share:.1%} is "
        "sampling; rewards, environments and the host's work are not counted"
    )
    yield (
        f"the run's {rollout.number:,.0f} rollouts take at least {hours:,.3g} hours, "
        f"{hours * chips:,.3g} chip-hours"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds >= 1e-3 else f"{seconds * 1e3:.2g}"
