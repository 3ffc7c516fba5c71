"""Requests and responses: bodies, answers whole or as a stream of events, clients that leave."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from maxstack.inference.server.admission import read_bytes
from maxstack.inference.server.choices import Choice
from maxstack.inference.server.refusal import Refusal, refusal_of
from maxstack.inference.server.schemas import AnyBody, parse_body
from maxstack.inference.server.state import BODY, State
from maxstack.inference.server.writer import Writer, event
from maxstack.inference.service import Answers, EngineRequest

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Received(Generic[AnyBody]):
    """A body that was read."""

    state: State
    body: AnyBody
    size: int
    """Its bytes."""
    client: str
    """Who sent it."""

    async def read(self, function: Callable[..., Result], *args: object) -> Result:
        """Call a function with state, body and further arguments, outside the event loop."""
        threads = self.state.threads
        return await threads.run(self.size, self.client, function, self.state, self.body, *args)


def state_of(request: Request) -> State:
    """Return the state of the server that received a request."""
    return request.app.state.server


def check_access(request: Request) -> State:
    """Return the same, with the refusals of `Access.check`."""
    state = state_of(request)
    state.access.check(request)
    return state


async def read_body(request: Request, kind: type[AnyBody]) -> Received[AnyBody]:
    """Read the body of a request. Refusal for a wrong key, another model, and a body that is too
    large, too slow or invalid."""
    state = state_of(request)
    client = state.access.check(request)
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        # A page of another site cannot send this type without a preflight request.
        raise Refusal(415, "Content-Type: must be application/json")
    data = await read_bytes(request, BODY)
    body = await state.threads.run(len(data), client, parse_body, kind, data)
    state.adapter_of(body.model)
    return Received(state, body, len(data), client)


async def answer(
    request: Request,
    kind: type[AnyBody],
    build: Callable[[State, AnyBody], tuple[list[EngineRequest], list[Choice]]],
    make_writer: Callable[[str, AnyBody, list[Choice]], Writer],
) -> Response:
    """Answer a request, whole or as events, as its body asks. `build` makes the engine's requests
    of a body, `make_writer` the writer of their answers."""
    given = await read_body(request, kind)
    state = given.state
    # Refuse before the prompt is tokenized.
    state.service.check()
    requests, choices = await given.read(build)
    requests = await _with_grammar(request, given, requests)
    writer = make_writer(given.body.model or state.name, given.body, choices)
    answers = await state.service.submit(requests, given.client)
    if writer.body.stream:
        return EventStream(answers, writer.events(answers))
    return await whole(request, answers, writer.whole(answers))


async def _with_grammar(
    request: Request, given: Received[Any], requests: list[EngineRequest]
) -> list[EngineRequest]:
    """Return the requests with a compiled grammar in place of their rule, which is one for all."""
    rule = requests[0].sampling.grammar
    if rule is None:
        return requests
    work = given.state.grammars.answers(rule, len(requests), given.client)
    answers = await _unless_gone(request, work)
    return [
        each._replace(sampling=dataclasses.replace(each.sampling, grammar=answer))
        for each, answer in zip(requests, answers, strict=True)
    ]


async def whole(
    request: Request, answers: Answers, work: Coroutine[Any, Any, Response]
) -> Response:
    """Return the response that `work` makes of the answers; close them at its end, and when the
    client leaves."""
    try:
        return await _unless_gone(request, work)
    finally:
        answers.close()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; cancel it with a Refusal where the client leaves."""
    # Starlette does not cancel a handler whose client leaves, so watch for it beside the work.
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
            # Wait for both to end: a cancelled task may still release what it holds.
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events, ended with [DONE]. The answers are closed at the end, and when the client
    leaves."""

    def __init__(self, answers: Answers, events: AsyncIterator[bytes]):
        # The second keeps nginx from holding events back.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_encode(events), media_type="text/event-stream", headers=headers)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.close()


async def _encode(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for content in events:
            yield content
    except Exception as error:
        # The status is sent already, so an error can only be an event.
        yield event(refusal_of(error).body)
    yield b"data: [DONE]\n\n"
