"""Rewards of samples, from worker processes and from reward models."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from maxstack.data.examples import Segment, add_end_token
from maxstack.errors import ConfigError, DataError
from maxstack.rewards.pool import Case, Outcome, Pool
from maxstack.rollouts.sample import Sample
from maxstack.schema.mesh import AXES
from maxstack.schema.rewards import ModelReward

if TYPE_CHECKING:
    from maxstack.run import Run

AT_ONCE = 32
"""Samples that a reward model scores at a time."""


class Scores:
    """Computes rewards while other samples are still being answered."""

    def __init__(self, run: "Run", pool: Pool):
        self._rewards = run.cfg.rewards
        self._pool = pool
        self._models = {
            i: RewardModel(run, reward.path)
            for i, reward in enumerate(run.cfg.rewards)
            if isinstance(reward, ModelReward)
        }
        # By identity (Sample has eq=False): equal answers are samples of their own.
        self._futures: dict[Sample, Future[list[Outcome | None]]] = {}
        self.first_failures: dict[str, str] = {}
        """First failure of each reward, to be logged once."""

    def submit(self, sample: Sample, prompt: str) -> None:
        """Begin to compute the rewards of a complete sample."""
        case = Case(
            prompt,
            sample.texts[-1],
            sample.spelt,
            sample.prompt.record,
            sample.length,
            sample.finish == "length",
            f"{sample.prompt.where}, sample {sample.number}",
        )
        self._futures[sample] = self._pool.submit(case)

    def collect(self, samples: Sequence[Sample]) -> None:
        """Wait for the rewards of samples and set them. DataError for a failure of a reward with
        `failure: fail`."""
        # The devices score while the workers still compute; both are waited for below.
        by_model = {i: model(samples) for i, model in self._models.items()}
        for at, sample in enumerate(samples):
            sample.reward = sample.environment_reward
            outcomes = self._futures.pop(sample).result()
            for i, reward in enumerate(self._rewards):
                outcome = outcomes[i]
                if i in by_model:
                    outcome = Outcome(by_model[i][at], {}, None)
                assert outcome is not None
                if outcome.failure:
                    self._note_failure(sample, reward.label, reward.failure, outcome.failure)
                sample.reward += reward.weight * outcome.value
                sample.rewards[reward.label] = outcome.value
                for name, value in outcome.components.items():
                    sample.rewards[f"{reward.label}/{name}"] = value

    def _note_failure(self, sample: Sample, label: str, policy: str, failure: str) -> None:
        if policy == "fail":
            raise DataError(
                f"{failure}; fix the reward, or set its `failure` to zero or drop, which count "
                "such samples and go on"
            )
        sample.failures[label] = failure
        sample.dropped |= policy == "drop"
        self.first_failures.setdefault(label, f"{failure}; such samples are counted ({policy})")

    def forget(self) -> None:
        """Cancel the rewards of samples that are not collected."""
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()


class RewardModel:
    """Scores a prompt and its answer with a reward model, on the mesh of the run."""

    def __init__(self, run: "Run", path: str):
        """ConfigError where the path is not a reward model, or one with other tokens."""
        from maxstack import starting_weights
        from maxstack.inference.records import BatchScorer
        from maxstack.inference.trained_model import config_of, read_weights
        from maxstack.run import assemble

        each = [f"mesh.{axis}={size}" for axis, size in run.mesh.shape.items() if axis in AXES]
        try:
            cfg, own = config_of(path, ["run.virtual_devices=null", *each])
        except ConfigError as error:
            raise ConfigError(f"rewards: path: {error}") from error
        if not cfg.decoder.head.scores:
            raise ConfigError(
                f"rewards: path: {path} is not a reward model; give a run with "
                "objective.kind=reward, or a folder of a reward model"
            )
        starting_weights.check_tokens(run, "rewards: path", path)
        scorer = assemble(cfg, run.mesh, trains=False)
        self._scorer = BatchScorer(scorer, read_weights(path, scorer, own), AT_ONCE, 0)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return a score for each sample."""
        scores: list[float] = []
        for begin in range(0, len(samples), AT_ONCE):
            some = samples[begin : begin + AT_ONCE]
            segments = [add_end_token(Segment(np.array(s.ids, np.int32), {})) for s in some]
            scores += [made["reward"] for made in self._scorer(segments)]
        return scores
