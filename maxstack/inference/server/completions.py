"""/v1/completions."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maxstack.inference.server.answering import EventStream, read_body, state_of, whole
from maxstack.inference.server.asks import Prompt, Wish, asks_of, encode
from maxstack.inference.server.choices import Choice, Delta, deltas, usage
from maxstack.inference.server.errors import Refusal
from maxstack.inference.server.schemas import CompletionBody
from maxstack.inference.server.state import State
from maxstack.inference.service import Answers, Ask
from maxstack.inference.text import TextStream


async def completions(request: Request) -> Response:
    """Answer with texts that go on from prompts."""
    state, body = state_of(request), await read_body(request, CompletionBody)
    state.service.check()
    asks, choices = await asyncio.to_thread(_asked, state, body)
    answers = state.service.submit(asks)
    writer = _Writer(state, body, choices)
    if body.stream:
        return EventStream(answers, writer.events(answers))
    return await whole(request, answers, writer.whole(answers))


def _asked(state: State, body: CompletionBody) -> tuple[list[Ask], list[Choice]]:
    prompts = [_prompt(state, body, prompt) for prompt in _prompts(body)]
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return asks_of(state, body, prompts, Wish(body.max_tokens, body.logprobs, prompt_logprobs))


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    prompt = body.prompt
    if not prompt:
        raise Refusal(400, "prompt: is empty; give at least one token", param="prompt")
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


def _prompt(state: State, body: CompletionBody, given: str | list[int]) -> Prompt:
    if isinstance(given, str):
        tokens = encode(state, given, body.add_special_tokens)
        return Prompt(tokens, given if body.echo else None)
    state.served.engine.check(given)
    if not body.echo:
        return Prompt(given)
    if state.served.tokenizer is None:
        return Prompt(given, "")
    stream = TextStream(state.tokenizer)
    return Prompt(given, "".join(map(stream.feed, given)))


class _Writer:
    def __init__(self, state: State, body: CompletionBody, choices: Sequence[Choice]):
        self._body, self._choices = body, choices
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.name,
        }

    async def whole(self, answers: Answers) -> dict[str, Any]:
        grown = [Delta() for _ in self._choices]
        async for index, delta in deltas(answers, self._choices):
            grown[index] += delta
        choices = [self._choice(i, delta) for i, delta in enumerate(grown)]
        return self._head | {"choices": choices, "usage": usage(self._choices, self._body.n)}

    async def events(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        options = self._body.stream_options
        told = {"usage": None} if options and options.include_usage else {}
        async for index, delta in deltas(answers, self._choices):
            yield self._head | {"choices": [self._choice(index, delta)]} | told
        if told:
            yield self._head | {"choices": [], "usage": usage(self._choices, self._body.n)}

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        choice = self._choices[index]
        logprobs = self._body.logprobs is not None
        content: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": choice.completion_logprobs(delta.tokens) if logprobs else None,
            "finish_reason": delta.finish,
            "stop_reason": delta.stopped,
            "seed": choice.sampling.seed,
        }
        if self._body.prompt_logprobs is not None and delta.finish:
            content["prompt_logprobs"] = choice.prompt_logprobs()
        if self._body.return_token_ids or choice.tokenizer is None:
            content["token_ids"] = [token.token for token in delta.tokens]
        return content
