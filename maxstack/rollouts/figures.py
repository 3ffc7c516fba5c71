"""Figures of samples, for metrics, the log and rollouts.jsonl."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxstack.errors import shortened
from maxstack.report import strict_json
from maxstack.rollouts.sample import Group, Sample

SHOWN = 200
"""Characters of a text in the log."""


def of_rewards(samples: Sequence[Sample]) -> dict[str, float]:
    """Means and spreads of rewards, and how many failed."""
    counted = [sample for sample in samples if not sample.dropped]
    rewards = np.array([sample.reward for sample in counted] or [0.0])
    made: dict[str, Any] = {"reward": rewards.mean(), "reward_std": rewards.std()}
    for name in dict.fromkeys(name for sample in counted for name in sample.rewards):
        values = np.array([sample.rewards.get(name, 0.0) for sample in counted])
        made |= {f"reward/{name}": values.mean(), f"reward/{name}/std": values.std()}
    for name in dict.fromkeys(name for sample in samples for name in sample.failures):
        made[f"reward/{name}/failed"] = sum(name in sample.failures for sample in samples)
    return {name: float(value) for name, value in made.items()}


def figures(groups: Sequence[Group], drawn: int) -> dict[str, float]:
    """Figures of a rollout for which so many prompts were drawn."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = [sample.length for sample in samples]
    spreads = [np.std([sample.reward for sample in group.counted] or [0.0]) for group in groups]
    made = of_rewards(samples) | {
        "reward_group_std": float(np.mean(spreads)),
        "groups_without_signal": float(np.mean([group.equal for group in groups])),
        "prompts": float(drawn),
        "length": float(np.mean(lengths)),
        "length_longest": float(max(lengths)),
        "truncated": float(np.mean([sample.finish == "length" for sample in samples])),
    }
    if any(len(sample.texts) > 1 for sample in samples):
        made["turns"] = float(np.mean([len(sample.texts) for sample in samples]))
    return made


def together(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of all processes, each of which has equally many samples, as those of one:
    numbers of things are added, and of others the mean is taken."""
    made = {}
    for name in dict.fromkeys(name for one in found for name in one):
        values = [one.get(name, 0.0) for one in found]
        if name == "length_longest":
            made[name] = max(values)
        else:
            added = name == "prompts" or name.endswith("/failed")
            made[name] = sum(values) / (1 if added else len(found))
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
