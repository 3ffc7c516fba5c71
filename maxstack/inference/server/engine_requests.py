"""Requests of the engine, made of the bodies of requests to the server."""

import dataclasses
import random
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from maxstack import strict_json
from maxstack.data.chat import to_template_messages
from maxstack.errors import DataError
from maxstack.inference.request import Sampling
from maxstack.inference.server.choices import Choice
from maxstack.inference.server.grammars import Rule
from maxstack.inference.server.refusal import Refusal
from maxstack.inference.server.schemas import Conversation, Prompts, SamplingBody, Structure, Tool
from maxstack.inference.server.state import State
from maxstack.inference.service import EngineRequest
from maxstack.inference.text import TextStream, answer_text
from maxstack.inference.tools import ToolFormat, ToolStream, marker_tokens


class Prompt(NamedTuple):
    """A prompt, and its text where the answer is to begin with it (echo)."""

    tokens: Sequence[int]
    echo: str | None = None


@dataclasses.dataclass
class AnswerOptions:
    """What a route adds to the sampling settings of a body."""

    max_tokens: int | None
    """None: as many as the model's length allows."""
    logprobs: int | None
    prompt_logprobs: int | None = None
    tools: ToolFormat | None = None
    """Format of tool calls, if they are read."""
    schema: Any = None
    """JSON schema of the tool calls that the answer must consist of."""
    parallel: bool = True
    """Whether an answer may hold more than one call."""


def split_prompts(state: State, given: Prompts, name: str, n: int = 1) -> Sequence[str | list[int]]:
    """Return the prompts in the field `name` of a body, each of which wants n answers. Refusal for
    none, and the errors of `Service.check` for more than may wait."""
    if not given:
        raise Refusal(400, f"{name}: is empty; give at least one token", param=name)
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    # Before anything is tokenized: as many must be able to wait.
    state.service.check(len(prompts) * n)
    return prompts  # type: ignore[return-value]


def encode(state: State, text: str, special: bool = True, whole: bool = False) -> list[int]:
    """Return the tokens of a text, in which spelt-out special tokens become themselves; `special`:
    with BOS, where the model has it. DataError for a text with more bytes than `max_length` tokens
    can stand for, before it is tokenized, and as soon as it has more tokens, unless `whole`."""
    length = state.served.engine.max_length
    remedy = f"serve.max_length={length} tokens; shorten it, or raise serve.max_length"
    try:
        document = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"a text is not Unicode: {error}; send whole characters") from None
    # Tokenizing a prompt of 8 MB only to refuse it made others wait 5.5 s and took 1.4 GB.
    if (fewest := state.tokenizer.fewest(document)) > length:
        raise DataError(
            f"the text has {len(document)} bytes, which are {fewest} tokens at least: it is longer "
            f"than {remedy}"
        )
    tokens = state.tokenizer.encode(b"").tolist() if special else []
    # In parts of 1 MiB, to end as soon as the text is too long.
    for ids, stop in state.tokenizer.encode_by_parts(document):
        tokens += ids.tolist()
        if len(tokens) > length and stop < len(document) and not whole:
            raise DataError(f"the text is longer than {remedy}")
    return tokens


def decode(state: State, tokens: Sequence[int]) -> str:
    """Return the text of tokens with special ones spelt out, the inverse of `encode`."""
    return answer_text(state.tokenizer, (), tokens, {*state.tokenizer.special})


def encode_messages(
    state: State, body: Conversation, tools: Sequence[Tool], **extra: Any
) -> list[int]:
    """Return the tokens of a conversation. Refusal for a model without chat template."""
    if state.template is None:
        raise Refusal(
            400,
            f"{state.name} has no chat template; start the server with --chat-template FILE, or "
            "ask /v1/completions",
        )
    described = [tool.model_dump(exclude_unset=True) for tool in tools]
    extra |= body.chat_template_kwargs
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    try:
        text = state.template.render(
            to_template_messages(messages), described or None, body.add_generation_prompt, **extra
        )
    except TypeError as error:
        raise Refusal(400, f"chat_template_kwargs: {error}") from None
    # The template has written BOS itself, where the model wants it.
    return encode(state, text, special=False)


def build_requests(
    state: State, body: SamplingBody, prompts: Sequence[Prompt], options: AnswerOptions
) -> tuple[list[EngineRequest], list[Choice]]:
    """Return n requests for each prompt, those of one prompt side by side, whose grammar is a
    `Rule`. Refusal, ConfigError or DataError for what cannot be answered. May take a while: not for
    the event loop."""
    if state.served.tokenizer is None and body.stops:
        raise Refusal(400, f"stop: {state.name} has no tokenizer; use stop_token_ids", param="stop")
    state.service.check(len(prompts) * body.n)
    rule = _rule(body, options.schema)
    # Stop tokens barred and all others masked would leave none.
    if rule is not None and body.min_tokens:
        raise Refusal(
            400,
            "min_tokens: cannot be kept beside a grammar, which may allow only the end; give one "
            "of them",
            param="min_tokens",
        )
    adapter = state.adapter_of(body.model)
    requests, choices = [], []
    for prompt in prompts:
        sampling = _sampling(state, body, prompt.tokens, options)
        for number in range(body.n):
            # The same seed for all; `choice` makes their keys differ.
            each = dataclasses.replace(sampling, choice=number, grammar=rule)
            requests.append(EngineRequest(prompt.tokens, each, body.priority, adapter))
            choices.append(_choice(state, body, prompt, each, options))
    return requests, choices


def _choice(
    state: State, body: SamplingBody, prompt: Prompt, sampling: Sampling, options: AnswerOptions
) -> Choice:
    tokenizer = state.served.tokenizer
    stream: TextStream | None = None
    tools: ToolStream | None = None
    if tokenizer is not None:
        shown = set() if body.skip_special_tokens else {*tokenizer.special}
        if options.tools:
            # Calls are marked by special tokens in some models, which have no text otherwise.
            shown |= marker_tokens(tokenizer, options.tools)
            tools = ToolStream(
                options.tools, random.SystemRandom(), bare=options.schema is not None
            )
        include = body.include_stop_str_in_output
        stream = TextStream(tokenizer, prompt.tokens, body.stops, include, shown)
    return Choice(
        tokenizer,
        prompt.tokens,
        sampling,
        stream,
        shows_stop=body.include_stop_str_in_output,
        own_stops=frozenset() if body.ignore_eos else state.served.stop_tokens,
        echo=prompt.echo,
        empty=options.max_tokens == 0,
        tools=tools,
        parallel=options.parallel,
    )


def _sampling(
    state: State, body: SamplingBody, prompt: Sequence[int], options: AnswerOptions
) -> Sampling:
    """Return the sampling settings without a grammar; a seed is drawn where none is given."""
    for name, tokens in {
        "stop_token_ids": body.stop_token_ids,
        "logit_bias": [*body.logit_bias],
    }.items():
        if outside := [token for token in tokens if not 0 <= token < state.vocab]:
            raise Refusal(
                400,
                f"{name}: token {outside[0]} is outside the model's vocabulary of {state.vocab}",
                param=name,
            )
    rest = state.served.engine.max_length - len(prompt)
    most = rest if options.max_tokens is None else options.max_tokens
    if body.min_tokens > most:
        raise Refusal(
            400,
            f"min_tokens: {body.min_tokens} is more than the {most} tokens that the answer may "
            "have; ask for fewer, or raise max_tokens",
            param="min_tokens",
        )
    own = frozenset() if body.ignore_eos else state.served.stop_tokens
    return Sampling.of(
        body,
        max_tokens=max(1, most),
        seed=secrets.randbits(48) if body.seed is None else body.seed,
        stop_tokens=own | {*body.stop_token_ids},
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
    )


def _rule(body: SamplingBody, schema: Any) -> Rule | None:
    """Return the grammar that answers follow, None for any text. Refusal for several."""
    own = body.structured_outputs or Structure()
    given = {
        name: rule
        for name, rule in {
            "tool_choice": ("json_schema", schema),
            "response_format": ("json_schema", _format_schema(body)),
            "guided_json": ("json_schema", _schema(body.guided_json)),
            "guided_regex": ("regex", body.guided_regex),
            "guided_choice": ("choices", body.guided_choice),
            "guided_grammar": ("lark", body.guided_grammar),
            "structured_outputs.json": ("json_schema", _schema(own.json_)),
            "structured_outputs.regex": ("regex", own.regex),
            "structured_outputs.choice": ("choices", own.choice),
            "structured_outputs.grammar": ("lark", own.grammar),
        }.items()
        if rule[1] is not None
    }
    if len(given) > 1:
        raise Refusal(400, f"{' and '.join(given)}: an answer follows one of them")
    return next((Rule(name, *rule) for name, rule in given.items()), None)


def _format_schema(body: SamplingBody) -> Any:
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None:
        raise Refusal(400, "response_format.json_schema: is missing", param="response_format")
    return form.json_schema.schema_


def _schema(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return strict_json.parse(given, "the JSON schema")
    except DataError as error:
        raise Refusal(400, str(error)) from None
