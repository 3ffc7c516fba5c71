"""Prompts of tasks: the turns of a prompt as one text, or as a conversation by a chat template."""

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
    """Goes between this turn and the next one, where both are one text."""


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """How turns become a prompt, as in lm-evaluation-harness."""

    system: str = ""
    """The beginning of every prompt."""
    template: ChatTemplate | None = None
    """None: a prompt is plain text."""
    multiturn: bool = True
    """Examples are turns of the conversation; False: one turn with the question."""

    def render(self, turns: Sequence[Turn]) -> str:
        """Return the text of turns, the last of which is the question. DataError for what the
        template refuses."""
        if self.template is None:
            return "".join(turn.text + turn.after for turn in turns)
        system = [turn for turn in turns[:1] if turn.role == "system"]
        rest = turns[len(system) :]
        if not self.multiturn:
            rest = [Turn("user", "".join(turn.text + turn.after for turn in rest))]
        return self.render_messages(
            [{"role": turn.role, "content": turn.text} for turn in [*system, *rest]]
        )

    def render_messages(self, messages: Sequence[dict[str, str]], **extra: Any) -> str:
        """Render a conversation; a template that refuses its system message gets it without."""
        assert self.template
        try:
            return self.template.render(messages, **extra)
        except DataError as error:
            # Some templates raise for a system message.
            rest = [message for message in messages if message["role"] != "system"]
            if len(rest) == len(messages):
                raise
            _warn(f"{error}; so system messages of tasks are left out")
            return self.template.render(rest, **extra)


PLAIN = PromptFormat()


# Once for each message: every question of a task has the same fault.
@functools.cache
def _warn(message: str) -> None:
    log.warning(message)
