"""Evaluation by rewards of answers to held-out prompts."""

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from maxstack.data.prompts import Prompts
from maxstack.faults import preemption
from maxstack.report.log import Log
from maxstack.report.metrics import Writer
from maxstack.rollouts import metrics
from maxstack.rollouts.maker import Maker
from maxstack.rollouts.sample import Group, Sample
from maxstack.state import Tree

if TYPE_CHECKING:
    from maxstack.run import Run


class RewardEvaluator:
    """Answers the held-out prompts from the first on at each call, with the same random numbers, so
    evaluations can be compared."""

    def __init__(self, run: "Run", maker: Maker, log: Log, writer: Writer):
        cfg, rollout = run.cfg, run.cfg.rollout
        assert rollout
        self._run, self._maker = run, maker
        self._log, self._writer = log, writer
        self._temperature = rollout.eval_temperature
        self._at_once = cfg.eval.batch_size or rollout.prompts
        self._prompts = Prompts(
            cfg.eval.data or cfg.data,
            1,
            [0],
            *maker.prompt_limit(cfg.data.seq_len),
            evaluation=True,
            whole=cfg.eval.data is not None,
            section="eval.data" if cfg.eval.data else "data",
        )
        self._start = self._prompts.state()

    def __call__(self, step: int, params: Tree) -> dict[str, float]:
        """Compute, write and log the mean reward over at most eval.steps batches, its components,
        and `eval_loss`, the reward negated. Where every sample was dropped no reward is written,
        and -inf is returned."""
        began = time.perf_counter()
        samples: list[Sample] = []
        with self._maker.using(params, temperature=self._temperature):
            for groups in self._batches():
                # A signal ends the evaluation between batches: all processes agree on which.
                preemption.raise_if_leaving()
                self._maker.complete("evaluation", groups)
                samples += [sample for group in groups for sample in group.samples]
        for line in self._prompts.skipped():
            self._log.warn(line)
        found = metrics.compute(metrics.sum_rewards(samples))
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
        mean = "every sample was dropped, since a reward failed for each"
        if "reward" in found:
            mean = f"reward {found['reward']:.4f}"
        self._log.say(f"eval at step {step}: {mean}{parts} over {len(samples):,} held-out prompts")
        # Where nothing counts, the worst there is: -0, the loss of no reward, was the best where
        # rewards are negative.
        reward = found.get("reward", -math.inf)
        return {**row, "eval_reward": reward, "eval_loss": -reward}

    def _batches(self) -> Iterator[list[Group]]:
        # The same prompts at each call, from the first on.
        self._prompts.restore(self._start)
        left = self._run.cfg.eval.steps
        while left is None or left > 0:
            drawn = (self._prompts.next(0) for _ in range(self._at_once))
            groups = [Group.of(prompt, 1) for prompt in drawn if prompt]
            if not groups:
                return
            yield groups
            left = None if left is None else left - 1
