"""Answers as the JSON of OpenAI's API: whole, or in chunks."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from maxstack.inference.server.choices import Choice, Delta, deltas, usage
from maxstack.inference.service import Answers


class Writer(ABC):
    """Writes the answers to a request; `body` is of the kind that the route takes."""

    prefix: str
    """Of ids."""
    name: str
    """Kind of object that a whole answer is, and `chunk_name` a chunk."""
    chunk_name: str
    above = False
    """The ids of the prompt stand above the choices, as vLLM has them for conversations."""

    def __init__(self, model: str, body: Any, choices: Sequence[Choice]):
        self.body, self.choices = body, choices
        self._begun: set[int] = set()
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    @abstractmethod
    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """A whole answer among `choices`."""

    @abstractmethod
    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """The growth of an answer."""

    def first(self, index: int) -> bool:
        """True the first time that an answer is written."""
        begins = index not in self._begun
        self._begun.add(index)
        return begins

    def _prompt(self) -> dict[str, Any]:
        ids = self.above and self.body.return_token_ids
        return {"prompt_token_ids": [*self.choices[0].prompt]} if ids else {}

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """All answers, once they have ended."""
        grown = [Delta() for _ in self.choices]
        async for index, delta in deltas(answers, self.choices):
            grown[index] += delta
        return {
            **self._head,
            "object": self.name,
            "choices": [self.choice(index, delta) for index, delta in enumerate(grown)],
            "usage": self._usage(),
            **self._prompt(),
        }

    async def events(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        """Chunks, each of an answer; the last has the usage, where it is asked for."""
        options = self.body.stream_options
        counts = options is not None and options.include_usage
        always = counts and options.continuous_usage_stats
        head = {**self._head, "object": self.chunk_name}
        tokens_count = self.body.return_token_ids or self.body.logprobs not in (None, False)
        waiting: dict[int, Delta] = {}
        above = self._prompt()
        async for index, delta in deltas(answers, self.choices):
            delta = waiting.pop(index, Delta()) + delta
            if delta.text or delta.calls or delta.finish or tokens_count and delta.tokens:
                told = {"usage": self._usage() if always else None} if counts else {}
                yield {**head, "choices": [self.chunk(index, delta)], **told, **above}
                above = {}
            else:
                waiting[index] = delta
        if counts:
            yield {**head, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        return usage(self.choices, self.body.n)
