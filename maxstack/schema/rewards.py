"""The sections of rewards."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from maxstack.config import Fault, Items, PositiveFloat, PositiveInt, Regex, Section

ANSWER_FORM = (
    r"(?s)\s*<think>(?:(?!</?(?:think|answer)>).)*</think>"
    r"\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>\s*"
)
"""Reasoning and answer between their tags, each once (DeepSeek-R1, arXiv:2501.12948, table 1)."""
Failure = Literal["fail", "zero", "drop"]


class RewardPart(Section):
    """Keys of every kind of reward."""

    kind: str
    name: str | None = Field(None, min_length=1)
    """Names the reward in metrics; null: its kind, or its function."""
    weight: float = 1.0
    """Factor of the reward in the sum."""
    failure: Failure = "fail"
    """For a sample whose reward raises, is not a finite number or exceeds its limits. fail: it ends
    the run; zero: the reward counts 0; drop: the sample is left out. They are counted, and the
    first of each kind is named in the log."""

    @property
    def label(self) -> str:
        """The name in metrics and messages."""
        return self.name or self.kind


class TextReward(RewardPart):
    """Keys of rewards that read the completion's text."""

    special_tokens: bool = False
    """Special tokens in the completion are spelled out, but for the one that ended it. Without it
    those are that begin and end a call of a tool by the chat template, and no others."""


class WorkerReward(TextReward):
    """Keys of rewards that are computed in worker processes."""

    CALL: ClassVar[str] = ""
    """module:function that computes it."""
    SETTINGS: ClassVar[tuple[str, ...]] = ()
    """Keys that the function takes."""

    timeout: PositiveFloat = 5.0
    """Seconds that a call may take."""
    memory: PositiveFloat = 2.0
    """GiB of address space that a call may add."""

    @property
    def function(self) -> str:
        """module:function that computes it."""
        return self.CALL

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the function."""
        return {key: getattr(self, key) for key in self.SETTINGS}


class FunctionReward(WorkerReward):
    """A Python function of the prompt, the completion and the row."""

    kind: Literal["function"]
    """The reward."""
    call: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:function, imported from the working folder or from what is installed. It maps (prompt:
    str, completion: str, row: dict) to a number, or to a mapping of names to numbers, whose sum is
    the reward."""

    @property
    def label(self) -> str:
        return self.name or self.call.partition(":")[2]

    @property
    def function(self) -> str:
        return self.call


class ExactReward(TextReward):
    """1 where the completion equals a field of the row, apart from white space around it."""

    kind: Literal["exact"]
    """The reward."""
    field: str = "answer"
    """Field of the row."""


class RegexReward(WorkerReward):
    """1 where a regular expression is found in the completion."""

    CALL = "maxstack.rewards.built_in:regex"
    SETTINGS = ("pattern",)

    kind: Literal["regex"]
    """The reward."""
    pattern: Regex
    """Python's notation, with flags inside: (?s) lets a dot match the end of a line."""


class FormatReward(WorkerReward):
    """1 where a regular expression matches the whole completion."""

    CALL = "maxstack.rewards.built_in:form"
    SETTINGS = ("pattern",)

    kind: Literal["format"]
    """The reward."""
    pattern: Regex = ANSWER_FORM
    """Python's notation, with flags inside. By default <think>...</think> and then
    <answer>...</answer> (DeepSeek-R1, arXiv:2501.12948)."""


class MathReward(WorkerReward):
    """1 where what the completion's last \\boxed{} or \\fbox{} holds, or without one its last
    expression, equals a field of the row, by math-verify (extra math)."""

    CALL = "maxstack.rewards.mathematics:equal"
    SETTINGS = ("field",)

    kind: Literal["math"]
    """The reward."""
    failure: Failure = "zero"
    """For a sample whose reward raises or exceeds its limits, which an expression such as 9^9^9^9
    can do. fail: it ends the run; zero: the reward counts 0; drop: the sample is left out. They are
    counted, and the first of each kind is named in the log."""
    field: str = "answer"
    """Field of the row: a number, or text in LaTeX with or without $ or \\boxed{} around it."""


class JsonReward(WorkerReward):
    """1 where the completion is valid JSON."""

    CALL = "maxstack.rewards.built_in:valid_json"
    SETTINGS = ("keys",)

    kind: Literal["json"]
    """The reward."""
    keys: Items[str] = ()
    """Keys that it must have; with any, it must be an object."""


class NumberReward(WorkerReward):
    """1 where the last number in the completion equals the one in a field of the row, which may be
    a fraction (3/4) or a percentage (50% is 50 and 1/2) and have commas between thousands."""

    CALL = "maxstack.rewards.built_in:number"
    SETTINGS = ("field",)

    kind: Literal["number"]
    """The reward."""
    field: str = "answer"
    """Field of the row. Where it has ####, as GSM8K's answers do, what stands after the last one
    counts. A row without a number, or with several (12:30), is an error."""


class LengthReward(RewardPart):
    """Soft punishment of overlong completions (DAPO, arXiv:2503.14476, eq. 13): 0 up to `most` -
    `buffer` tokens, then falling evenly to -1 at `most`, and -1 beyond."""

    kind: Literal["length"]
    """The reward."""
    most: PositiveInt
    """Tokens of a completion from which on it is -1."""
    buffer: PositiveInt
    """Tokens before that in which it falls."""

    def own_faults(self) -> Iterator[Fault]:
        if self.buffer > self.most:
            yield "buffer", f"{self.buffer} is more than most={self.most}; make it smaller"


class ModelReward(RewardPart):
    """The score that a reward model gives the prompt with its completion."""

    kind: Literal["model"]
    """The reward."""
    path: str = Field(min_length=1)
    """A run of objective.kind=reward, or a folder of a reward model."""


AnyReward = Annotated[
    FunctionReward
    | ExactReward
    | RegexReward
    | FormatReward
    | MathReward
    | JsonReward
    | NumberReward
    | LengthReward
    | ModelReward,
    Field(discriminator="kind"),
]
