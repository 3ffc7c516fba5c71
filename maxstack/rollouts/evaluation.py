"""Evaluation by rewards: answers to held-out prompts."""

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from maxstack.data.prompts import Prompts
from maxstack.faults import preemption
from maxstack.report.log import Log
from maxstack.report.metrics import Writer
from maxstack.rollouts.figures import figures, sums_of_rewards
from maxstack.rollouts.maker import Maker
from maxstack.rollouts.sample import Group, Sample
from maxstack.state import Tree

if TYPE_CHECKING:
    from maxstack.run import Run


class RewardEvaluator:
    """Answers the held-out prompts from the first on at each call, with the same random numbers, so
    that evaluations can be compared."""

    def __init__(self, run: "Run", maker: Maker, log: Log, writer: Writer):
        cfg, rollout = run.cfg, run.cfg.rollout
        assert rollout
        self._run, self._maker, self._log, self._writer = run, maker, log, writer
        self._temperature = rollout.eval_temperature
        self._at_once = cfg.eval.batch_size or rollout.prompts
        room = maker.generator.room - rollout.max_tokens
        self._prompts = Prompts(
            cfg.eval.data or cfg.data,
            1,
            [0],
            room,
            f"data.seq_len={cfg.data.seq_len} with rollout.max_tokens={rollout.max_tokens} "
            f"allows ({room} tokens; more with another data.seq_len or train.batch_size)",
            evaluation=True,
            whole=cfg.eval.data is not None,
            section="eval.data" if cfg.eval.data else "data",
        )
        self._start = self._prompts.state()

    def __call__(self, step: int, params: Tree) -> dict[str, float]:
        """The mean reward over at most eval.steps batches, its components, and `eval_loss`: the
        reward negated; written and said. Where no sample counts there is no reward to write, and it
        is the least there is."""
        began, samples = time.perf_counter(), list[Sample]()
        with self._maker.by(params, temperature=self._temperature):
            for groups in self._batches():
                preemption.raise_if_leaving()
                self._maker.complete("evaluation", groups)
                samples += [sample for group in groups for sample in group.samples]
        for line in self._prompts.damaged():
            self._log.warn(line)
        found = figures(sums_of_rewards(samples))
        row = {f"eval_{name}": value for name, value in found.items()}
        row |= {
            "eval_prompts": len(samples),
            "eval_length": sum(sample.length for sample in samples) / max(len(samples), 1),
            "eval_seconds": time.perf_counter() - began,
        }
        self._writer.write({"step": step, **row})
        parts = "".join(
            f", {name.removeprefix('reward/')} {value:.4f}"
            for name, value in found.items()
            if name.startswith("reward/") and not name.endswith("/std")
        )
        reward = "no sample counts, since a reward failed for each"
        if "reward" in found:
            reward = f"reward {found['reward']:.4f}"
        self._log.say(
            f"eval at step {step}: {reward}{parts} over {len(samples):,} held-out prompts"
        )
        worth = found.get("reward", -math.inf)
        return {**row, "eval_reward": worth, "eval_loss": -worth}

    def _batches(self) -> Iterator[list[Group]]:
        self._prompts.restore(self._start)
        left = self._run.cfg.eval.steps
        while left is None or left > 0:
            drawn = (self._prompts.next(0) for _ in range(self._at_once))
            groups = [Group.of(prompt, 1) for prompt in drawn if prompt]
            if not groups:
                return
            yield groups
            left = None if left is None else left - 1
