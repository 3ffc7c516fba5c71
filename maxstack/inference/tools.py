"""Tool calls in answers: the formats of models, parsed while the text arrives."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxstack.data.tokenizers import Tokenizer
from maxstack.errors import DataError, quoted
from maxstack.strict_json import parse

_MARKS = re.compile(r'\\.|["\[\]{}]', re.DOTALL)
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_CALL_KEYS = "name", "arguments", "parameters", "type", "id"
_BLANKS = " \t\r\n"


class ToolFormat(NamedTuple):
    """How a model writes a call: `begin`, an object with the tool's name and arguments as JSON, and
    `end`."""

    begin: str
    end: str
    arguments: str
    """Key of the arguments beside `name`."""
    many: bool = False
    """The JSON is a list of calls."""
    bare: bool = False
    """An answer that is JSON from its start is a call too, or several with `;` between them."""
    id_digits: int = 24
    """Hexadecimal digits of an id."""
    id_prefix: str = "call_"


FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", "arguments"),
    "llama3": ToolFormat("<|python_tag|>", "", "parameters", bare=True),
    # Mistral's templates refuse ids of any other length than 9.
    "mistral": ToolFormat("[TOOL_CALLS]", "", "arguments", many=True, id_digits=9, id_prefix=""),
}
"""By the names that --tool-parser takes: NousResearch's Hermes 2 Pro and Qwen 2.5 and 3; Meta's
Llama 3.1 to 3.3; Mistral's models before version 11 of their tokenizer."""


class ToolCall(NamedTuple):
    """A call of a tool, as OpenAI's API has it."""

    id: str
    name: str
    arguments: str
    """A JSON object."""


def guess_format(template: str) -> str | None:
    """Return the format that a chat template shows; None where it shows none, several, or a variant
    that `FORMATS` lacks."""
    shown = {
        "hermes": "<tool_call>" in template and "arguments" in template,
        "llama3": "<|python_tag|>" in template
        or "dictionary of argument name and its value" in template,
        "mistral": "[TOOL_CALLS]" in template,
    }
    others = "<function=", "<arg_key>", "[ARGS]"
    names = [name for name, found in shown.items() if found]
    # A wrong guess would swallow text as calls, so refuse to guess where anything is unclear.
    if len(names) != 1 or any(other in template for other in others):
        return None
    return names[0]


def marker_tokens(tokenizer: Tokenizer, form: ToolFormat) -> set[int]:
    """Return the special tokens that begin or end a call; the text of an answer must show them."""
    special = tokenizer.special.items()
    return {token for token, written in special if written in (form.begin, form.end)}


def read_calls(form: ToolFormat, text: str) -> list[ToolCall]:
    """Return the calls in the text of a whole answer, with the same ids each time."""
    # A fixed seed: the ids of a text that is read again must be equal.
    stream = ToolStream(form, random.Random(0))
    return [*stream.feed(text)[1], *stream.flush()[1]]


class ToolStream:
    """Splits the text of an answer into content, returned as soon as it cannot belong to a call,
    and calls, returned when they are complete.

    JSON is never repaired: what does not parse, with a name and an object of arguments, is content.
    Blanks around calls are dropped. With `bare`, an answer that is a call's JSON without marks is a
    call in any format, as `required_schema` makes it.
    """

    def __init__(self, form: ToolFormat, source: random.Random, bare: bool = False):
        self._form, self._source = form, source
        # JSON that begins otherwise is no call in this format.
        self._opening = "[" if form.many else "{"
        self._bare = bare or form.bare
        self._called = False
        self._held = ""
        self._extent = _Extent()

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls that became certain with the next text."""
        return self._split(text, last=False)

    def flush(self) -> tuple[str, list[ToolCall]]:
        """Return the rest, after the last text; a call whose JSON is complete needs no `end`
        there."""
        content, calls = self._split("", last=True)
        rest, self._held = self._held, ""
        return content + ("" if self._called and not rest.strip() else rest), calls

    def _split(self, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        self._held += text
        content = ""
        calls: list[ToolCall] = []
        while True:
            before, at = self._mark()
            # What began like a call and is none becomes content up to its end, mark and all.
            end, new = self._read(at, last) if at is not None else (None, [])
            certain = before if end is None or new else end
            content += self._held[:certain]
            self._held = self._held[certain if end is None else end :]
            # Bare JSON is a call only at the start of an answer: content was before.
            self._bare &= not certain
            if end is None:
                return content, calls
            if new:
                calls += new
                self._called, self._bare = True, self._form.bare
            self._extent = _Extent()

    def _mark(self) -> tuple[int, int | None]:
        """Return the end of the content before a possible call, and the start of its JSON; None
        where no call has begun."""
        held, begin = self._held, self._form.begin
        # Llama 3 separates bare calls by `;`.
        blanks = _BLANKS + ";" if self._called else _BLANKS
        if self._bare:
            start = len(held) - len(held.lstrip(blanks))
            if held[start:].startswith(self._opening):
                return 0, start
        start = held.find(begin)
        if start >= 0:
            return len(held[:start].rstrip(_BLANKS)), start + len(begin)
        # Hold back what may be the beginning of the mark.
        partial = [size for size in range(1, len(begin)) if held.endswith(begin[:size])]
        certain = held[: len(held) - max(partial, default=0)]
        return len(certain.rstrip(blanks if self._bare else _BLANKS)), None

    def _read(self, at: int, last: bool) -> tuple[int | None, list[ToolCall]]:
        """Return the end of what begins with a mark before `at`, None where more text decides, and
        the calls in it, none where it is content."""
        text = self._held[at:].lstrip(_BLANKS)
        start = len(self._held) - len(text)
        if not text:
            return None, []
        key = _FIRST_KEY.match(text)
        # The first key tells early that JSON is no call, or a whole answer of JSON would be held
        # back.
        if text[0] != self._opening or key and key[1] not in _CALL_KEYS:
            return start + 1, []
        size = self._extent.end(text)
        if size is None:
            return None, []
        end, closing = start + size, self._form.end
        if closing and self._held[:at].endswith(self._form.begin):
            rest = self._held[end:].lstrip(_BLANKS)
            if rest.startswith(closing):
                end = len(self._held) - len(rest) + len(closing)
            # The end mark may still be arriving.
            elif closing.startswith(rest) and not last:
                return None, []
            elif rest:
                return end, []
        return end, self._calls(text[:size])

    def _calls(self, text: str) -> list[ToolCall]:
        try:
            # The bounded parser: the text is written by a model, which a client steers.
            value = parse(text.encode(), "call")
        except DataError:
            return []
        calls = []
        for call in value if self._form.many else [value]:
            arguments = call.get(self._form.arguments) if isinstance(call, dict) else None
            if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
                return []
            digits = self._form.id_digits
            number = f"{self._form.id_prefix}{self._source.getrandbits(4 * digits):0{digits}x}"
            calls.append(ToolCall(number, call["name"], json.dumps(arguments, ensure_ascii=False)))
        return calls


class _Extent:
    """Finds the end of a JSON object or array in a growing text that begins with it."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quoted = False

    def end(self, text: str) -> int | None:
        """Return its size; None if it is not complete."""
        if self._at and not self._depth:
            return self._at
        # Goes on where the last search ended, so the JSON of a long call is searched once.
        for mark in _MARKS.finditer(text, self._at):
            self._at = mark.end()
            if mark[0] == '"':
                self._quoted = not self._quoted
            elif not self._quoted and mark[0] in "[{":
                self._depth += 1
            elif not self._quoted and mark[0] in "]}":
                self._depth -= 1
                if not self._depth:
                    return self._at
        # A backslash at the end may escape a quote that has not arrived yet.
        self._at = max(self._at, len(text) - text.endswith("\\"))
        return None


def required_schema(
    tools: Sequence[Mapping[str, Any]], name: str | None, form: ToolFormat
) -> dict[str, Any]:
    """Return the JSON schema of a call of one of the tools, or of the named one, in a format
    without its marks. `tools` are those of OpenAI's API. DataError for a name that no tool has, and
    for tools that define one name differently in their $defs."""
    functions = [tool["function"] for tool in tools]
    names = [function["name"] for function in functions]
    if not names or name is not None and name not in names:
        raise DataError(
            f"tool_choice: {'a tool' if name is None else quoted(name)} is required, and tools are "
            f"{', '.join(map(quoted, names)) or 'none'}; add it to tools"
        )
    calls, shared = [], dict[str, Any]()
    for function in functions:
        if name not in (None, function["name"]):
            continue
        parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
        for key, value in parameters.pop("$defs", {}).items():
            # All tools share one schema, whose $defs are at its top.
            if shared.setdefault(key, value) != value:
                raise DataError(
                    f"tools: $defs/{key} of {quoted(function['name'])} differs from another tool's;"
                    " give it another name"
                )
        calls.append(_object({"name": {"const": function["name"]}, form.arguments: parameters}))
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form.many:
        schema = {"type": "array", "items": schema, "minItems": 1}
    return schema | ({"$defs": shared} if shared else {})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
