import json
import random
import re

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxstack.data.tokenizers import Bytes
from maxstack.errors import DataError
from maxstack.inference.tools import (
    FORMATS,
    ToolStream,
    guess_format,
    marker_tokens,
    required_schema,
)
from maxstack.schema.data import BytesTokenizer

ARGUMENTS = {
    "city": 'K\u00f6ln "}]</tool_call>[TOOL_CALLS]\\',
    "days": [1, 2.5],
    "more": {"a": None},
}
NAMES = [*FORMATS]


def written(name, *calls, indent=None):
    """Calls as a model writes them."""
    form = FORMATS[name]
    values = [{"name": tool, form.arguments: arguments} for tool, arguments in calls]
    if form.many:
        return form.begin + json.dumps(values, ensure_ascii=False, indent=indent)
    texts = [json.dumps(value, ensure_ascii=False, indent=indent) for value in values]
    if name == "llama3":
        return form.begin + "; ".join(texts)
    return "\n".join(f"{form.begin}\n{text}\n{form.end}" for text in texts)


def divided(name, *texts, bare=False):
    """Content and calls of texts that are fed one after another."""
    stream = ToolStream(FORMATS[name], random.Random(0), bare)
    steps = [*map(stream.feed, texts), stream.flush()]
    calls = [(call.name, json.loads(call.arguments)) for _, new in steps for call in new]
    return "".join(content for content, _ in steps), calls


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", ["", "Let me see: {a} [b]\n\n"])
@pytest.mark.parametrize("after", ["", "\n", "\n\nDone."])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("number", [1, 2])
def test_calls_and_the_content_around_them_are_told_apart(name, before, after, indent, number):
    calls = [("weather", ARGUMENTS), ("now", {})][:number]
    content, read = divided(name, before + written(name, *calls, indent=indent) + after)
    assert read == calls
    assert content == before.rstrip() + (after if after.strip() else "")


PIECES = [
    "a",
    " ",
    "\n",
    "{",
    "}",
    ";",
    '"',
    "\\",
    '{"name": "f", "arguments": {}}',
    '{"name": "f", "parameters": {"x": "\\\\"}}',
    '[{"name": "f", "arguments": {}}]',
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
]


@pytest.mark.parametrize("name", NAMES)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=8), cuts=st.lists(st.integers(0, 99)))
@settings(max_examples=300, deadline=None)
def test_the_division_does_not_depend_on_how_the_text_arrives(name, pieces, cuts):
    text = "".join(pieces)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert divided(name, *parts) == divided(name, text) == divided(name, *text)


@pytest.mark.parametrize("name", NAMES)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=8))
@settings(max_examples=200, deadline=None)
def test_nothing_but_calls_and_blanks_around_them_is_lost(name, pieces):
    text = "".join(pieces)
    content, calls = divided(name, text)
    if not calls:
        assert content == text
    left = re.sub(r"[\s;]", "", content)
    rest = iter(re.sub(r"[\s;]", "", text))
    assert all(char in rest for char in left)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_given_out_when_it_is_complete_and_content_at_once(name):
    stream = ToolStream(FORMATS[name], random.Random(0))
    assert stream.feed("I") == ("I", []) and stream.feed(" ask") == (" ask", [])
    text = written(name, ("f", {}))
    assert all(stream.feed(char) == ("", []) for char in text[:-1])
    content, calls = stream.feed(text[-1])
    assert not content and [call.name for call in calls] == ["f"]
    assert stream.flush() == ("", [])


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", "<tool_call>f(1)</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {},}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} and</tool_call>'),
        ("hermes", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("llama3", '{"name": "f"}'),
        ("llama3", '{"answer": 3}'),
        ("llama3", 'So: {"name": "f", "parameters": {}}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, 3]'),
        ("mistral", "[TOOL_CALLS][]"),
    ],
)
def test_what_is_no_call_stays_content(name, text):
    assert divided(name, text) == (text, [])
    assert divided(name, *text) == (text, [])


def test_a_good_call_after_a_bad_one_is_read():
    text = (
        '<tool_call>{"name": }</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    )
    assert divided("hermes", text) == ('<tool_call>{"name": }</tool_call>', [("f", {})])


def test_a_complete_call_needs_no_end_at_the_end_of_the_answer():
    assert divided("hermes", '<tool_call>{"name": "f", "arguments": {}}\n') == ("", [("f", {})])


def test_json_that_is_no_call_is_not_held_back():
    stream = ToolStream(FORMATS["llama3"], random.Random(0))
    assert stream.feed(' {"answer"') == (' {"answer"', [])


def test_ids_are_random_and_follow_from_the_source():
    def ids(name, seed):
        stream = ToolStream(FORMATS[name], random.Random(seed))
        return [call.id for call in stream.feed(written(name, ("f", {}), ("g", {})))[1]]

    assert ids("hermes", 1) == ids("hermes", 1) != ids("hermes", 2)
    assert len({*ids("hermes", 1), *ids("hermes", 2)}) == 4
    assert all(re.fullmatch("call_[0-9a-f]{24}", number) for number in ids("llama3", 1)[:1])
    assert all(re.fullmatch("[0-9a-f]{9}", number) for number in ids("mistral", 1))


def tool(name, **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CITY = tool(
    "weather",
    type="object",
    properties={"city": {"$ref": "#/$defs/city"}},
    required=["city"],
    **{"$defs": {"city": {"enum": ["Rome"]}}},
)
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chosen", [None, "weather"])
def test_the_schema_of_a_required_call_accepts_calls_of_the_tools_alone(name, chosen):
    form = FORMATS[name]
    schema = required_schema([CITY, NOW], chosen, form)
    jsonschema.Draft202012Validator.check_schema(schema)

    def accepts(tool, arguments):
        call = {"name": tool, form.arguments: arguments}
        call = [call] if form.many else call
        return jsonschema.Draft202012Validator(schema).is_valid(call)

    assert accepts("weather", {"city": "Rome"}) and accepts("now", {}) == (chosen is None)
    assert not accepts("weather", {"city": "Oslo"}) and not accepts("other", {})


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_a_schema_forced_is_a_call_without_marks(name):
    call = {"name": "now", FORMATS[name].arguments: {}}
    text = json.dumps([call] if FORMATS[name].many else call)
    assert divided(name, *text, bare=True) == ("", [("now", {})])


@pytest.mark.parametrize("tools, name", [([], None), ([CITY, NOW], "x")])
def test_a_tool_that_is_not_there_cannot_be_required(tools, name):
    with pytest.raises(DataError, match="tools are ('weather', 'now'|none)"):
        required_schema(tools, name, FORMATS["hermes"])


def test_definitions_that_differ_are_refused():
    other = tool("other", **{"$defs": {"city": {"enum": ["Oslo"]}}})
    with pytest.raises(DataError, match="city of 'other' differs"):
        required_schema([CITY, other], None, FORMATS["hermes"])


@pytest.mark.parametrize(
    "template, name",
    [
        ('<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <json>}', "hermes"),
        ("<tool_call>\\n<function=name>", None),
        ("<tool_call>{{ name }}<arg_key> arguments", None),
        (
            '{"name": function name, "parameters": dictionary of argument name and its value}',
            "llama3",
        ),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", None),
        ("[TOOL_CALLS] <|python_tag|>", None),
        ("<|im_start|>", None),
    ],
)
def test_the_format_is_guessed_from_the_template_where_it_shows_one(template, name):
    assert guess_format(template) == name


def test_marks_that_are_special_tokens_are_named():
    tokenizer = Bytes(BytesTokenizer(kind="bytes"))  # one of its own: an opened one is shared
    tokenizer.special = {300: "[TOOL_CALLS]", 301: "</s>"}
    assert marker_tokens(tokenizer, FORMATS["mistral"]) == {300}
    assert marker_tokens(tokenizer, FORMATS["hermes"]) == set()
