"""Records in the shapes of published data sets, as the keys that conversations, preferences and
prompts are read from: `record: {preset: alpaca}`."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from maxstack import strict_json
from maxstack.errors import DataError, shortened
from maxstack.schema.data import Record, TextRecord

Raw = Mapping[str, Any]
TURN = re.compile(r"\n\n(Human|Assistant):")
SPOKEN = {"Human": "user", "Assistant": "assistant", "prompter": "user", "assistant": "assistant"}
"""Roles of hh-rlhf and nectar, and of oasst."""
TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
"""Types of xlam's parameters, which are Python's, in words of JSON Schema."""
MISFITS = TypeError, ValueError, LookupError, AttributeError
"""What reading a record of another shape raises; DataError is a ValueError."""


class Preset(NamedTuple):
    """A shape of records."""

    keys: Sequence[str]
    """Those that are needed."""
    made: Callable[..., dict[str, Any]]
    """A function of the record to the keys that are read."""
    more: Sequence[str] = ()
    """Those that are read where they are there."""


def apply_preset(record: Raw, kind: Record) -> dict[str, Any]:
    """Return the record with the keys that its kind is read from: columns by the names that
    `record.columns` gives them, and what its preset makes of them. DataError for a key that is
    missing."""
    if not isinstance(kind, TextRecord):
        return dict(record)
    renamed = dict(record)
    for ours, theirs in kind.columns.items():
        if theirs not in record:
            raise DataError(f"record.columns: {_missing_key(record, theirs)}")
        renamed[ours] = record[theirs]
    if kind.preset is None:
        return renamed
    preset = PRESETS[kind.preset]
    for key in preset.keys:
        if renamed.get(key) is None:
            raise DataError(f"record.preset={kind.preset}: {_missing_key(renamed, key)}")
    try:
        return {**renamed, **preset.made(renamed)}
    except MISFITS as error:
        said = error if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"record.preset={kind.preset}: is not of this shape: {shortened(str(said), 200)}"
        ) from error


def _missing_key(record: Raw, key: str) -> str:
    return f"no {key} in it; it has {shortened(', '.join(map(str, record)), 200) or 'nothing'}"


def keys_read(kind: Record) -> set[str]:
    """Return the keys of a record that its columns and its preset read."""
    if not isinstance(kind, TextRecord):
        return set()
    preset = PRESETS[kind.preset] if kind.preset else Preset((), dict)
    return {*kind.columns.values(), *preset.keys, *preset.more}


def _ask(question: str, system: Any = None) -> list[dict[str, Any]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": question}]


def _alpaca(record: Raw, given: str = "input") -> dict[str, Any]:
    """Read an instruction, its input after a blank line, and the turns before it (`history`)."""
    more = record.get(given)
    question = f"{record['instruction']}\n\n{more}" if more else record["instruction"]
    *before, last = _ask(question, record.get("system"))
    for user, assistant in record.get("history") or ():
        before += _ask(user) + [{"role": "assistant", "content": assistant}]
    answer = record["output" if given == "input" else "response"]
    return {"prompt": [*before, last], "completion": answer}


def _question(record: Raw, answer: str = "answer") -> dict[str, Any]:
    asked = _ask(record["question"], record.get("system"))
    return {"prompt": asked, "completion": record[answer]}


def _gsm8k(record: Raw) -> dict[str, Any]:
    """Read a record of GSM8K; rewards compare with the number after ####."""
    whole, mark, number = record["answer"].rpartition("####")
    answer = number.strip() if mark else record["answer"]
    return _question(record) | {"answer": answer}


def _math(record: Raw) -> dict[str, Any]:
    """Read a record of MATH, whose answer stands in the solution's last box, or by itself."""
    answer = record.get("answer") or record["solution"]
    return {
        "prompt": _ask(record["problem"]),
        "completion": record["solution"],
        "answer": answer,
    }


def _turns(text: str) -> list[dict[str, Any]]:
    """Return messages of a text in which each begins with a blank line and Human: or Assistant:."""
    before, *parts = TURN.split(text)
    if before.strip() or not parts:
        raise DataError("a text begins with a blank line and Human:")
    messages = [
        {"role": SPOKEN[role], "content": content.strip()}
        for role, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    return messages if messages[-1]["content"] else messages[:-1]


def _hh_rlhf(record: Raw) -> dict[str, Any]:
    return {key: _turns(record[key]) for key in ("chosen", "rejected")}


def _nectar(record: Raw) -> dict[str, Any]:
    """Best against worst by rank."""
    ranked = sorted(record["answers"], key=lambda answer: answer["rank"])
    if len(ranked) < 2 or ranked[0]["rank"] == ranked[-1]["rank"]:
        raise DataError("answers: must be of two ranks or more")
    chosen, rejected = ranked[0]["answer"], ranked[-1]["answer"]
    return {"prompt": _turns(record["prompt"]), "chosen": chosen, "rejected": rejected}


def _orca_pairs(record: Raw) -> dict[str, Any]:
    return {"prompt": _ask(record["question"], record.get("system"))}


def _xlam(record: Raw) -> dict[str, Any]:
    calls = [{"type": "function", "function": call} for call in _json(record["answers"])]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return {
        "prompt": _ask(record["query"]),
        "completion": [answer],
        "tools": [_tool(tool) for tool in _json(record["tools"])],
    }


def _json(value: Any) -> Any:
    return strict_json.parse(value) if isinstance(value, str) else value


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a function of xlam, whose parameters are by name, in OpenAI's form."""
    if tool.get("type") == "function":
        return tool
    given = tool.get("parameters") or {}
    if "properties" not in given:
        needed = [
            name
            for name, parameter in given.items()
            if "optional" not in parameter.get("type", "") and "default" not in parameter
        ]
        properties = {name: _parameter(parameter) for name, parameter in given.items()}
        given = {"type": "object", "properties": properties, "required": needed}
    return {"type": "function", "function": {**tool, "parameters": given}}


def _parameter(parameter: dict[str, Any]) -> dict[str, Any]:
    more = {key: value for key, value in parameter.items() if key != "type"}
    return _type(parameter.get("type", "").partition(",")[0].strip()) | more


def _type(text: str) -> dict[str, Any]:
    """Python's type in JSON Schema: of List[int] {"type": "array", "items": ...}; nothing of one
    that it has not."""
    outer, _, inner = text.partition("[")
    found = TYPES.get(outer.lower())
    if found == "array" and inner:
        return {"type": found, "items": _type(inner.removesuffix("]"))}
    return {"type": found} if found else {}


def _oasst(record: Raw) -> dict[str, Any]:
    """Return the path of the best-ranked replies, up to the last one of the assistant."""
    messages, node = list[dict[str, Any]](), record["prompt"]
    while node is not None:
        messages.append({"role": SPOKEN[node["role"]], "content": node["text"]})
        replies = [reply for reply in node.get("replies") or () if not reply.get("deleted")]
        node = min(replies, key=_rank, default=None)
    if messages[-1]["role"] == "user":
        messages.pop()
    if not messages:
        raise DataError("a tree without a reply")
    return {"messages": messages, "prompt": None}


def _rank(reply: Raw) -> float:
    rank = reply.get("rank")
    return float("inf") if rank is None else rank


PRESETS: Mapping[str, Preset] = {
    "alpaca": Preset(("instruction", "output"), _alpaca, ("input", "system", "history")),
    "dolly": Preset(
        ("instruction", "response"), lambda record: _alpaca(record, "context"), ("context",)
    ),
    "qa": Preset(("question", "answer"), _question, ("system",)),
    "gsm8k": Preset(("question", "answer"), _gsm8k),
    "math": Preset(("problem", "solution"), _math, ("answer",)),
    "hh-rlhf": Preset(("chosen", "rejected"), _hh_rlhf),
    "nectar": Preset(("prompt", "answers"), _nectar),
    "orca-pairs": Preset(("question", "chosen", "rejected"), _orca_pairs, ("system",)),
    "xlam": Preset(("query", "answers", "tools"), _xlam),
    "oasst": Preset(("prompt",), _oasst),
}
"""By name; docs/POSTTRAINING.md has them in a table."""
SHAPES = (
    ("pairs", ("chosen", "rejected")),
    ("pairs", ("completions", "scores")),
    ("labelled", ("completion", "label")),
    ("chat", ("messages",)),
    ("chat", ("conversations",)),
    ("chat", ("prompt", "completion")),
    ("chat, columns: {completion: response}", ("prompt", "response")),
)
"""Kinds of records by keys that they have; the first that fits is suggested."""


def suggest_setting(record: Raw) -> str:
    """Return the setting that reads a record of a known shape; empty for another shape."""
    read = {}
    for name, preset in PRESETS.items():
        if {*preset.keys} <= record.keys():
            # Keys are not enough: many preferences have those of hh-rlhf.
            with contextlib.suppress(*MISFITS):
                preset.made(record)
                read[name] = len(record.keys() & {*preset.keys, *preset.more})
    if read:
        return f"record: {{preset: {max(read, key=read.__getitem__)}}}"
    for kind, keys in SHAPES:
        if {*keys} <= record.keys():
            return f"record: {{kind: {kind}}}"
    return ""
