"""Answers as the JSON of OpenAI's API: whole, or in chunks."""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from maxstack import strict_json
from maxstack.inference.server.choices import FEW, Choice, Delta, deltas, usage
from maxstack.inference.service import Answers


def event(content: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    text = strict_json.write(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


class Writer(ABC):
    """Writes the answers to a request; `body` is of the type that the route takes."""

    prefix: str
    """Of ids."""
    name: str
    """Type of object of a whole answer."""
    chunk_name: str
    """Type of object of a chunk."""
    prompt_ids_on_top = False
    """The prompt's token ids stand beside the choices, as in vLLM's conversations."""

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
        """Return the JSON of a whole answer."""

    @abstractmethod
    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the JSON of what an answer grew by."""

    def first(self, index: int) -> bool:
        """Return True the first time that an answer is written."""
        begins = index not in self._begun
        self._begun.add(index)
        return begins

    def _prompt(self) -> dict[str, Any]:
        ids = self.prompt_ids_on_top and self.body.return_token_ids
        return {"prompt_token_ids": [*self.choices[0].prompt]} if ids else {}

    async def whole(self, answers: Answers) -> Response:
        """Return all answers, once they have ended."""
        grown = [Delta() for _ in self.choices]
        async for index, delta in deltas(answers, self.choices):
            grown[index] += delta
        return await asyncio.to_thread(self._whole, grown)

    def _whole(self, grown: Sequence[Delta]) -> Response:
        return JSONResponse(
            {
                **self._head,
                "object": self.name,
                "choices": [self.choice(index, delta) for index, delta in enumerate(grown)],
                "usage": self._usage(),
                **self._prompt(),
            }
        )

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yield chunks as events, each of one answer; the last has the usage, if asked for."""
        options = self.body.stream_options
        counts = options is not None and options.include_usage
        always = counts and options.continuous_usage_stats
        head = {**self._head, "object": self.chunk_name}
        tokens_count = self.body.return_token_ids or self.body.logprobs not in (None, False)
        waiting: dict[int, Delta] = {}
        above = self._prompt()

        def chunk(index: int, delta: Delta, further: dict[str, Any]) -> bytes:
            return event({**head, "choices": [self.chunk(index, delta)], **further})

        # A token may add no text yet (half a character, the start of a stop string): it waits for
        # the next, unless ids or log-probabilities were asked for.
        async for index, delta in deltas(answers, self.choices):
            delta = waiting.pop(index, Delta()) + delta
            if delta.text or delta.calls or delta.finish or tokens_count and delta.tokens:
                more = dict(above)
                if counts:
                    more["usage"] = self._usage() if always else None
                size = len(delta.tokens)
                if delta.finish:
                    size += len(self.choices[index].prompt_tokens)
                # Token ids of the prompt come with the first chunk, and may be many.
                if size > FEW or above:
                    yield await asyncio.to_thread(chunk, index, delta, more)
                else:
                    yield chunk(index, delta, more)
                above = {}
            else:
                waiting[index] = delta
        if counts:
            yield event({**head, "choices": [], "usage": self._usage()})

    def _usage(self) -> dict[str, Any]:
        return usage(self.choices, self.body.n)
