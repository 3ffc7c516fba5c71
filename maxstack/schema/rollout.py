"""The configuration of rollouts: answers that a model gives to prompts while it is trained."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from maxstack.config import (
    CountInt,
    Fault,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    SizeInt,
)


class EnvironmentConfig(Section):
    """A Python class that answers the model, turn after turn. `reset(row, seed)` gives the prompt,
    or None for the row's own; `step(text, tool_calls)` gives (what the model reads next, reward,
    done). Texts and messages of an environment are not trained on."""

    call: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:class."""
    turns: PositiveInt = 8
    """Answers of a sample at most."""
    timeout: PositiveFloat = 30.0
    """Seconds of a turn."""
    memory: PositiveFloat = 2.0
    """GiB of memory that a turn may take."""
    failure: Literal["fail", "zero", "drop"] = "fail"
    """A sample whose environment raises or exceeds its limits. fail: the run ends; zero: its reward
    is 0; drop: it is left out."""


class RolloutConfig(Section):
    """Samples that a step learns from: prompts of data.sources, answers by the current weights."""

    prompts: SizeInt
    """Prompts of a rollout."""
    samples: SizeInt = 8
    """Answers to each prompt: a group."""
    max_tokens: SizeInt = 256
    """Tokens of an answer at most; with an environment, of each turn."""
    temperature: PositiveFloat = 1.0
    """Divides the logits, of sampling and of the loss alike."""
    top_k: NonNegativeInt = 0
    """Only so many of the likeliest tokens are sampled; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only the likeliest tokens that together have this probability are sampled."""
    eval_temperature: NonNegativeFloat | None = None
    """The same in evaluations, which take one answer to each held-out prompt; 0: the likeliest
    tokens; null: that of training."""
    minibatches: CountInt = 1
    """Steps over which the prompts of a rollout are spread."""
    epochs: PositiveInt = 1
    """Times that each sample is learned from."""
    ahead: NonNegativeInt = 0
    """Rollouts that are under way while older ones are learned from: their samples are by weights
    that are so many rollouts old. 0: by the current ones."""
    drop_equal: bool = False
    """Replace groups whose rewards are all equal by other prompts (DAPO's dynamic sampling, Yu et
    al. 2025, arXiv:2503.14476, section 3.2)."""
    draws: CountInt = 8
    """With drop_equal: rounds of further prompts at most; groups that are still missing then are
    filled with equal ones, which is told."""
    truncated: Literal["keep", "mask"] = "keep"
    """Answers that end for want of tokens. mask: they count in rewards and are not learned from
    (DAPO's overlong filtering)."""
    tensor: PositiveInt | None = None
    """Devices over which each replica of the engine splits the model; the rest hold replicas.
    null: the engine uses the weights where training has them, without a copy."""
    environment: EnvironmentConfig | None = None
    """What answers the model; null: a sample is one answer."""
    on_policy: float = Field(1.0, ge=0, le=1)
    """Share of prompts whose answers are sampled; of the others the record's `completion` is the
    answer (GKD's lambda, Agarwal et al. 2024, arXiv:2306.13649). For distillation."""
    permute: bool = False
    """Give each sample the reward of another one of its rollout: a control, which must learn
    nothing."""
    workers: PositiveInt = 2
    """Processes that compute rewards."""
    sandbox: bool = False
    """Rewards and environments run without network, environment variables and home, with memory,
    processes and files bounded: by bubblewrap, which must be installed (docs/RL.md)."""
    record: NonNegativeInt = 8
    """Samples of each rollout that rollouts.jsonl of the run's folder keeps; 0: none."""
    show: NonNegativeInt = 50
    """Rollouts between two of which a sample is shown in the log; 0: none is."""

    @property
    def steps(self) -> int:
        """Steps that learn from a rollout."""
        return self.minibatches * self.epochs

    @property
    def behind(self) -> int:
        """Older weights that the state holds, so that a rollout can be made again."""
        return self.ahead + (self.steps > 1)

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
