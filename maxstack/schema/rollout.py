"""The configuration of rollouts: answers that a model gives to prompts while it is trained."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

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

if TYPE_CHECKING:
    from maxstack.schema.config import Config


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

    def faults(self, cfg: "Config") -> Iterator[Fault]:
        """(key, what is wrong and what to do) of sizes that do not fit each other."""
        rows = cfg.train.batch_size
        if self.prompts % self.minibatches:
            yield (
                "rollout.minibatches",
                f"rollout.prompts={self.prompts} are not divisible by it; give a divisor",
            )
            return
        prompts = self.prompts // self.minibatches
        if prompts % rows and rows % prompts:
            yield (
                "train.batch_size",
                f"{rows} rows cannot share the {prompts} prompts of a step evenly; give a "
                f"divisor or a multiple of {prompts}",
            )
            return
        if prompts * self.samples % rows:
            yield (
                "train.batch_size",
                f"{rows} rows cannot share the {prompts * self.samples} samples of a step evenly; "
                f"give a divisor of it",
            )
            return
        if self.room(cfg) <= self.max_tokens:
            each = prompts * self.samples // rows
            yield (
                "data.seq_len",
                f"a row holds {each} samples, each of at most {self.room(cfg)} tokens, and "
                f"rollout.max_tokens={self.max_tokens} leave none for a prompt; raise data.seq_len "
                "or train.batch_size",
            )
        for key, data in cfg.data_sections.items():
            if data.overlong == "cut":
                yield f"{key}.overlong", "a prompt is not cut: its end matters most; use drop"
            if data.packing != "fit":
                yield f"{key}.packing", "rollouts are packed whole: set packing: fit"
        if self.on_policy < 1 and (self.environment or cfg.objective.kind != "distill"):
            yield (
                "rollout.on_policy",
                "answers of records are for objective.kind=distill, and no environment answers "
                "them; leave it out",
            )
        if cfg.eval.every and not cfg.rewards and not self.environment:
            yield "eval.every", "evaluations of samples are of rewards: give some, or set it to 0"
        names = [reward.label for reward in cfg.rewards]
        for index, name in enumerate(names):
            if name in names[:index]:
                yield f"rewards.{index}.name", f"{name} is there already; give another name"

    def room(self, cfg: "Config") -> int:
        """Tokens of a sample at most, its prompt included."""
        each = self.prompts // self.minibatches * self.samples // cfg.train.batch_size
        return cfg.data.seq_len // each + 1
