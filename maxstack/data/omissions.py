"""What a chat template leaves out of a conversation, and a model would learn as silence."""

import contextlib
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from maxstack.data.chat import THOUGHT, ChatTemplate
from maxstack.errors import DataError, quoted

SPOKEN = {"system", "user", "assistant"}
Messages = Sequence[Mapping[str, Any]]


def refuse_omissions(
    template: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, turns: Container[int]
) -> None:
    """DataError if a template leaves out tools, a message's content or calls, or the thought of
    one of `turns`, which are trained on; or writes another role's message as the assistant's. Of
    other answers it may leave out how they begin, as where that is a thought.

    Templates trim and escape what was said. So numbers are put into it, and looked for in what the
    template then writes. Rendering twice costs 3 % of the tokenizer's time.
    """
    marks, marked = dict[str, str](), []

    def mark(what: str) -> str:
        number = f"904187{len(marks):06}"
        marks[number] = what
        return number

    for i, message in enumerate(messages):
        own, of = dict(message), f"of message {i}, of the {message['role']}"
        parts = isinstance(own["content"], list)
        said = "\n".join(part["text"] for part in own["content"]) if parts else own["content"]
        if said.strip():
            whole = message["role"] != "assistant" or i in turns
            first = re.search(r"[\s>]", said)  # a tag or a word: templates look at how texts begin
            at = first.end() if first else 0
            begin = mark(f"a part of the content {of}") if whole else ""
            said = f"{said[:at]}{begin}{said[at:]}{mark(f'the content {of}')}"
            own["content"] = [{"type": "text", "text": said}] if parts else said
        if i in turns and own.get("reasoning_content"):
            thought = f"{own['reasoning_content']} {mark(f'the thought {of}')}"
            own |= {name: thought for name in own.keys() & {*THOUGHT}}
        if own.get("tool_calls"):
            calls = []
            for call in own["tool_calls"]:
                arguments = {mark(f"arguments of a call {of}"): 1}
                calls.append(
                    call | {"function": {"name": mark(f"a call {of}"), "arguments": arguments}}
                )
            own["tool_calls"] = calls
        marked.append(own)
    written = template.render(marked, tools, add_generation_prompt=False)
    lost = [what for number, what in marks.items() if number not in written]
    if tools and _written(template, marked, None) == written:
        lost.append("the tools")
    for role in {message["role"] for message in messages} - SPOKEN:
        changed = [m | {"role": "assistant"} if m["role"] == role else m for m in marked]
        if _written(template, changed, tools) == written:
            lost.append(f"the role {quoted(role)}, and writes it as the assistant's")
    if lost:
        raise DataError(
            f"{template.where}: the chat template leaves out {lost[0]}, so a model would learn "
            "silence in its place; name a template that writes it in data.template, or leave it "
            "out of the record"
        )


def _written(template: ChatTemplate, messages: Messages, tools: Sequence[Any] | None) -> str | None:
    """Return the text of a conversation; None if the template refuses it."""
    with contextlib.suppress(DataError):
        return template.render(messages, tools, add_generation_prompt=False)
    return None
