"""Metrics of samples: those of several processes equal those of one that has all samples."""

import contextlib
import json
import math
import types

import numpy as np
import pytest
import tiny

from maxstack.data.prompts import Prompt
from maxstack.evals.evaluation import StopEarly
from maxstack.report.log import Log
from maxstack.report.metrics import Writer
from maxstack.rollouts import metrics
from maxstack.rollouts.evaluation import RewardEvaluator
from maxstack.rollouts.sample import Group, Sample


def group(*rewards, dropped=(), turns=1, **components):
    """A group of one process: a sample for each reward, some of which do not count; components are
    of its first sample."""
    prompt = Prompt(np.zeros(3, np.int32), {}, "made up", 0)
    samples = [
        Sample(
            prompt,
            number,
            [],
            sampled=[True] * (number + 2),
            texts=["a"] * turns,
            finish="length" if number == 1 else "stop",
            reward=reward,
            rewards={"own": 2 * reward} | (components if number == 0 else {}),
            failures={"own": "raised"} if number in dropped else {},
            dropped=number in dropped,
        )
        for number, reward in enumerate(rewards)
    ]
    return Group(prompt, samples)


PROCESSES = [
    [group(1.0, 1.0, 1.0), group(3.0, 5.0, 0.0, dropped=[2], extra=7.0)],
    [group(0.0, 0.0, 9.0, dropped=[0, 1, 2]), group(2.0, 1e6, 4.0, turns=3)],
    [group(8.0, dropped=[0])],
]
"""Groups by process: another number of samples in each, and in the last none that counts."""


def exchanged(processes):
    """The figures that every process has after the exchange, which is by JSON."""
    own = [metrics.sum_groups(g, len(g) + i, 0.5 + i) for i, g in enumerate(processes)]
    return metrics.compute(metrics.merge(json.loads(json.dumps(own))))


def test_metrics_of_several_processes_are_those_of_all_samples():
    groups = [group for groups in PROCESSES for group in groups]
    samples = [sample for group in groups for sample in group.samples]
    rewards = np.array([sample.reward for sample in samples if not sample.dropped])
    by_group = [[s.reward for s in group.samples if not s.dropped] for group in groups]
    lengths = [sum(sample.sampled) for sample in samples]
    wanted = {
        "reward": rewards.mean(),
        "reward_std": rewards.std(),
        "reward/own": 2 * rewards.mean(),
        "reward/own/std": 2 * rewards.std(),
        "reward/own/failed": 5,
        "reward/extra": 7.0,
        "reward/extra/std": 0.0,
        "reward_group_std": np.mean([np.std(each) for each in by_group if each]),
        "groups_without_signal": 3 / 5,
        "prompts": (2 + 0) + (2 + 1) + (1 + 2),
        "length": np.mean(lengths),
        "length_longest": 4,
        "truncated": 4 / 13,
        "turns": (3 * 3 + 10) / 13,
        "reward_seconds": 2.5,
    }
    found = exchanged(PROCESSES)
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("large", [0.0, 1e8])
def test_a_spread_far_from_zero_keeps_its_digits(large):
    values = [[large + 0.5, large + 1.5], [large + 2.5], [large + 4.0] * 5]
    found = exchanged([[group(*rewards)] for rewards in values])
    assert found["reward_std"] == pytest.approx(np.std(np.concatenate(values)), rel=1e-9)


def test_a_metric_without_values_is_absent():
    found = exchanged([[group(2.0, 3.0, dropped=[0, 1])], [group(1.0, dropped=[0])]])
    assert "reward" not in found and "reward_std" not in found and "reward_group_std" not in found
    assert found["reward/own/failed"] == 3 and "turns" not in found


class Failing:
    """A maker whose samples do not count."""

    def prompt_limit(self, seq_len):
        return 184, ""

    def using(self, params, temperature):
        return contextlib.nullcontext()

    def complete(self, name, groups):
        for group in groups:
            for sample in group.samples:
                sample.dropped, sample.failures = True, {"exact": "raised"}


def test_an_evaluation_whose_samples_are_all_dropped_is_the_worst(tmp_path):
    cfg = tiny.with_rollouts(
        eval={"every": 5, "steps": 1}, train={"stop_early": {"metric": "eval_loss", "patience": 1}}
    )
    run = types.SimpleNamespace(cfg=cfg)
    log, writer = Log(tmp_path, 10, True), Writer(tmp_path, first=True)
    found = RewardEvaluator(run, Failing(), log, writer)(5, {})
    (row,) = tiny.metrics(tmp_path)
    assert row["eval_reward/exact/failed"] == row["eval_prompts"] == 8
    assert (
        "eval_reward" not in row
        and "every sample was dropped" in (tmp_path / "log.txt").read_text()
    )
    assert (found["eval_reward"], found["eval_loss"]) == (-math.inf, math.inf)
    early = StopEarly(cfg.train.stop_early, {})
    assert not early.read(5, found) and not early.read(10, {"eval_loss": 3.0})
