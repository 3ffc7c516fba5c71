"""Figures of samples, for metrics, the log and rollouts.jsonl."""

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
    """Sums over values of one process, from which those over the values of all follow."""

    number: float
    total: float
    squares: float
    """Sum of the squares of the distances from the mean."""
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Moments":
        """The sums over one value or more."""
        array = np.array([*values], float)
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
"""By figure. One that has no values is not there: it is not 0."""


def sums_of_rewards(samples: Sequence[Sample]) -> Sums:
    """Sums over the rewards that count, and over failures."""
    values = collections.defaultdict[str, list[float]](list)
    for sample in samples:
        if not sample.dropped:
            values["reward"].append(sample.reward)
            for name, value in sample.rewards.items():
                values[f"reward/{name}"].append(value)
        for name in sample.failures:
            values[f"reward/{name}/failed"].append(1.0)
    return {name: Moments.of(each) for name, each in values.items()}


def sums(groups: Sequence[Group], drawn: int, waited: float) -> Sums:
    """Sums over what a process has of a rollout, for which it drew so many prompts and `waited`
    seconds for rewards."""
    samples = [sample for group in groups for sample in group.samples]
    counted = [[sample.reward for sample in group.counted] for group in groups]
    values: dict[str, Sequence[float]] = {
        "reward_group_std": [float(np.std(rewards)) for rewards in counted if rewards],
        "groups_without_signal": [group.equal for group in groups],
        "prompts": [drawn],
        "length": [sample.length for sample in samples],
        "truncated": [sample.finish == "length" for sample in samples],
        "turns": [len(sample.texts) for sample in samples],
        "reward_seconds": [waited],
    }
    own = {name: Moments.of(each) for name, each in values.items() if each}
    return sums_of_rewards(samples) | own


def together(found: Sequence[Mapping[str, Sequence[float]]]) -> Sums:
    """The sums of all processes as those of one (Chan et al. 1983, Algorithms for computing the
    sample variance, eq. 2.1)."""
    made = {}
    for name in dict.fromkeys(name for one in found for name in one):
        number, total, squares, largest = np.array([one[name] for one in found if name in one]).T
        apart = number * (total / number - total.sum() / number.sum()) ** 2
        made[name] = Moments(number.sum(), total.sum(), (squares + apart).sum(), largest.max())
    return made


def figures(found: Sums) -> dict[str, float]:
    """Means of a rollout's or an evaluation's figures, spreads of rewards, and numbers of
    things."""
    made = dict[str, float]()
    for name, values in found.items():
        if name == "prompts" or name.endswith("/failed"):
            made[name] = values.total
        elif name == "reward_seconds":
            made[name] = values.largest
        elif name != "turns" or values.largest > 1:
            made[name] = values.mean
            if name == "reward" or name.startswith("reward/"):
                made[name + ("_std" if name == "reward" else "/std")] = values.std
    if "length" in found:
        made["length_longest"] = found["length"].largest
    return made


def records(number: int, step: int, groups: Sequence[Group], count: int) -> str:
    """Lines of JSON about `count` samples, those of the first groups."""
    samples = [sample for group in groups for sample in group.samples][:count]
    rows = (
        {
            "rollout": number,
            "step": step,
            "where": sample.prompt.where,
            "sample": sample.number,
            "prompt": _asked(sample),
            "completion": sample.texts[0] if len(sample.texts) == 1 else sample.texts,
            "reward": sample.reward,
            "rewards": sample.rewards,
            "tokens": sample.length,
            "finish": sample.finish,
            **({"failures": sample.failures} if sample.failures else {}),
            **({"dropped": True} if sample.dropped else {}),
        }
        for sample in samples
    )
    return "".join(strict_json.write(row, ensure_ascii=False) + "\n" for row in rows)


def line(number: int, groups: Sequence[Group]) -> str:
    """A line about the first sample."""
    sample = groups[0].samples[0]
    prompt = _asked(sample)
    if isinstance(prompt, list) and prompt:
        prompt = prompt[-1].get("content")
    texts = shortened(" | ".join(sample.texts), SHOWN)
    return (
        f"rollout {number}: {shortened(str(prompt), SHOWN)!r} -> {texts!r}, "
        f"reward {sample.reward:.4g}, {sample.length} tokens"
    )


def _asked(sample: Sample) -> Any:
    record = sample.prompt.record
    return record.get("prompt", record.get("messages"))
