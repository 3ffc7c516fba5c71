"""Samples of a rollout, their groups, and the rows of a batch that hold them.

Rows are packed: each holds equally many samples, one after the other, as segments that do not
attend to each other. A token carries whether the model sampled it, its log-probability in the
engine, and its sample's reward and group, so that advantages can be computed inside the step, over
the global batch, where every process and mesh sees the same.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxstack.data.prompts import Prompt
from maxstack.schema.rollout import RolloutConfig


@dataclasses.dataclass(eq=False)
class Sample:
    """A prompt with the model's answers, and an environment's messages between them."""

    prompt: Prompt
    number: int
    """Its number in its group, from 0."""
    ids: list[int]
    """All tokens, the prompt's first."""
    sampled: list[bool] = dataclasses.field(default_factory=list)
    """For each token, whether the model sampled it."""
    logps: list[float] = dataclasses.field(default_factory=list)
    """For each token, its log-probability in the engine; 0 where the model did not sample it."""
    texts: list[str] = dataclasses.field(default_factory=list)
    """Answers, turn by turn."""
    spelt: str = ""
    """The last answer with its special tokens spelled out, where a reward asks for it."""
    calls: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    """Tool calls of each answer."""
    messages: list[Any] | None = None
    """The conversation so far; None where the prompt is a text."""
    finish: str = "stop"
    """stop, or length where tokens ran out."""
    from_record: bool = False
    """True where the answer is the record's, not sampled."""
    done: bool = False
    reward: float = 0.0
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    """Unweighted values by name, of rewards and of their components."""
    environment_reward: float = 0.0
    """Rewards of the environment."""
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    """Reasons by the names of rewards that failed."""
    dropped: bool = False
    """True where a reward with `failure: drop` failed."""

    def add_context(self, tokens: Sequence[int]) -> None:
        """Add tokens that the model did not sample."""
        self.ids += tokens
        self.sampled += [False] * len(tokens)
        self.logps += [0.0] * len(tokens)

    def add_sampled(self, token: int, logp: float) -> None:
        """Add a token that the model sampled."""
        self.ids.append(token)
        self.sampled.append(True)
        self.logps.append(logp)

    @property
    def length(self) -> int:
        """Number of tokens that the model sampled."""
        return sum(self.sampled)


@dataclasses.dataclass(eq=False)
class Group:
    """The samples of one prompt."""

    prompt: Prompt
    samples: list[Sample]

    @classmethod
    def of(cls, prompt: Prompt, count: int) -> "Group":
        """Make so many samples that are still to be answered."""
        samples = [Sample(prompt, number, []) for number in range(count)]
        for sample in samples:
            sample.add_context(prompt.ids.tolist())
        return cls(prompt, samples)

    @property
    def kept(self) -> list[Sample]:
        """Samples that were not dropped."""
        return [sample for sample in self.samples if not sample.dropped]

    @property
    def has_no_signal(self) -> bool:
        """True where all rewards are the same in a batch's float32, so none is better than
        expected."""
        return len({np.float32(sample.reward) for sample in self.kept}) < 2


def make_rows(
    groups: Sequence[Group], first: int, shape: tuple[int, int], cfg: RolloutConfig
) -> dict[str, np.ndarray]:
    """Make arrays [rows, T] of groups, their samples spread evenly and in order; the groups'
    numbers in the batch begin at `first`."""
    integers = dict.fromkeys(("tokens", "targets", "positions", "segments", "group"), np.int32)
    floats = dict.fromkeys(("mask", "reward", "sampler"), np.float32)
    arrays = {name: np.zeros(shape, kind) for name, kind in (integers | floats).items()}
    samples = [(first + i, sample) for i, group in enumerate(groups) for sample in group.samples]
    each, rest = divmod(len(samples), shape[0])
    assert not rest, "rows hold equally many samples"
    for row in range(shape[0]):
        own = {name: array[row] for name, array in arrays.items()}
        at, segment = 0, 0
        for number, sample in samples[row * each : (row + 1) * each]:
            if not sample.dropped:
                # 0 is padding. A dropped sample leaves its place to padding, so that the others
                # keep their rows.
                segment += 1
                at = _write(own, at, segment, number, sample, cfg)
    return arrays


def _write(
    row: Mapping[str, np.ndarray],
    at: int,
    segment: int,
    number: int,
    sample: Sample,
    cfg: RolloutConfig,
) -> int:
    """Write a sample of group `number` into a row from position `at` on; return the position after
    it."""
    count = len(sample.ids) - 1
    span = slice(at, at + count)
    # The last token is only a target.
    row["tokens"][span] = sample.ids[:-1]
    row["targets"][span] = sample.ids[1:]
    row["positions"][span] = np.arange(count)
    row["segments"][span] = segment
    # DAPO's overlong filtering (arXiv:2503.14476, section 3.4): what was cut off is not punished.
    if not (cfg.truncated == "mask" and sample.finish == "length"):
        row["mask"][span] = sample.sampled[1:]
    # As mask: what is known of a token stands where that is the target.
    row["sampler"][span] = sample.logps[1:]
    row["group"][span] = number
    row["reward"][span] = sample.reward
    return at + count
