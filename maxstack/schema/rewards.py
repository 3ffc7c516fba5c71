"""The sections of rewards."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from maxstack.config import Fault, Items, PositiveFloat, PositiveInt, Regex, Section
from maxstack.config.own_kinds import Kind, Open, last_name

ANSWER_FORM = (
    r"(?s)\s*<think>(?:(?!</?(?:think|answer)>).)*</think>"
    r"\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>\s*"
)
"""Reasoning and answer between their tags, each once (DeepSeek-R1, arXiv:2501.12948, table 1)."""
Failure = Literal["fail", "zero", "drop"]


class RewardPart(Kind, Section):
    """Keys shared by all kinds of reward."""

    PLACES = ("CALL",)

    kind: str
    name: str | None = Field(None, min_length=1)
    """Name in metrics; null: its kind, or its function."""
    weight: float = 1.0
    """Weight in the sum."""
    failure: Failure = "fail"
    """What to do if a reward raises an exception, is not a finite number or exceeds its limits.
    fail: end the run; zero: count a reward of 0; drop: leave the sample out. Failures are counted,
    and the first of each kind is shown in the log."""

    @property
    def label(self) -> str:
        """The name in metrics and messages."""
        return self.name or last_name(self.kind)


class TextReward(RewardPart):
    """Keys shared by rewards that read the completion's text."""

    special_tokens: bool = False
    """Keep all special tokens in the text except the one that ended it. false: keep only those that
    begin and end a tool call in the chat template."""


class WorkerReward(TextReward):
    """Keys shared by rewards that worker processes compute."""

    CALL: ClassVar[str] = ""
    """module:function that computes it."""
    SETTINGS: ClassVar[tuple[str, ...]] = ()
    """Keys that the function takes."""

    timeout: PositiveFloat = 5.0
    """Timeout of a call in seconds."""
    memory: PositiveFloat = 2.0
    """Maximum address space in GiB that a call may add."""

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
    """Selects this reward."""
    call: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:function, imported from the working directory or from installed packages. It maps
    (prompt: str, completion: str, row: dict) to a number, or to a mapping of names to numbers,
    which are added."""

    @property
    def label(self) -> str:
        return self.name or self.call.partition(":")[2]

    @property
    def function(self) -> str:
        return self.call


class ExactReward(TextReward):
    """1 where the completion equals a field of the row, ignoring white space around it."""

    kind: Literal["exact"]
    """Selects this reward."""
    field: str = "answer"
    """Field of the row that holds the expected completion."""


class RegexReward(WorkerReward):
    """1 where a regular expression matches somewhere in the completion."""

    CALL = "maxstack.rewards.built_in:regex"
    SETTINGS = ("pattern",)

    kind: Literal["regex"]
    """Selects this reward."""
    pattern: Regex
    """Regular expression in Python syntax, with inline flags: (?s) lets a dot match newlines."""


class FormatReward(WorkerReward):
    """1 where a regular expression matches the whole completion."""

    CALL = "maxstack.rewards.built_in:form"
    SETTINGS = ("pattern",)

    kind: Literal["format"]
    """Selects this reward."""
    pattern: Regex = ANSWER_FORM
    """Regular expression in Python syntax, with inline flags. Default: <think>...</think> and then
    <answer>...</answer> (DeepSeek-R1, arXiv:2501.12948)."""


class MathReward(WorkerReward):
    """1 where the content of the completion's last \\boxed{} or \\fbox{}, or without one its last
    expression, equals a field of the row, by math-verify (extra math)."""

    CALL = "maxstack.rewards.mathematics:equal"
    SETTINGS = ("field",)

    kind: Literal["math"]
    """Selects this reward."""
    failure: Failure = "zero"
    """What to do if math-verify raises an exception or exceeds its limits, as on 9^9^9^9. fail: end
    the run; zero: count a reward of 0; drop: leave the sample out. Failures are counted, and the
    first of each kind is shown in the log."""
    field: str = "answer"
    """Field of the row: a number, or LaTeX with or without $ or \\boxed{} around it."""


class JsonReward(WorkerReward):
    """1 where the completion is valid JSON."""

    CALL = "maxstack.rewards.built_in:valid_json"
    SETTINGS = ("keys",)

    kind: Literal["json"]
    """Selects this reward."""
    keys: Items[str] = ()
    """Required keys; with any, the completion must be an object."""


class NumberReward(WorkerReward):
    """1 where the last number in the completion equals the number in a field of the row. Fractions
    (3/4), percentages (50% equals both 50 and 1/2) and commas between thousands are understood."""

    CALL = "maxstack.rewards.built_in:number"
    SETTINGS = ("field",)

    kind: Literal["number"]
    """Selects this reward."""
    field: str = "answer"
    """Field of the row. After ####, as in GSM8K's answers, only the last part counts. A row without
    a number, or with several (12:30), is an error."""


class LengthReward(RewardPart):
    """Soft penalty on overlong completions (DAPO, arXiv:2503.14476, eq. 13): 0 up to `most` -
    `buffer` tokens, then falling linearly to -1 at `most`, and -1 beyond."""

    kind: Literal["length"]
    """Selects this reward."""
    most: PositiveInt
    """Length in tokens at which the penalty reaches -1."""
    buffer: PositiveInt
    """Number of tokens before `most` over which the penalty falls to -1."""

    def own_faults(self) -> Iterator[Fault]:
        if self.buffer > self.most:
            yield "buffer", f"{self.buffer} is more than most={self.most}; make it smaller"


class ModelReward(RewardPart):
    """The score that a reward model gives the prompt with its completion."""

    kind: Literal["model"]
    """Selects this reward."""
    path: str = Field(min_length=1)
    """A run with objective.kind=reward, or a folder of a reward model."""


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
    Open(RewardPart),
]
