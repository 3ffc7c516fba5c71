"""/v1/completions."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maxstack.inference.server.choices import Choice, Delta
from maxstack.inference.server.engine_requests import (
    AnswerOptions,
    Prompt,
    build_requests,
    decode,
    encode,
    split_prompts,
)
from maxstack.inference.server.http import answer
from maxstack.inference.server.schemas import CompletionBody
from maxstack.inference.server.state import State
from maxstack.inference.server.writer import Writer
from maxstack.inference.service import EngineRequest


async def completions(request: Request) -> Response:
    """Complete prompts."""
    return await answer(request, CompletionBody, _build, _Writer)


def _build(state: State, body: CompletionBody) -> tuple[list[EngineRequest], list[Choice]]:
    given = split_prompts(state, body.prompt, "prompt", body.n)
    prompts = [_prompt(state, body, prompt) for prompt in given]
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        # An echo reports its tokens' log-probabilities like the answer's.
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return build_requests(
        state, body, prompts, AnswerOptions(body.max_tokens, body.logprobs, prompt_logprobs)
    )


def _prompt(state: State, body: CompletionBody, given: str | list[int]) -> Prompt:
    if isinstance(given, str):
        tokens = encode(state, given, body.add_special_tokens)
        state.served.engine.check(tokens)
        return Prompt(tokens, given if body.echo else None)
    state.served.engine.check(given)
    if not body.echo:
        return Prompt(given)
    if state.served.tokenizer is None:
        # Tokens without a tokenizer have no text, and are echoed as ids.
        return Prompt(given, "")
    return Prompt(given, decode(state, given))


class _Writer(Writer):
    prefix = "cmpl"
    name = chunk_name = "text_completion"

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        choice, body = self.choices[index], self.body
        logprobs, asked = body.logprobs is not None, body.prompt_logprobs is not None
        content: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": choice.completion_logprobs(delta.tokens) if logprobs else None,
            "finish_reason": delta.finish,
            "stop_reason": delta.stopped,
            "seed": choice.sampling.seed,
            "prompt_logprobs": choice.prompt_logprobs() if asked and delta.finish else None,
        }
        if body.return_token_ids or choice.tokenizer is None:
            content["token_ids"] = delta.ids
            content["prompt_token_ids"] = [*choice.prompt] if self.first(index) else None
        return content

    chunk = choice
