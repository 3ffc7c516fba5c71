"""Prompts of tasks: their texts one after the other, or as a conversation by a chat template."""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from maxstack.data.chat import ChatTemplate
from maxstack.errors import DataError

log = logging.getLogger(__name__)


class Turn(NamedTuple):
    """A part of a prompt."""

    role: str
    text: str
    after: str = ""
    """What goes between it and the next one, where both are one text."""


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """How a model is asked, as lm-evaluation-harness does it."""

    system: str = ""
    """The beginning of every prompt."""
    template: ChatTemplate | None = None
    """None: a prompt is plain text."""
    multiturn: bool = True
    """Examples are turns of the conversation; false: one turn with the question."""

    def render(self, turns: Sequence[Turn]) -> str:
        """The text of these turns, the last of which is the question. DataError for what the
        template refuses."""
        if self.template is None:
            return "".join(turn.text + turn.after for turn in turns)
        begins = turns[0].role == "system"
        rest = turns[begins:]
        if not self.multiturn:
            rest = [Turn("user", "".join(turn.text + turn.after for turn in rest))]
        return self.render_messages(
            [{"role": turn.role, "content": turn.text} for turn in [*turns[:begins], *rest]]
        )

    def render_messages(self, messages: Sequence[dict[str, str]], **extra: Any) -> str:
        """A conversation by the template; of one that refuses its system message, without it."""
        assert self.template
        try:
            return self.template.render(messages, **extra)
        except DataError as error:
            rest = [message for message in messages if message["role"] != "system"]
            if len(rest) == len(messages):
                raise
            _warn(f"{error}; so system messages of tasks are left out")
            return self.template.render(rest, **extra)


PLAIN = PromptFormat()


@functools.cache
def _warn(message: str) -> None:
    log.warning(message)
