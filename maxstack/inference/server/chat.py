"""/v1/chat/completions."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maxstack.inference.server.choices import Choice, Delta
from maxstack.inference.server.engine_requests import (
    AnswerOptions,
    Prompt,
    build_requests,
    encode_messages,
)
from maxstack.inference.server.http import answer
from maxstack.inference.server.schemas import ChatBody, NamedTool
from maxstack.inference.server.state import State
from maxstack.inference.server.writer import Writer
from maxstack.inference.service import EngineRequest
from maxstack.inference.tools import ToolCall, required_schema


async def chat(request: Request) -> Response:
    """Answer with the next message of a conversation."""
    return await answer(request, ChatBody, _build, _Writer)


def _build(state: State, body: ChatBody) -> tuple[list[EngineRequest], list[Choice]]:
    tools = body.tools if body.tool_choice != "none" else []
    extra = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    prompt = Prompt(encode_messages(state, body, tools, **extra))
    options = AnswerOptions(
        body.max_completion_tokens or body.max_tokens,
        # 0: each token's own log-probability alone.
        (body.top_logprobs or 0) if body.logprobs else None,
        parallel=body.parallel_tool_calls,
    )
    if tools:
        options.tools = state.tool_format
        named = body.tool_choice if isinstance(body.tool_choice, NamedTool) else None
        if named or body.tool_choice == "required":
            name = named.function.name if named else None
            described = [tool.model_dump(exclude_unset=True) for tool in tools]
            options.schema = required_schema(described, name, options.tools)
    return build_requests(state, body, [prompt], options)


class _Writer(Writer):
    prefix = "chatcmpl"
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prompt_ids_on_top = True

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        calls = [_call_json(call) for call in delta.calls]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not delta.text else delta.text,
            "refusal": None,
        }
        return self._wrap(index, delta, {"message": message | _calls(calls)})

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        # `called` counts those of this chunk already.
        first = self.choices[index].called - len(delta.calls)
        calls = [{"index": first + i} | _call_json(call) for i, call in enumerate(delta.calls)]
        grown: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if self.first(index):
            grown = {"role": "assistant", "content": "" if not calls else None} | grown
        return self._wrap(index, delta, {"delta": grown | _calls(calls)})

    def _wrap(self, index: int, delta: Delta, message: dict[str, Any]) -> dict[str, Any]:
        choice = self.choices[index]
        named = isinstance(self.body.tool_choice, NamedTool)
        ids = self.body.return_token_ids
        return {
            "index": index,
            **message,
            "logprobs": choice.chat_logprobs(delta.tokens) if self.body.logprobs else None,
            # A named tool ends with stop in OpenAI's API.
            "finish_reason": "tool_calls"
            if delta.finish == "stop" and choice.called and not named
            else delta.finish,
            "stop_reason": delta.stopped,
            "seed": choice.sampling.seed,
            **({"token_ids": delta.ids} if ids else {}),
        }


def _calls(calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"tool_calls": calls} if calls else {}


def _call_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
