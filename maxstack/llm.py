"""A model that answers prompts, in Python: `LLM`, `SamplingParams` and results by the names that
users of vLLM know.

    llm = maxstack.LLM("runs/quickstart", max_requests=8)
    params = maxstack.SamplingParams(max_tokens=40, temperature=0)
    for result in llm.generate(["The ", "A "], params):
        print(result.prompt, result.outputs[0].text)

Prompts are texts, lists of tokens, or conversations: lists of messages with role and content.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import pydantic
from pydantic import Field

from maxstack.errors import ConfigError, DataError, shortened
from maxstack.report.progress import progress
from maxstack.schema.sampling import (
    AnyTopK,
    MinP,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TopP,
)

if TYPE_CHECKING:
    from maxstack.data.chat import ChatTemplate
    from maxstack.inference.generation import Answer, Question
    from maxstack.inference.request import Token

Message: TypeAlias = dict[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class SamplingParams:
    """How answers are chosen. pydantic.ValidationError (a ValueError) for an unknown name or
    a value out of range."""

    n: Annotated[int, Field(ge=1)] = 1
    """Answers to each prompt."""
    max_tokens: Annotated[int, Field(ge=1)] = 16
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens before which no end is chosen."""
    temperature: Temperature = 1.0
    """Divides the logits; 0: the likeliest token."""
    top_k: AnyTopK = 0
    """Keep this many of the likeliest tokens; 0 or -1: all."""
    top_p: TopP = 1.0
    """Keep the fewest likeliest tokens that together reach this probability."""
    min_p: MinP = 0.0
    """Keep tokens that have this share of the likeliest token's probability."""
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """By token, added to the logits."""
    seed: int | None = None
    """Of the random numbers. None: each prompt of a call has numbers of its own, the same each
    time; with a seed, equal prompts have equal answers."""
    stop: str | list[str] | None = None
    """Texts that end an answer."""
    stop_token_ids: list[int] | None = None
    """Tokens that do, beside the model's own."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on behind the model's own ends."""
    skip_special_tokens: bool = True
    logprobs: Annotated[int, Field(ge=0)] | None = None
    """Likeliest tokens to report beside each token; None: no log-probabilities."""
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    """The same for the tokens of the prompt."""


class Logprob(NamedTuple):
    """A token's log-probability by the model's own logits, before sampling changes them."""

    logprob: float
    rank: int | None
    """1: the likeliest; None for a token that is not among those reported."""
    decoded_token: str


Logprobs: TypeAlias = list[dict[int, Logprob]]
"""For each token of an answer: it, and the likeliest in its place."""


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """An answer."""

    index: int
    """Its number among those to the same prompt."""
    text: str
    """Empty for a model without a tokenizer."""
    token_ids: list[int]
    """With the token that ended the answer."""
    cumulative_logprob: float | None
    logprobs: Logprobs | None
    finish_reason: str
    """stop or length."""
    stop_reason: int | str | None
    """What of `stop` or `stop_token_ids` ended it; None: an end of the model's own, or none."""


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers."""

    prompt: str | Sequence[Message] | None
    """As it was given; None for tokens."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """For each token of the prompt; None for the first, which nothing predicts."""
    outputs: list[CompletionOutput]


class LLM:
    """A model whose weights stay in memory between calls. Not for several threads."""

    def __init__(
        self,
        model: str | Path,
        *,
        overrides: Sequence[str] = (),
        chat_template: str | None = None,
        **serve: Any,
    ):
        """`model`: whatever `maxstack generate` takes: a run, a checkpoint, a Hugging Face folder,
        a GGUF file, a model's name. `overrides`: keys of the configuration, `a.b=value`; `serve`:
        those of its section serve (docs/CONFIG.md). ConfigError where the model cannot generate,
        does not fit, or has no such key."""
        from maxstack.inference.engine_setup import First, start

        own = [f"serve.{key}={json.dumps(value, default=str)}" for key, value in serve.items()]
        self._served = start(
            str(model), [*overrides, *own], check=lambda *_: First(1, self._BEGINNING)
        )
        # A later prompt may begin like one that was answered.
        self._served.engine.scheduler.keep_prefixes(True)
        self._chat_template = chat_template

    _BEGINNING = 1024
    """Tokens for which the cache begins."""

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer at most."""
        return self._served.engine.max_length

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one prompt or several -> their results in order. `adapter`: a name in
        serve.adapters. DataError for a prompt that cannot be answered, before any is."""
        from maxstack.inference.generation import answer_all

        params = sampling_params or SamplingParams()
        given = _several(prompts)
        encoded = [self._encode(i, prompt) for i, prompt in enumerate(given)]
        questions = (
            self._question(i, choice, tokens, params, adapter)
            for i, tokens in enumerate(encoded)
            for choice in range(params.n)
        )
        ended: dict[tuple[int, int], Answer] = {}
        bar = progress(len(given) * params.n, "generating", "answers") if use_tqdm else None
        try:
            for answer in answer_all(self._served.engine, questions):
                ended[answer.question.key] = answer
                if bar is not None:
                    bar.update()
        finally:
            if bar is not None:
                bar.close()
        results = []
        for i, (prompt, tokens) in enumerate(zip(given, encoded, strict=True)):
            answers = [ended[i, choice] for choice in range(params.n)]
            outputs = [self._output(answer, params) for answer in answers]
            # Tokens have no text of their own that was given.
            shown = None if _is_tokens(prompt) else prompt
            reported = self._prompt_logprobs(answers[0])
            results.append(RequestOutput(shown, tokens, reported, outputs))  # type: ignore[arg-type]
        return results

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; the same as `generate` with them."""
        return self.generate(messages, sampling_params, adapter=adapter, use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
    ) -> Iterator[str]:
        """Yield the answer to one prompt in pieces, as they become certain."""
        from maxstack.inference.generation import stream_answer

        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ConfigError(f"stream: n={params.n}; one answer is streamed, so leave n out")
        if self._served.tokenizer is None:
            raise ConfigError(f"{self._served.model} has no tokenizer, so its answers have no text")
        question = self._question(0, 0, self._encode(0, prompt), params, adapter)
        yield from stream_answer(self._served.engine, question)

    @functools.cached_property
    def _template(self) -> "ChatTemplate":
        from maxstack.inference.engine_setup import chat_template

        served = self._served
        if served.template is not None and self._chat_template is None:
            return served.template
        return chat_template(served.model, served.cfg, served.own, self._chat_template)

    def _encode(self, i: int, prompt: Prompt) -> list[int]:
        from maxstack.inference.generation import encode, encode_messages

        served, where = self._served, f"prompt {i}"
        if not isinstance(prompt, str) and _is_tokens(prompt):
            tokens = [int(token) for token in prompt]  # type: ignore[arg-type]
        elif served.tokenizer is None:
            raise ConfigError(
                f"{served.model} has no tokenizer; name one in data.tokenizer, or give prompts as "
                "lists of tokens"
            )
        else:
            try:
                if isinstance(prompt, str):
                    tokens = encode(served.tokenizer, None, prompt, False, None)
                else:
                    tokens = encode_messages(served.tokenizer, self._template, [*prompt])  # type: ignore[list-item]
            except DataError as error:
                raise DataError(f"{where}: {error}") from None
        outside = [token for token in tokens if not 0 <= token < served.cfg.decoder.vocab]
        if outside:
            raise DataError(
                f"{where}: token {outside[0]} is outside the model's vocabulary of "
                f"{served.cfg.decoder.vocab}"
            )
        try:
            served.engine.check(tokens)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        return tokens

    def _question(
        self, i: int, choice: int, tokens: list[int], params: SamplingParams, adapter: str | None
    ) -> "Question":
        from maxstack.inference.generation import Question
        from maxstack.inference.request import Sampling
        from maxstack.inference.text import TextStream

        tokenizer, text = self._served.tokenizer, None
        if tokenizer is not None:
            stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
            shown = () if params.skip_special_tokens else {*tokenizer.special}
            included = params.include_stop_str_in_output
            text = TextStream(tokenizer, tokens, stops, included, shown)
        elif params.stop:
            raise ConfigError(f"stop: {self._served.model} has no tokenizer; use stop_token_ids")
        ends = frozenset() if params.ignore_eos else self._served.stop_tokens
        sampling = Sampling.of(
            params,
            stop_tokens=ends | {*(params.stop_token_ids or ())},
            seed=params.seed or 0,
            choice=choice if params.seed is not None else i * params.n + choice,
        )
        return Question((i, choice), tokens, sampling, text, adapter, f"prompt {i}")

    def _output(self, answer: "Answer", params: SamplingParams) -> CompletionOutput:
        question, tokens = answer.question, [token.token for token in answer.tokens]
        logprobs = cumulative = None
        if params.logprobs is not None:
            logprobs = [self._named(token) for token in answer.tokens]
            cumulative = sum(token.logprob or 0.0 for token in answer.tokens)
        reason: int | str | None = question.text.stopped if question.text else None
        if reason is None and answer.finish == "stop" and tokens:
            reason = tokens[-1] if tokens[-1] in (params.stop_token_ids or ()) else None
        return CompletionOutput(
            question.key[1], answer.text or "", tokens, cumulative, logprobs, answer.finish, reason
        )

    def _prompt_logprobs(self, answer: "Answer") -> list[dict[int, Logprob] | None] | None:
        if not answer.prompt:
            return None
        return [None, *(self._named(token) for token in answer.prompt[1:])]

    def _named(self, token: "Token") -> dict[int, Logprob]:
        """Return what is reported of a token and of the likeliest in its place."""
        assert token.logprob is not None
        named = {token.token: Logprob(token.logprob, None, self._text(token.token))}
        for rank, (other, logprob) in enumerate(token.top, 1):
            named[other] = Logprob(logprob, rank, self._text(other))
        return named

    def _text(self, token: int) -> str:
        import numpy as np

        tokenizer = self._served.tokenizer
        if tokenizer is None or token >= tokenizer.vocab_size:
            return ""
        return tokenizer.special.get(token) or tokenizer.decode(np.array([token], np.int32)).decode(
            errors="replace"
        )


def _is_tokens(prompt: Any) -> bool:
    return not isinstance(prompt, str) and not any(isinstance(each, (str, dict)) for each in prompt)


def _several(prompts: Any) -> list[Any]:
    """Return the prompts of one or several. DataError for what is none."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        items = [*prompts]
    except TypeError:
        items = []
    if not items:
        raise DataError(
            f"prompts: {shortened(repr(prompts), 80)}; wanted: a text, tokens, messages with role "
            "and content, or a list of these"
        )
    if all(isinstance(item, dict) for item in items):
        return [items]
    if not any(isinstance(item, str) or hasattr(item, "__len__") for item in items):
        return [items]
    return items
