"""Metrics of samples, and their lines for the log and rollouts.jsonl."""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxstack import strict_json
from maxstack.errors import shortened
from maxstack.rollouts.sample import Group, Sample

SHOWN = 200
"""Characters of a text in the log."""


class Moments(NamedTuple):
    """Sums over the values of one process, which merge into those of all."""

    number: float
    total: float
    squares: float
    """Sum of the squares of the distances from the mean."""
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Moments":
        """Sum one value or more."""
        array = np.array([*values], float)
        # About the mean: squares about 0 lose their digits where values are large and close.
        return cls(len(array), float(array.sum()), float(array.var() * len(array)), max(array))

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return self.total / self.number

    @property
    def std(self) -> float:
        """Their standard deviation, over their number."""
        return math.sqrt(self.squares / self.number)


Sums = dict[str, Moments]
"""By metric. One without values is absent, not 0."""


def sum_rewards(samples: Sequence[Sample]) -> Sums:
    """Sum the rewards of samples that were not dropped, and failures."""
    values = collections.defaultdict[str, list[float]](list)
    for sample in samples:
        # A dropped sample has no reward; its failures count all the same.
        if not sample.dropped:
            values["reward"].append(sample.reward)
            for name, value in sample.rewards.items():
                values[f"reward/{name}"].append(value)
        for name in sample.failures:
            values[f"reward/{name}/failed"].append(1.0)
    return {name: Moments.of(each) for name, each in values.items()}


def sum_groups(groups: Sequence[Group], drawn: int, waited: float) -> Sums:
    """Sum a process's part of a rollout, for which it drew so many prompts and `waited` seconds for
    rewards."""
    samples = [sample for group in groups for sample in group.samples]
    values: dict[str, Sequence[float]] = {
        "reward_group_std": [_deviation(group) for group in groups if group.kept],
        "groups_without_signal": [group.has_no_signal for group in groups],
        "prompts": [drawn],
        "length": [sample.length for sample in samples],
        "truncated": [sample.finish == "length" for sample in samples],
        "turns": [len(sample.texts) for sample in samples],
        "reward_seconds": [waited],
    }
    own = {name: Moments.of(each) for name, each in values.items() if each}
    return sum_rewards(samples) | own


def _deviation(group: Group) -> float:
    return float(np.std([sample.reward for sample in group.kept]))


def merge(found: Sequence[Mapping[str, Sequence[float]]]) -> Sums:
    """Merge the sums of all processes into those of one (Chan et al. 1983, Algorithms for computing
    the sample variance, eq. 2.1)."""
    merged = {}
    # Sums travel, not means: the mean of the processes' deviations was 0.779 where that of all
    # samples is 0.671, and a process without values counted with 0.
    for name in dict.fromkeys(name for one in found for name in one):
        number, total, squares, largest = np.array([one[name] for one in found if name in one]).T
        apart = number * (total / number - total.sum() / number.sum()) ** 2
        merged[name] = Moments(number.sum(), total.sum(), (squares + apart).sum(), largest.max())
    return merged


def compute(sums: Sums) -> dict[str, float]:
    """Compute a rollout's or an evaluation's metrics: means, standard deviations of rewards, and
    counts."""
    made = dict[str, float]()
    for name, values in sums.items():
        if name == "prompts" or name.endswith("/failed"):
            made[name] = values.total
        # All wait for the slowest process.
        elif name == "reward_seconds":
            made[name] = values.largest
        elif name != "turns" or values.largest > 1:
            made[name] = values.mean
            if name == "reward":
                made["reward_std"] = values.std
            elif name.startswith("reward/"):
                made[f"{name}/std"] = values.std
    if "length" in sums:
        made["length_longest"] = sums["length"].largest
    return made


def records(number: int, step: int, groups: Sequence[Group], count: int) -> str:
    """Write lines of JSON about the first `count` samples."""
    samples = [sample for group in groups for sample in group.samples][:count]
    lines = []
    for sample in samples:
        row = {
            "rollout": number,
            "step": step,
            "where": sample.prompt.where,
            "sample": sample.number,
            "prompt": _prompt_of(sample),
            "completion": sample.texts[0] if len(sample.texts) == 1 else sample.texts,
            "reward": sample.reward,
            "rewards": sample.rewards,
            "tokens": sample.length,
            "finish": sample.finish,
        }
        if sample.failures:
            row["failures"] = sample.failures
        if sample.dropped:
            row["dropped"] = True
        lines.append(strict_json.write(row, ensure_ascii=False) + "\n")
    return "".join(lines)


def describe_first(number: int, groups: Sequence[Group]) -> str:
    """Return a line about the first sample."""
    sample = groups[0].samples[0]
    prompt = _prompt_of(sample)
    if isinstance(prompt, list) and prompt:
        prompt = prompt[-1].get("content")
    texts = shortened(" | ".join(sample.texts), SHOWN)
    return (
        f"rollout {number}: {shortened(str(prompt), SHOWN)!r} -> {texts!r}, "
        f"reward {sample.reward:.4g}, {sample.length} tokens"
    )


def _prompt_of(sample: Sample) -> Any:
    record = sample.prompt.record
    return record.get("prompt", record.get("messages"))
