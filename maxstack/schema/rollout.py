"""The configuration of rollouts: answers of the model to prompts during training."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from maxstack.config import (
    CountInt,
    Fault,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    SizeInt,
)
from maxstack.schema.sampling import Temperature, TopK, TopP


class EnvironmentConfig(Section):
    """A Python class that converses with the model. `reset(row, seed)` returns the prompt, or None
    for the row's own; `step(text, tool_calls)` returns (next message, reward, done). Texts and
    messages of an environment are not trained on."""

    call: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:class."""
    turns: PositiveInt = 8
    """Maximum number of model turns per sample."""
    timeout: PositiveFloat = 30.0
    """Timeout of a turn in seconds."""
    memory: PositiveFloat = 2.0
    """Memory limit of a turn in GiB."""
    failure: Literal["fail", "zero", "drop"] = "fail"
    """What to do if an environment raises an exception or exceeds its limits. fail: end the run;
    zero: count a reward of 0; drop: leave the sample out."""


class RolloutConfig(Section):
    """Samples to learn from: answers of the current weights to prompts of data.sources."""

    prompts: SizeInt
    """Prompts per rollout."""
    samples: SizeInt = 8
    """Group size: answers per prompt."""
    max_tokens: SizeInt = 256
    """Maximum number of tokens of an answer; with an environment, of each turn."""
    temperature: float = Field(1.0, gt=0, le=1000)
    """Temperature of sampling, and of the loss."""
    top_k: TopK = 0
    """Sample from this many of the likeliest tokens; 0: from all."""
    top_p: TopP = 1.0
    """Sample from the fewest likeliest tokens that reach this probability (nucleus sampling)."""
    eval_temperature: Temperature | None = None
    """Temperature in evaluations, which sample one answer per held-out prompt; 0: greedy; null: as
    in training."""
    minibatches: CountInt = 1
    """Number of steps that the prompts of a rollout are spread over."""
    epochs: PositiveInt = 1
    """Number of times to learn from each sample."""
    ahead: NonNegativeInt = 0
    """Number of rollouts to generate ahead while the model learns from older ones; their samples
    come from weights that are this many rollouts old. 0: on-policy."""
    drop_equal: bool = False
    """Replace each group whose rewards are all equal with the group of another prompt (DAPO's
    dynamic sampling, Yu et al. 2025, arXiv:2503.14476, section 3.2)."""
    draws: CountInt = 8
    """With drop_equal: maximum number of rounds of replacement prompts; groups still missing then
    are filled with equal ones, which the log reports."""
    truncated: Literal["keep", "mask"] = "keep"
    """What to do with answers that reach max_tokens. keep: learn from them; mask: count their
    rewards without learning from them (DAPO's overlong filtering)."""
    tensor: PositiveInt | None = None
    """Number of devices to shard each engine replica over; the other devices hold replicas. null:
    use the weights where training has them, without a copy."""
    environment: EnvironmentConfig | None = None
    """Environment that the model converses with; null: a sample is one answer."""
    on_policy: float = Field(1.0, ge=0, le=1)
    """Fraction of prompts with sampled answers; for the rest the record's `completion` is the
    answer (GKD's lambda, Agarwal et al. 2024, arXiv:2306.13649). For distillation."""
    permute: bool = False
    """Give each sample the reward of another sample of its rollout. This is a control experiment,
    in which the model should learn nothing."""
    workers: PositiveInt = 2
    """Number of reward processes."""
    sandbox: bool = False
    """Run rewards and environments without network access, environment variables or home directory,
    and with limited memory, processes and files, by bubblewrap, which must be installed
    (docs/RL.md)."""
    record: NonNegativeInt = 8
    """Number of samples of each rollout to write to rollouts.jsonl in the run's folder; 0: none."""
    show: NonNegativeInt = 50
    """Number of rollouts between samples shown in the log; 0: none."""

    @property
    def steps(self) -> int:
        """Steps that learn from a rollout."""
        return self.minibatches * self.epochs

    @property
    def behind(self) -> int:
        """Number of older weights in the state, from which rollouts under way can be made again."""
        return self.ahead + 1 if self.steps > 1 else self.ahead

    def own_faults(self) -> Iterator[Fault]:
        if self.prompts % self.minibatches:
            yield (
                "minibatches",
                f"rollout.prompts={self.prompts} are not divisible by it; use a divisor",
            )

    def room(self, rows: int, seq_len: int) -> int:
        """Tokens that a sample has at most, with its prompt, in steps of `rows` rows."""
        each = self.prompts // self.minibatches * self.samples // rows
        return seq_len // each + 1
