"""HTTP: bodies of bounded size, answers whole or as a stream of events, and clients that leave."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from maxstack.inference.server.choices import Choice
from maxstack.inference.server.errors import Refusal, refusal_of
from maxstack.inference.server.schemas import AnyBody, parsed
from maxstack.inference.server.state import BODY, State
from maxstack.inference.server.writer import Writer
from maxstack.inference.service import Answers, Ask

BODY_SECONDS = 60
"""How long a body may take to arrive."""
DISCARDED = 16
"""A body that is too large is read to its end, so that the client sees the refusal, up to so many
times the size that is allowed."""


def state_of(request: Request) -> State:
    """The state of the server that a request came to."""
    return request.app.state.server


def check_access(request: Request) -> State:
    """The same, for a request that may be answered. Refusal for a wrong key; without keys, for a
    name of the host that another site could have given to this machine."""
    state = state_of(request)
    if state.keys:
        state.check_key(request.headers.get("authorization", ""))
    elif state.hosts and _host(request) not in state.hosts:
        raise Refusal(403, "Host: must name this machine; see --host and --api-key-file")
    return state


def _host(request: Request) -> str:
    """The header's name, without port and brackets."""
    return re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]").lower()


async def read_body(request: Request, kind: type[AnyBody]) -> AnyBody:
    """The body of a request, which names the model that is served. Refusal for a wrong key, another
    model, and a body that is too large, too slow or wrong."""
    state = check_access(request)
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        # a page of another site cannot send this one without asking first
        raise Refusal(415, "Content-Type: must be application/json")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= BODY:
                    parts.append(part)
                elif size > BODY * DISCARDED:
                    break
    except ClientDisconnect:
        raise Refusal(499, "the client left") from None
    except TimeoutError:
        raise Refusal(408, f"the body took more than {BODY_SECONDS} seconds") from None
    if size > BODY:
        raise Refusal(413, f"the body is larger than {BODY} bytes; send less at a time")
    body = await asyncio.to_thread(parsed, kind, b"".join(parts))
    state.adapter_of(body.model)
    return body


async def answer(
    request: Request,
    kind: type[AnyBody],
    asked: Callable[[State, AnyBody], tuple[list[Ask], list[Choice]]],
    written: Callable[[str, AnyBody, list[Choice]], Writer],
) -> Response:
    """The answers to what `asked` makes of a body, whole or as events, as the body asks."""
    state, body = state_of(request), await read_body(request, kind)
    state.service.check()
    asks, choices = await asyncio.to_thread(asked, state, body)
    answers, writer = state.service.submit(asks), written(state.name, body, choices)
    if writer.body.stream:
        return EventStream(answers, writer.events(answers))
    return await whole(request, answers, writer.whole(answers))


async def whole(request: Request, answers: Answers, work: Coroutine[Any, Any, Any]) -> Response:
    """The JSON that `work` makes of the answers, which are closed at its end, and when the client
    leaves."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=499)
        return JSONResponse(task.result())
    finally:
        answers.close()
        for each in (task, gone):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events, ended with [DONE]; the answers are closed at the end, and when the client
    leaves."""

    def __init__(self, answers: Answers, events: AsyncIterator[dict[str, Any]]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_encoded(events), media_type="text/event-stream", headers=headers)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.close()


async def _encoded(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield _event(event)
    except Exception as error:
        yield _event(refusal_of(error).body)
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n"
