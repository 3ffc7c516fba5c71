"""Requests to the engine: how they are sampled, their state, and their progress. Imports no jax."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen. Logits are changed in the order of transformers:
    bias, penalties, temperature, top_k, top_p, min_p; a grammar's mask is applied before
    temperature.

    Adding a field is fine; `generate --out` then refuses to resume a file that an older version
    left unfinished."""

    max_tokens: int = 16
    """Maximum number of tokens of the answer."""
    temperature: float = 1.0
    """Divides the logits; 0: the likeliest token."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens that together reach this probability."""
    min_p: float = 0.0
    """Keep tokens that have this share of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies others, of tokens of prompt and answer."""
    presence_penalty: float = 0.0
    """Subtracted from logits of tokens of the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from logits of tokens of the answer, times their number."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Added to the logits of tokens."""
    seed: int = 0
    """Seed of this request's random numbers, which no other request changes."""
    choice: int = 0
    """Folded into the seed, so that requests with one seed draw different numbers: the number of
    the answer to one prompt, or of the prompt."""
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer, which holds them as its last."""
    min_tokens: int = 0
    """Tokens before which no stop token is chosen."""
    logprobs: int | None = None
    """Likeliest tokens to report beside each token of the answer; None: not even its own
    log-probability."""
    scaled: bool = False
    """Report log-probabilities of logits divided by the temperature."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each token of the prompt but the first."""
    grammar: Any = None
    """`grammar.Answer` that says which tokens may follow; None: all."""
    embed: bool = False
    """Answer with the hidden state of the prompt's last token, and no token; for max_tokens=1."""

    @classmethod
    def of(cls, given: Any, **own: Any) -> "Sampling":
        """Return the sampling with the fields that `given` (parsed arguments, a section, a
        request's body) has by the same name, and `own`, which replaces them."""
        fields = dataclasses.fields(cls)
        shared = {f.name: getattr(given, f.name) for f in fields if hasattr(given, f.name)}
        return cls(**{**shared, **own})


class Token(NamedTuple):
    """A token with its log-probability by the unfiltered float32 logits, as the model gives them
    unless `Sampling.scaled`."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """Likeliest tokens with their log-probabilities, the likeliest first."""


@dataclasses.dataclass(frozen=True)
class Output:
    """Progress of a request in one step."""

    request: int
    """The number that `Engine.add` gave."""
    tokens: tuple[Token, ...]
    """New tokens of the answer."""
    prompt: tuple[Token, ...] = ()
    """Tokens of the prompt that were computed, where their log-probabilities were asked for; the
    first has none."""
    finish: str | None = None
    """stop: a stop token, or the grammar's end; length: max_tokens, or the model's length; None: it
    goes on."""
    cached: int = 0
    """Tokens of the prompt that were found in the cache."""
    embedding: Any = None
    """float32 [D]: the normed residual stream at the prompt's last token, if it was asked for."""


# Compared by identity: the scheduler removes sequences from lists, and comparing fields would
# compare all their tokens.
@dataclasses.dataclass(eq=False)
class TokenSequence:
    """The tokens of a request, prompt and answer, and how far they are computed."""

    number: int
    tokens: list[int]
    prompt_length: int
    sampling: Sampling
    priority: int = 0
    """Lower goes first."""
    adapter: int = 0
    """0: none."""
    client: str = ""
    """Who asks: clients take turns."""
    replica: int = 0
    slot: int = 0
    computed: int = 0
    """Tokens whose arrays are cached."""
    tables: list[list[int]] = dataclasses.field(default_factory=list)
    """By page group: the page of each piece of the tokens; 0 where it was released."""
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    """Of its full pages."""
    drafts: list[int] = dataclasses.field(default_factory=list)
    """Guesses of the next tokens by modules of multi-token prediction."""
    reported: int = 0
    """Tokens of the prompt whose log-probabilities were reported."""
    cached: int = 0
    """Tokens of the prompt that were found in the cache when it first started."""
    preempted: int = 0
    """Times that it was preempted."""

    # Cached, because the scheduler asks for it at each step; a prompt does not change.
    @functools.cached_property
    def prompt_key(self) -> tuple[int, ...]:
        """Equal for sequences whose prompts have equal arrays."""
        return self.adapter, *self.tokens[: self.prompt_length]

    @property
    def answer_length(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def order(self) -> tuple[int, int]:
        """Sorts sequences by priority and arrival."""
        return self.priority, self.number


class Chunk(NamedTuple):
    """Tokens `start` to `start + size - 1` of a sequence, which a step computes: a prefill chunk,
    or the last token and drafts of the next ones, which the sequence does not hold yet."""

    sequence: TokenSequence
    start: int
    size: int
    drafts: tuple[int, ...] = ()
