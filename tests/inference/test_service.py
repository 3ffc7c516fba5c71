"""The service of a server with engines that fail, and what a wrong body costs."""

import asyncio
import json
import time
import types

import httpx
import numpy as np
import pytest
from engines import StandIn

from maxstack.errors import ConfigError
from maxstack.inference.grammar import Answer
from maxstack.inference.request import Output, Sampling, Token
from maxstack.inference.server.app import make_app
from maxstack.inference.server.refusal import Refusal
from maxstack.inference.server.schemas import ChatBody, CompletionBody, parse_body
from maxstack.inference.server.state import State
from maxstack.inference.service import EngineRequest, Failed, Full, Service


class Engine(StandIn):
    """An engine that gives a token a step, and fails at a step."""

    def __init__(self, fails=None):
        super().__init__(requests=2)
        self.fails, self.steps = fails, 0

    def step(self):
        self.steps += 1
        time.sleep(0.001)
        if self.steps == self.fails:
            raise RuntimeError("out of memory")
        outputs = []
        for number, (_, sampling) in [*self.tasks.items()]:
            if sampling.grammar:
                sampling.grammar.accept(7)
            finish = "stop" if sampling.grammar and sampling.grammar.finished else None
            outputs.append(Output(number, (Token(7),), finish=finish))
            if finish:
                del self.tasks[number]
        return outputs


ENDLESS = EngineRequest([1], Sampling(max_tokens=10**9))


def answered(ask):
    """The value of a coroutine, soon."""
    return asyncio.run(asyncio.wait_for(ask, 20))


def started(waiting=2, **options):
    """A service that runs."""
    service = Service(Engine(**options), waiting)
    service.start()
    return service


def test_a_failing_engine_fails_all_requests_and_hangs_none():
    async def ask():
        service = started(fails=20)
        answers = [await service.submit([ENDLESS] * 2), await service.submit([ENDLESS])]
        for each in answers:
            with pytest.raises(Failed, match="out of memory"):
                async for _ in each:
                    pass
        with pytest.raises(Failed):
            await service.submit([ENDLESS])
        await asyncio.wait_for(service.drain(), 5)
        await service.stop()

    answered(ask())


def test_a_server_whose_engine_failed_is_not_healthy_and_says_why():
    async def ask():
        service = Service(Engine(), waiting=2)
        service.failure = RuntimeError("out of memory")
        app = make_app(State(types.SimpleNamespace(engine=service.engine), service, "tiny"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            health = await client.get("/health")
            answer = await client.post("/v1/completions", json={"prompt": [1]})
        for response in (health, answer):
            assert response.status_code == 503
            assert "out of memory" in response.json()["error"]["message"]

    asyncio.run(ask())


class Broken:
    """A grammar that cannot go on after a token."""

    finished = False

    def mask(self):
        return np.full(1, -1, np.int32)

    def accept(self, token):
        raise RuntimeError("grammar: the answer cannot go on")


def test_a_grammar_that_fails_ends_its_own_request_only():
    async def ask():
        service = started()
        engine = service.engine
        sampling = Sampling(max_tokens=10**9, grammar=Answer(Broken()))
        answers = await service.submit([EngineRequest([1], sampling)])
        other = await service.submit([ENDLESS])
        with pytest.raises(RuntimeError, match="cannot go on"):
            async for _ in answers:
                pass
        steps = engine.steps
        async for _ in other:
            if engine.steps > steps + 5:
                break
        other.close()
        await service.stop()

    answered(ask())


def test_closed_answers_leave_the_engine():
    async def ask():
        service = started()
        answers = await service.submit([ENDLESS] * 3)
        async for index, _ in answers:
            if index == 1:
                break
        answers.close()
        await asyncio.wait_for(service.drain(), 5)
        while service.engine.busy:
            await asyncio.sleep(0.01)
        await service.stop()

    answered(ask())


def test_one_client_leaves_a_quarter_of_what_may_wait_to_the_others():
    async def ask():
        service, taken = started(98), []
        for client, most in (("a", 75), ("b", 19), ("c", 5)):
            taken.append(await service.submit([ENDLESS] * most, client))
            with pytest.raises(Full, match="of your requests run and wait, of"):
                await service.submit([ENDLESS], client)
        with pytest.raises(ConfigError, match="serve.max_waiting lets 75 of one client"):
            await service.submit([ENDLESS] * 76, "d")
        for answers in taken:
            answers.close()
        service.check(75, "d")
        await service.stop()

    answered(ask())


WIDE = {str(i): 0 for i in range(3000)}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": [[1]] * 100_000}, "at most 16384 items"),
        ({"prompt": ["x"] * 100_000 + [1]}, "at most 16384 items"),
        ({str(i): 0 for i in range(3000)}, "more than 2048 keys"),
        ({"logit_bias": {str(i): "x" for i in range(3000)}}, "more than 2048 keys"),
        ({"guided_choice": [1] * 100_000}, "guided_choice.0=1: Input should be a valid string"),
        ({"stop": [1] * 100_000}, "stop.*0=1: Input should be a valid string"),
        ({"prompt": [[1]] * 250_000}, "the body: holds more than 200,000 lists and objects"),
        ({"response_format": {"type": "json_schema", "json_schema": WIDE}}, "json_schema.*2048"),
    ],
)
def test_a_body_of_many_faults_is_read_to_the_first(fields, words):
    with pytest.raises(Refusal, match=words) as refusal:
        parse_body(CompletionBody, json.dumps({"prompt": "x"} | fields).encode())
    assert refusal.value.status == 400 and len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "user"} | WIDE]}, "messages.0=.*more than 2048 keys"),
        ({"messages": [{"role": "user", "content": [WIDE]}]}, "content.*0=.*than 2048 keys"),
        ({"messages": [{"role": "a", "tool_calls": [WIDE]}]}, "calls.0=.*than 2048 keys"),
        ({"tools": [WIDE]}, "tools.0=.*more than 2048 keys"),
        ({"tool_choice": {"function": WIDE}}, "function=.*more than 2048 keys"),
    ],
)
def test_a_conversation_of_many_faults_is_read_to_the_first(fields, words):
    messages = {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(Refusal, match=words) as refusal:
        parse_body(ChatBody, json.dumps(messages | fields).encode())
    assert refusal.value.status == 400


def test_the_largest_conversation_is_read():
    call = {"id": "1", "function": {"name": "f", "arguments": {}}}
    part = {"type": "text", "text": "[{"}
    message = {"role": "assistant", "content": [part], "tool_calls": [call]}
    body = json.dumps({"messages": [message] * 16_384}).encode()
    assert len(parse_body(ChatBody, body).messages) == 16_384
