"""Bodies of requests, as OpenAI's API and vLLM's additions have them. Unknown fields and
unsupported values are refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from maxstack import strict_json
from maxstack.errors import DataError, quoted
from maxstack.inference.server.refusal import Refusal
from maxstack.schema.sampling import (
    AnyTopK,
    MinP,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TopP,
)

LOGPROBS = 20
"""Likeliest tokens that a request may ask for."""
CHOICES = 128
STOPS, STOP_LENGTH = 16, 256
BIASES = 1024
PROMPTS = MESSAGES = 1 << 14
# 650,000 keys two levels down took 500 to 700 MiB and 8 s, since pydantic reports each.
FIELDS = 2048
"""Keys of a body, and of an object in it."""
# Reading 200,000 objects (8 MB) holds the interpreter's lock for 0.13 s, and pydantic's checks of
# as many messages held it for 0.24 s.
LISTS = 200_000
"""Lists and objects of a body, and marks of such in its texts. A conversation of MESSAGES, each
with a part and a call, has 100,000."""

Count = Annotated[int, Field(ge=0)]
TopLogprobs = Annotated[int, Field(ge=0, le=LOGPROBS)]
Stop = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]
Key = Annotated[int, Field(strict=False)]
"""An integer as a key of JSON, which is a text."""
# Validation ends at the first fault: a list of a million of them took 1.1 GiB and 14 s.
Tokens = Annotated[list[int], Field(fail_fast=True)]


def _check_prompts(given: Any) -> Any:
    """Refuse too many items that are no ids before pydantic tries each type of the union."""
    # Two million prompts held the interpreter's lock for 5 s, while each type of the union was
    # tried.
    if isinstance(given, list) and len(given) > PROMPTS and not isinstance(given[0], int):
        raise ValueError(f"should have at most {PROMPTS} items, not {len(given)}")
    return given


Prompts = Annotated[
    str
    | Tokens
    | Annotated[list[str], Field(fail_fast=True)]
    | Annotated[list[Tokens], Field(fail_fast=True)],
    BeforeValidator(_check_prompts),
]


class Body(BaseModel):
    """A JSON object; null means absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        """Refuse too many keys: pydantic would report each."""
        if isinstance(data, dict) and len(data) > FIELDS:
            raise ValueError(f"is an object of more than {FIELDS} keys")
        return cls._without_null(data)

    @classmethod
    def _without_null(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}


class StreamOptions(Body):
    """What a stream sends beside the answer."""

    model: None = None
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Usage in every chunk."""
    include_obfuscation: Literal[False] = False


class JsonSchema(Body):
    """A schema that an answer follows."""

    model: None = None
    name: str
    description: str = ""
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Body):
    """Form of an answer."""

    model: None = None
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Choices = Annotated[list[str], Field(fail_fast=True)]


class Structure(Body):
    """What an answer follows; the fields guided_* of a request are its older names in vLLM."""

    model: None = None
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class SamplingBody(Body):
    """How an answer is sampled. `user`, `metadata`, `store`, `safety_identifier`,
    `prompt_cache_key` and `service_tier` are taken and change nothing."""

    max_tokens: Count | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: AnyTopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        dict[Key, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=BIASES)
    ] = {}
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES)] = 1
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=STOPS)] = []
    stop_token_ids: Annotated[Tokens, Field(max_length=BIASES)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Count = 0
    skip_special_tokens: bool = True
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structure | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    priority: Annotated[int, Field(ge=0, le=1000)] = 0
    """Lower goes first."""
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] = False
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] = "auto"

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @model_validator(mode="after")
    def _check_agreement(self) -> "SamplingBody":
        if self.stops and self.min_tokens:
            raise ValueError("min_tokens: cannot be kept beside stop strings; give one of them")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options: is for stream=true")
        return self


class EmbeddingBody(Body):
    """Of /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool = True
    user: str | None = None


class CompletionBody(SamplingBody):
    """Of /v1/completions."""

    prompt: Prompts
    max_tokens: Count = 16
    echo: bool = False
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool = True
    best_of: Literal[1] = 1
    suffix: Literal[""] = ""


class Part(Body):
    """A part of a message."""

    model: None = None
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """A function and its arguments, a JSON object or its text."""

    model: None = None
    name: str
    arguments: str | dict[str, Any]


class Called(Body):
    """A call of a tool in a message."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: None = None
    function: CalledFunction


class Message(Body):
    """A message of a conversation; the template may read other fields too, and distinguishes null
    from absent."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: None = None
    role: str
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[Called], Field(fail_fast=True)] | None = None

    @classmethod
    def _without_null(cls, data: Any) -> Any:
        return data


class Function(Body):
    """A function that the model may call."""

    model: None = None
    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(Body):
    """A tool."""

    model: None = None
    type: Literal["function"]
    function: Function


class Named(Body):
    """A function by its name."""

    model: None = None
    name: str


class NamedTool(Body):
    """A tool by its name."""

    model: None = None
    type: Literal["function"] = "function"
    function: Named


class Conversation(Body):
    """Messages and tools, which the chat template turns into a prompt."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MESSAGES)]
    tools: Annotated[list[Tool], Field(fail_fast=True)] = []
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class ChatBody(Conversation, SamplingBody):
    """Of /v1/chat/completions."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] = ["text"]
    reasoning_effort: str | None = None
    """Given to the chat template."""

    @model_validator(mode="after")
    def _check_pairs(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: is for logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens: is max_completion_tokens; give one of them")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice: is for tools, and there are none")
        return self


class TokenizeBody(Conversation):
    """Of /tokenize: a text, or a conversation."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MESSAGES)] = []
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Of /detokenize."""

    tokens: Tokens


AnyBody = TypeVar("AnyBody", bound=Body)
MEANINGS: Mapping[str, str] = {
    "extra_forbidden": "this server does not know it; leave it out",
    "none_required": "this server does not support it; leave it out",
    "missing": "is missing",
}


RENAMED = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "do_sample": "temperature (0: the likeliest token)",
    "inputs": "prompt or messages",
    "guided_decoding": "structured_outputs",
}
"""Fields of other servers -> ours."""


def parse_body(kind: type[AnyBody], data: bytes) -> AnyBody:
    """Parse the body of a request. Refusal with status 400 that names the wrong field."""
    try:
        content = strict_json.parse(data, "the body", most=LISTS)
        _check_sizes(content)
        return kind.model_validate(content)
    except ValidationError as error:
        raise _refused(error) from None
    except DataError as error:
        raise Refusal(400, str(error)) from None


def _check_sizes(content: Any) -> None:
    """Raise Refusal for objects with too many keys: pydantic would report each."""
    objects = [content, *content.values()] if isinstance(content, dict) else []
    if any(isinstance(each, dict) and len(each) > FIELDS for each in objects):
        raise Refusal(400, f"the body has an object of more than {FIELDS} keys")


def _refused(error: ValidationError) -> Refusal:
    """Return a refusal that names the first wrong field, with all that it could have been."""
    # A union reports a fault for each of its types; all of the first field together say what it
    # takes.
    faults = error.errors(include_url=False)
    path = faults[0]["loc"][:1]
    same = [fault for fault in faults if fault["loc"][:1] == path]
    if missing := [fault for fault in same if fault["type"] == "missing"]:
        same = missing
    words = dict.fromkeys(MEANINGS.get(fault["type"], fault["msg"]) for fault in same)
    deepest = max(same, key=lambda fault: len(fault["loc"]))
    name = ".".join(map(str, deepest["loc"]))
    given = f"={quoted(deepest['input'])}" if deepest["type"] != "missing" and name else ""
    message = "; ".join(list(words)[:4]).replace("Value error, ", "")
    if deepest["type"] == "extra_forbidden" and name in RENAMED:
        message = f"this server does not know it; here it is {RENAMED[name]}"
    param = str(path[0]) if path else None
    return Refusal(400, f"{name}{given}: {message}" if name else message, param=param)
