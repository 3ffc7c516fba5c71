"""HTTP: bodies of bounded size, answers whole or as a stream of events, and clients that leave."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from maxstack.inference.server.body import read_bytes
from maxstack.inference.server.choices import Choice
from maxstack.inference.server.errors import refusal_of
from maxstack.inference.server.refusal import Refusal
from maxstack.inference.server.schemas import AnyBody, parsed
from maxstack.inference.server.state import BODY, State
from maxstack.inference.server.writer import Writer, event
from maxstack.inference.service import Answers, EngineRequest

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Received(Generic[AnyBody]):
    """A body that a server has read."""

    state: State
    body: AnyBody
    size: int
    """Its bytes."""
    client: str
    """Who sent it."""

    async def read(self, function: Callable[..., Result], *args: object) -> Result:
        """What a function makes of state, body and further arguments, beside the event loop."""
        threads = self.state.threads
        return await threads.run(self.size, self.client, function, self.state, self.body, *args)


def state_of(request: Request) -> State:
    """The state of the server that a request came to."""
    return request.app.state.server


def check_access(request: Request) -> State:
    """The same, for a request that may be answered. Refusal for a wrong key; without keys, for a
    name of the host that another site could have given to this machine."""
    state = state_of(request)
    state.access.check(request)
    return state


async def read_body(request: Request, kind: type[AnyBody]) -> Received[AnyBody]:
    """The body of a request, which names the model that is served. Refusal for a wrong key, another
    model, and a body that is too large, too slow or wrong."""
    state = state_of(request)
    client = state.access.check(request)
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        # a page of another site cannot send this one without asking first
        raise Refusal(415, "Content-Type: must be application/json")
    data = await read_bytes(request, BODY)
    body = await state.threads.run(len(data), client, parsed, kind, data)
    state.adapter_of(body.model)
    return Received(state, body, len(data), client)


async def answer(
    request: Request,
    kind: type[AnyBody],
    asked: Callable[[State, AnyBody], tuple[list[EngineRequest], list[Choice]]],
    written: Callable[[str, AnyBody, list[Choice]], Writer],
) -> Response:
    """The answers to what `asked` makes of a body, whole or as events, as the body asks."""
    given = await read_body(request, kind)
    state = given.state
    state.service.check()
    asks, choices = await given.read(asked)
    asks = await _ruled(request, given, asks)
    writer = written(given.body.model or state.name, given.body, choices)
    answers = await state.service.submit(asks, given.client)
    if writer.body.stream:
        return EventStream(answers, writer.events(answers))
    return await whole(request, answers, writer.whole(answers))


async def _ruled(
    request: Request, given: Received[Any], asks: list[EngineRequest]
) -> list[EngineRequest]:
    """The asks with the grammar that follows from their rule, which is one for all."""
    rule = asks[0].sampling.grammar
    if rule is None:
        return asks
    work = given.state.grammars.answers(rule, len(asks), given.client)
    answers = await _unless_gone(request, work)
    return [
        ask._replace(sampling=dataclasses.replace(ask.sampling, grammar=answer))
        for ask, answer in zip(asks, answers, strict=True)
    ]


async def whole(
    request: Request, answers: Answers, work: Coroutine[Any, Any, Response]
) -> Response:
    """The response that `work` makes of the answers, which are closed at its end, and when the
    client leaves."""
    try:
        return await _unless_gone(request, work)
    finally:
        answers.close()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns; Refusal, and its end, where the client leaves."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refusal(499, "the client left")
        return task.result()
    finally:
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

    def __init__(self, answers: Answers, events: AsyncIterator[bytes]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_encoded(events), media_type="text/event-stream", headers=headers)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.close()


async def _encoded(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for content in events:
            yield content
    except Exception as error:
        yield event(refusal_of(error).body)
    yield b"data: [DONE]\n\n"
