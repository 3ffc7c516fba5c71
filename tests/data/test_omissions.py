"""What a chat template leaves out of a conversation, and what it only writes otherwise."""

import pytest

from maxstack.data.chat import ChatTemplate
from maxstack.data.omissions import refuse_omissions
from maxstack.errors import DataError

ASKED = {"role": "user", "content": ' <a> & "b" '}
SAID = {"role": "assistant", "content": "3"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
EACH = "{% for m in messages %}<{{ m.role }}>{{ CONTENT }}{% endfor %}"
PLAIN = EACH.replace("CONTENT", "m.content")
AFTER_THOUGHT = EACH.replace("CONTENT", "m.content.split('</think>')[-1]")
TWO_ROLES = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<assistant>' }}{{ m.content }}"
    "{% endfor %}"
)
TOOLS = "{{ tools | tojson }}" + EACH.replace(
    "CONTENT",
    "m.content }}{% for call in m.tool_calls or () %}{{ call.function | tojson }}{% endfor %}{{ ''",
)


def refuse(messages, template, turns=(), tools=None):
    """Refuse what a template leaves out of messages."""
    refuse_omissions(ChatTemplate({"default": template}, {}, "x.jinja"), messages, tools, turns)


@pytest.mark.parametrize(
    ("messages", "template", "lost"),
    [
        ([ASKED, {**SAID, "content": "", "tool_calls": [CALL]}], PLAIN, "arguments of a call of m"),
        ([ASKED, {**SAID, "reasoning_content": "b"}], PLAIN, "the thought of message 1, of the as"),
        (
            [ASKED, {**SAID, "content": "<think>b</think> 3"}],
            AFTER_THOUGHT,
            "a part of the content",
        ),
        ([ASKED, ASKED, SAID], PLAIN.replace("s %}<", "s[-2:] %}<"), "a part .* of message 0"),
        (
            [ASKED, {"role": "critic", "content": "4"}],
            TWO_ROLES,
            "the role 'critic', and writes it",
        ),
    ],
)
def test_what_a_template_leaves_out_is_named(messages, template, lost):
    with pytest.raises(DataError, match=f"x.jinja: the chat template leaves out {lost}"):
        refuse(messages, template, (1,))


def test_tools_that_a_template_does_not_write_are_refused():
    with pytest.raises(DataError, match="leaves out the tools"):
        refuse([ASKED, SAID], PLAIN, tools=[CALL])
    refuse([ASKED, {**SAID, "tool_calls": [CALL, CALL]}], TOOLS, (1,), tools=[CALL])


@pytest.mark.parametrize("written", ["trim | upper", "tojson", "e", "replace('a', 'bb')"])
def test_what_a_template_writes_otherwise_is_not_left_out(written):
    refuse([ASKED, SAID, ASKED, SAID], EACH.replace("CONTENT", f"m.content | {written}"), (1, 3))


def test_thoughts_of_answers_that_are_not_trained_on_may_be_left_out():
    thought = {**SAID, "content": "<think>b</think> 3"}
    refuse([ASKED, thought, ASKED, SAID], AFTER_THOUGHT, (3,))
    refuse([ASKED, {**SAID, "thinking": "b"}, ASKED, SAID], PLAIN, (3,))
