"""Conversations, completions and preferences in the forms that data sets have, as messages or
texts.

OpenAI's `messages`, ShareGPT's `conversations`, and prompts with completions become one of two
forms: a Conversation, which a chat template renders, or a Completion, a text and its continuation.
A preference becomes two of them with the same prompt; if the record has none by itself, the prompt
is what both answers begin with. A key or a form that is not known is a DataError rather than a
guess, since it would change in silence what is trained on.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxstack import strict_json
from maxstack.data.chat import THOUGHT, to_template_messages
from maxstack.data.presets import suggest_setting
from maxstack.errors import DataError, quoted, shortened

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
"""Roles by what ShareGPT's `from` calls them."""
Messages = list[dict[str, Any]]
TRAINING_KEYS = {
    *("train", "training", "trainable", "train_detail", "training_detail"),
    *("loss", "loss_mask", "loss_weight", "mask"),
}
"""Keys by which other programs say what of a message is trained on."""


class Conversation(NamedTuple):
    """Messages of a chat, of which the last ones, from `trained` on, may be trained on."""

    messages: Messages
    tools: list[Any] | None
    trained: int = 0
    weights: Mapping[int, float] = {}
    """Weights of the tokens of messages that give one, by the number of the message."""


class Completion(NamedTuple):
    """A prompt and its continuation, both plain text that no template changes."""

    prompt: str
    completion: str


Example = Conversation | Completion


def read_example(record: Mapping[str, Any]) -> Example:
    """Return the conversation of a record with `messages`, or ShareGPT's `conversations`, or
    `prompt` and `completion`, each of them a text or messages. DataError for anything else."""
    if record.get("completion") is not None:
        return read_continuation(record, "completion")
    for key in ("messages", "conversations"):
        if record.get(key) is not None:
            return _conversation(_messages(record, key), _tools(record))
    raise _missing_keys(record, "messages, conversations, or prompt and completion")


def read_continuation(record: Mapping[str, Any], key: str) -> Example:
    """Return a record's `prompt` with the continuation under `key`."""
    prompt = record.get("prompt")
    if prompt is None:
        raise _missing_keys(record, "prompt")
    # Two texts are a completion without a template; a system message has a place in a chat alone.
    if isinstance(prompt, str) and isinstance(record.get(key), str) and not record.get("system"):
        return Completion(prompt, record[key])
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    before = _messages({**record, "prompt": prompt}, "prompt")
    answer = record.get(key)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    elif isinstance(answer, dict):
        answer = [answer]
    after = _cut_prompt(before, _messages({key: answer}, key), key)
    return _conversation(before + after, _tools(record), len(before))


def read_prompt(record: Mapping[str, Any]) -> Example:
    """Return the prompt of a record, without an answer: `prompt`, a text or messages, or its
    `messages`."""
    if isinstance(record.get("prompt"), str):
        if not record.get("system"):
            return Completion(record["prompt"], "")
        record = {**record, "prompt": [{"role": "user", "content": record["prompt"]}]}
    if "prompt" not in record and "messages" not in record:
        raise _missing_keys(record, "prompt or messages")
    messages = _messages(record, "messages" if record.get("prompt") is None else "prompt")
    # A prompt with its answer would show the model what it is to find.
    if messages[-1]["role"] == "assistant":
        raise DataError(
            "ends with an answer of the assistant, which the model would be shown; leave the last "
            "message out, or train on it: record.kind=chat"
        )
    return _conversation(messages, _tools(record), len(messages))


def read_messages(given: Any) -> Messages:
    """Return a list of messages as templates take them. DataError for anything else."""
    return _conversation(_messages({"messages": given}, "messages"), None).messages


def prompt_of(given: Example) -> Any:
    """Return what an example's answer answers."""
    return given.prompt if isinstance(given, Completion) else given.messages[: _answer(given)]


def exchange_answer(given: Example, other: Example) -> Example:
    """Return the prompt of one example with the answer of another. DataError if one is a text and
    the other messages."""
    if isinstance(given, Completion) and isinstance(other, Completion):
        return Completion(given.prompt, other.completion)
    if isinstance(given, Conversation) and isinstance(other, Conversation):
        before, begin = given.messages[: _answer(given)], _answer(other)
        # Numbers of messages change with the prompt that is before them.
        moved = {i - begin + len(before): weight for i, weight in other.weights.items()}
        return Conversation(before + other.messages[begin:], given.tools, len(before), moved)
    raise DataError("some records are texts and others are messages; make them all one kind")


def _answer(given: Conversation) -> int:
    """Return the number of the first message of the answer: the last of the assistant, unless the
    answer is given by itself."""
    answers = [i for i, message in enumerate(given.messages) if message["role"] == "assistant"]
    return given.trained or (answers[-1] if answers else len(given.messages))


def read_preference(record: Mapping[str, Any]) -> tuple[Example, Example]:
    """Return (chosen, rejected) of a record: with a `prompt`, or each with the prompt that both
    begin with, or best and worst of `completions` by their `scores`."""
    if "completions" in record:
        record = {**record, **_best_and_worst(record)}
    for key in ("chosen", "rejected"):
        if record.get(key) is None:
            raise _missing_keys(record, "chosen and rejected, or completions and scores")
    if record.get("prompt") is not None:
        return read_continuation(record, "chosen"), read_continuation(record, "rejected")
    chosen, rejected = record["chosen"], record["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _split_where_they_part(chosen, rejected)
    both = [_messages(record, key) for key in ("chosen", "rejected")]
    shared = 0
    for ours, theirs in zip(*both, strict=False):
        if ours != theirs:
            break
        shared += 1
    # With nothing left on one side there is no answer that could be chosen or rejected.
    if shared == 0 or shared in map(len, both):
        raise DataError(
            "chosen and rejected share no prompt, or one holds the other; give the prompt by itself"
        )
    tools = _tools(record)
    return _conversation(both[0], tools, shared), _conversation(both[1], tools, shared)


def read_margin(record: Mapping[str, Any]) -> float:
    """Return by how much the chosen answer is better: `margin`, or the difference of the scores; 0
    if the record has neither."""
    if "completions" in record and "margin" not in record:
        scores = _scores(record)
        return max(scores) - min(scores)
    return read_number(record, "margin") if record.get("margin") is not None else 0.0


def read_label(record: Mapping[str, Any]) -> bool:
    """Return the `label` of a record: true for an answer that is wanted."""
    label = record.get("label")
    # 1 and 0 are equal to True and False, so they pass as well.
    if label not in (True, False):
        raise DataError(f"label={quoted(label)}: must be true (wanted) or false")
    return bool(label)


def read_number(record: Mapping[str, Any], key: str) -> float:
    """Return a finite number of a record. DataError for anything else."""
    value = record.get(key)
    # Written so that NaN fails the comparison; the bound keeps float32 finite.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise DataError(f"{key}={quoted(value)}: must be a number")
    return float(value)


def _split_where_they_part(chosen: str, rejected: str) -> tuple[Completion, Completion]:
    """Split two texts at the last white space of their common beginning, into one prompt and two
    answers."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    # Back to a space: answers that begin with the same letters would otherwise be cut inside a
    # word.
    space = max(chosen.rfind(" ", 0, shared), chosen.rfind("\n", 0, shared))
    if space < 0 or chosen == rejected:
        raise DataError("chosen and rejected share no prompt, or are equal; give the prompt itself")
    # A space begins the answers, as tokenizers have it; a line end ends the prompt.
    cut = space if chosen[space] == " " else space + 1
    return tuple(Completion(text[:cut], text[cut:]) for text in (chosen, rejected))  # type: ignore[return-value]


def _best_and_worst(record: Mapping[str, Any]) -> dict[str, Any]:
    scores = _scores(record)
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if scores[best] == scores[worst]:
        raise DataError("completions: all have one score, so none is chosen")
    return {"chosen": record["completions"][best], "rejected": record["completions"][worst]}


def _scores(record: Mapping[str, Any]) -> list[float]:
    completions, scores = record.get("completions"), record.get("scores")
    if not isinstance(completions, list) or not isinstance(scores, list):
        raise DataError("completions and scores: must be lists")
    if len(completions) != len(scores) or len(scores) < 2:
        raise DataError(
            f"{len(completions)} completions and {len(scores)} scores; there must be as many, and "
            "2 or more"
        )
    return [read_number({f"scores[{i}]": score}, f"scores[{i}]") for i, score in enumerate(scores)]


def _cut_prompt(before: Messages, answer: Messages, key: str) -> Messages:
    """Return an answer to messages without these, if it repeats them, as in
    ultrafeedback_binarized. DataError where another turn of a user is in it."""
    asked = before
    # The answer may repeat the prompt without the system message that a record has by itself.
    if before[0]["role"] == "system" and answer[0]["role"] != "system":
        asked = before[1:]
    if asked and answer[: len(asked)] == asked:
        # The prompt would otherwise stand twice in the conversation.
        answer = answer[len(asked) :]
    if any(message["role"] == "user" for message in answer):
        raise DataError(
            f"{key}: holds a turn of the user that is not the prompt's, so it is not known where "
            "the answer begins; give the whole conversation as the prompt, and its last answer as "
            f"{key}"
        )
    return answer


def _conversation(messages: Messages, tools: list[Any] | None, trained: int = 0) -> Conversation:
    """Return messages without their keys `weight`, which templates do not know. DataError for a
    weight that is none, and for other keys that say what is to be trained on."""
    weights, plain = {}, []
    for i, message in enumerate(messages):
        # Other programs read these keys; passing over them would train on what should be left out.
        if unread := [key for key in message if key in TRAINING_KEYS]:
            raise DataError(
                f"message {i}: {unread[0]} is not read, and would be trained on in silence; say it "
                "as `weight` of the assistant's message: 1, or 0 to leave it out"
            )
        weight = message.get("weight")
        if weight is not None:
            weights[i] = read_number(message, "weight")
            if weights[i] < 0 or (weights[i] and message["role"] != "assistant"):
                raise DataError(
                    f"message {i}: weight={quoted(weight)} of a message of the "
                    f"{message['role']}; only messages of the assistant count, from 0 on"
                )
        # A template could write the weight into the text.
        plain.append({key: value for key, value in message.items() if key != "weight"})
    return Conversation(plain, tools, trained, weights)


def _messages(record: Mapping[str, Any], key: str) -> Messages:
    given = record.get(key)
    if not isinstance(given, list) or not given:
        wanted = "a text or a list of messages" if key == "prompt" else "a list of messages"
        raise DataError(f"{key}: is {_kind(given)}; must be {wanted}")
    messages = [_message(message, f"{key}[{i}]") for i, message in enumerate(given)]
    system = record.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return to_template_messages(messages)


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a message with its role and content, of OpenAI's form or ShareGPT's."""
    if not isinstance(message, dict):
        raise DataError(f"{where}: is {_kind(message)}; must be a mapping with role and content")
    if "from" in message and "value" in message:
        role, value = message["from"], message["value"]
        if not isinstance(role, str) or role not in ROLES:
            raise DataError(f"{where}.from={quoted(role)}: must be one of {', '.join(ROLES)}")
        if role == "function_call":
            return {"role": "assistant", "content": "", "tool_calls": _calls(value, where)}
        # ShareGPT's names vary by data set; templates know those of OpenAI.
        message = {"role": ROLES[role], "content": value}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{where}: has no role; must be a mapping with role and content")
    instead = any(message.get(key) for key in ("tool_calls", *THOUGHT))
    if message.get("content") in (None, []) and not instead:
        keys = ", ".join(map(str, message))
        said = "is empty" if "content" in message else f"is missing; it has {shortened(keys, 100)}"
        raise DataError(f"{where}: content {said}, and a message without calls needs it")
    if not isinstance(message.get("content"), str | list | None):
        raise DataError(f"{where}.content={quoted(message['content'])}: must be text")
    # Tables such as Parquet fill absent keys with null, which templates would take for values.
    plain = {name: value for name, value in message.items() if value is not None}
    return {"content": "", **plain}


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the tool calls of ShareGPT's function_call: JSON of a name with arguments, or of a
    list of them."""
    try:
        calls = strict_json.parse(value) if isinstance(value, str) else value
        calls = calls if isinstance(calls, list) else [calls]
        return [
            {
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{where}.value: a function_call must be JSON with name and arguments: "
            f"{shortened(str(error), 100)}"
        ) from error


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    # Data sets of tables hold the list as a text of JSON.
    if isinstance(tools, str) and tools.strip():
        tools = strict_json.parse(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise DataError(f"tools: is {_kind(tools)}; must be a list")
    return tools


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "missing" if value is None else f"a{'n' * name.startswith(('a', 'i'))} {name}"


def _missing_keys(record: Mapping[str, Any], wanted: str) -> DataError:
    keys: Sequence[str] = [*map(str, record)]
    hint = f"; set {shape}" if (shape := suggest_setting(record)) else ""
    return DataError(
        f"no {wanted} in it; it has {shortened(', '.join(keys), 200) or 'nothing'}{hint}"
    )
