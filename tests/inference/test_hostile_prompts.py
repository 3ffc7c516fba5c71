"""Requests that cost much: they are refused by their size, read beside the event loop, and leave
short requests, other clients and the memory alone."""

import asyncio
import json
import threading
import time
import types

import numpy as np
import pytest
from engines import StandIn
from served import make
from starlette.requests import Request

from maxstack.data.chat import read_chat_template
from maxstack.data.tokenizers import open_prompt_tokenizer
from maxstack.inference.pooling import read_pooling
from maxstack.inference.request import Output, Token
from maxstack.inference.server.admission import Access
from maxstack.inference.server.app import make_app
from maxstack.inference.server.state import State
from maxstack.inference.server.threads import LONG, Threads
from maxstack.inference.service import Full, Service
from maxstack.schema.data import HuggingFaceTokenizer

DIM = 2048
TOP = tuple((token, -1.0) for token in range(20))
LOOP = 0.01
"""Seconds of processor time that a callback of the event loop may take here; 0.001 is the aim."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("served") / "model")


class Engine(StandIn):
    """Gives each request a token and a vector in one step, and its prompt if it is asked for."""

    def add(self, prompt, sampling, *_):
        # As the real engine: to free a million unasked tokens would take the event loop 20 ms.
        shown = prompt if sampling.prompt_logprobs is not None else ()
        return super().add(shown, sampling)

    def step(self):
        outputs = []
        for number, (shown, _) in [*self.tasks.items()]:
            told = tuple(Token(token, -1.0, TOP) for token in shown)
            vector = np.ones(DIM, np.float32)
            outputs.append(Output(number, (Token(7, -1.0, TOP),), told, "length", 0, vector))
            del self.tasks[number]
        return outputs


def app_of(folder, length=1 << 17):
    engine = Engine(4, length)
    tokenizer = open_prompt_tokenizer(
        HuggingFaceTokenizer(kind="huggingface", path=str(folder / "tokenizer.json"))
    )
    cfg = types.SimpleNamespace(decoder=types.SimpleNamespace(vocab=tokenizer.vocab_size))
    served = types.SimpleNamespace(
        engine=engine, tokenizer=tokenizer, stop_tokens=frozenset(), cfg=cfg, folder=folder
    )
    state = State(served, Service(engine, 1024), "tiny", read_chat_template(folder))
    read_pooling(folder)
    return make_app(state)


async def post(app, path, content):
    """The status and the parts of an answer."""
    asked = [{"type": "http.request", "body": content, "more_body": False}]
    sent = []

    async def receive():
        return asked.pop() if asked else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": ""}
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    await app(scope | {"headers": headers, "client": ("a", 1)}, receive, send)
    return sent[0]["status"], [message.get("body", b"") for message in sent]


def asked(app, path, **body):
    """The same, of a body as it is answered on an event loop."""
    content = json.dumps(body).encode()

    async def ask():
        service = app.state.server.service
        service.start()
        answer = await post(app, path, content)
        await service.stop()
        return answer

    status, parts = asyncio.run(asyncio.wait_for(ask(), 60))
    return status, b"".join(parts)


@pytest.fixture
def loop_time(monkeypatch):
    """The processor time of each callback of event loops."""
    times, run = [], asyncio.events.Handle._run

    def timed(handle):
        began = time.thread_time()
        run(handle)
        times.append(time.thread_time() - began)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    return times


TOKENS = [*range(100)] * 20
COSTLY = {
    "tokens with their texts": (
        "/tokenize",
        {"prompt": "ab c" * 25_000, "return_token_strs": True},
    ),
    "the text of tokens": ("/detokenize", {"tokens": TOKENS * 5}),
    "an echo": ("/v1/completions", {"prompt": TOKENS, "echo": True, "logprobs": 5}),
    "a scored prompt": ("/v1/completions", {"prompt": TOKENS, "prompt_logprobs": 20}),
    "the same as events": (
        "/v1/completions",
        {"prompt": TOKENS, "echo": True, "logprobs": 5, "prompt_logprobs": 20, "stream": True},
    ),
    "many prompts": ("/v1/completions", {"prompt": [TOKENS] * 700}),
    "many vectors": ("/v1/embeddings", {"input": ["a"] * 200}),
}


@pytest.mark.parametrize("what", COSTLY)
def test_nothing_that_is_asked_for_takes_long_on_the_event_loop(folder, loop_time, what):
    path, body = COSTLY[what]
    status, content = asked(app_of(folder), path, **body)
    assert status == 200 and len(content) > 1000
    assert max(loop_time) < LOOP


HUGE = "a " * 2_000_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": HUGE}),
        ("/v1/completions", {"prompt": ["b", HUGE]}),
        ("/v1/completions", {"prompt": [1] * 1_000_000}),
        ("/v1/embeddings", {"input": HUGE}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HUGE}]}),
        ("/tokenize", {"prompt": HUGE}),
        ("/tokenize", {"messages": [{"role": "user", "content": HUGE}]}),
        ("/detokenize", {"tokens": [1] * 1_000_000}),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    folder, monkeypatch, path, body
):
    app = app_of(folder, 64)
    tokenizer = app.state.server.tokenizer
    for name in ("_text_ids", "_marked_ids", "encode_marked"):
        monkeypatch.setattr(tokenizer, name, lambda text: [1] if len(text) < 10 else 1 / 0)
    status, content = asked(app, path, **body)
    message = json.loads(content)["error"]["message"]
    assert status == 400 and ("serve.max_length=64" in message or "1000000 tokens" in message)


def test_more_messages_than_a_conversation_may_have_are_refused(folder):
    messages = [{"role": "user", "content": "a"}] * 20_000
    for path in ("/v1/chat/completions", "/tokenize"):
        status, content = asked(app_of(folder), path, messages=messages)
        assert status == 400 and b"at most 16384 items" in content


def test_tokenizing_ends_once_a_prompt_is_too_long(folder, monkeypatch):
    app = app_of(folder, 100)
    tokenizer, parts = app.state.server.tokenizer, []
    monkeypatch.setattr(tokenizer, "fewest", lambda document: 0)
    encode = tokenizer._marked_ids
    monkeypatch.setattr(
        tokenizer, "_marked_ids", lambda text: (parts.append(len(text)), encode(text))[1]
    )
    status, content = asked(app, "/v1/completions", prompt=HUGE)
    assert status == 400 and b"longer than serve.max_length=100 tokens" in content
    assert 0 < sum(parts) < len(HUGE) / 2


def test_a_prompt_that_just_fits_is_read(folder):
    app = app_of(folder, 64)
    marks = "<|im_start|>" * 63  # the widest token
    status, content = asked(app, "/tokenize", prompt=marks, return_token_strs=True)
    told = json.loads(content)
    assert status == 200 and (told["count"], told["token_strs"]) == (63, ["<|im_start|>"] * 63)
    assert asked(app_of(folder, 64), "/v1/completions", prompt=marks)[0] == 200


def test_long_bodies_take_turns_by_client_and_short_ones_pass_them():
    async def ask():
        threads, go, order = Threads(), threading.Event(), []

        def read(name):
            assert go.wait(10)
            order.append(name)

        long = [
            asyncio.create_task(threads.run(LONG, client, read, f"{client}{i}"))
            for client, i in (("a", 0), ("a", 1), ("a", 2), ("b", 0))
        ]
        await asyncio.sleep(0)
        assert await threads.run(10, "a", lambda: "short") == "short"
        go.set()
        await asyncio.gather(*long)
        return order

    assert asyncio.run(ask()) == ["a0", "b0", "a1", "a2"]


def test_a_client_whose_long_bodies_wait_leaves_room_for_another():
    async def ask():
        threads, go = Threads(), threading.Event()
        size = 8 << 20
        waits = [asyncio.create_task(threads.run(size, "a", go.wait, 10)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Full, match="try later"):
            await threads.run(size, "a", go.wait, 10)
        other = asyncio.create_task(threads.run(size, "b", go.wait, 10))
        await asyncio.sleep(0)
        go.set()
        assert all(await asyncio.gather(*waits, other))

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("keys", "host", "key", "client"),
    [
        ((b"one", b"two"), "10.0.0.1", "two", "key 1"),
        ((b"one", b"two"), "10.0.0.2", "one", "key 0"),
        ((), "10.0.0.1", "one", "10.0.0.1"),
        ((), "2001:db8:1:2:3:4:5:6", "", "2001:db8:1:2::/64"),
        ((), "2001:db8:1:2::9", "", "2001:db8:1:2::/64"),
        ((), "::ffff:10.0.0.1", "", "::ffff:10.0.0.1"),
        ((), "fe80::1%eth0", "", "fe80::1%eth0"),
        ((), "no:address", "", "no:address"),
    ],
)
def test_a_client_is_its_key_or_without_keys_its_address(keys, host, key, client):
    headers = [(b"authorization", f"Bearer {key}".encode())]
    request = Request({"type": "http", "client": (host, 1), "headers": headers})
    assert Access(keys).check(request) == client
