"""Requests made to end, stop or fill a server, against a real one: another client is answered
meanwhile, the process lives, and its memory and descriptors are as before.

EXPERIMENTS.md has the other client's longest waits.
"""

import collections
import json
import os
import threading
import time
from pathlib import Path

import httpx
import pytest
from served import HELLO, make, serving
from tokenizers import pre_tokenizers

SECONDS = 60
"""For an answer on a machine that is busy with other tests."""
MEMORY = 300 << 20
LENGTH = 512
JSON = {"Content-Type": "application/json"}


def objects(count):
    """A JSON schema whose definitions refer to one another, one after the other."""
    defs = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {"type": "string"}}}


def answer_of(schema):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": [{"role": "user", "content": "x"}], "response_format": form}


def rules(count):
    between = "".join(f'r{i}: r{i + 1} "a"\n' for i in range(count))
    return f'start: r0\n{between}r{count}: "b"'


def shared(count):
    """Rules that a parser holds open side by side, behind a text that leaves no choice."""
    each = "".join(f"r{i}: X\n" for i in range(count))
    heads = " | ".join(f"r{i} s" for i in range(count))
    return f"start: P s\nP: /a{{4}}/\ns: {heads} | X\n{each}X: /[a-zA-Z ]/"


A = sorted(pre_tokenizers.ByteLevel.alphabet()).index("a")
AMBIGUOUS = 'start: e\ne: e e | "a" | ' + " | ".join("e " * count for count in range(3, 9))
ATTACKS = {
    "a chain of definitions": ("/v1/chat/completions", answer_of(objects(1000)), 2, {400}),
    "a chain of rules": ("/v1/completions", {"guided_grammar": rules(9000)}, 2, {400}),
    "a schema of much memory": (
        "/v1/completions",
        {"guided_json": {"type": "integer", "multipleOf": 9_999_991}},
        1,
        {400},
    ),
    "many alternatives": (
        "/v1/completions",
        {"guided_choice": [f"{i * 7919 % 1_000_003:06}x" for i in range(100_000)]},
        8,
        {400},
    ),
    "an ambiguous grammar": (
        "/v1/completions",
        {"guided_grammar": AMBIGUOUS, "max_tokens": 400, "logit_bias": {str(A): 100}},
        4,
        {400},
    ),
    "a costly step behind a cheap one": (
        "/v1/completions",
        {"guided_grammar": shared(240), "max_tokens": 20},
        4,
        {400},
    ),
    "repetitions of repetitions": (
        "/v1/completions",
        {"guided_regex": "(a{1,1000}){1,1000}", "max_tokens": 400},
        4,
        {200, 400},
    ),
    "long prompts": ("/v1/completions", {"prompt": "a b " * 2_000_000}, 6, {400, 429}),
    "a long text to tokenize": ("/tokenize", {"prompt": "ab " * 2_500_000}, 1, {400}),
    "many messages": ("/v1/chat/completions", {"messages": [HELLO[0]] * 150_000}, 2, {400}),
    "a body that is nested": ("/v1/completions", b"[" * 200_000, 2, {400}),
    "a number of many digits": ("/v1/completions", b'{"seed": 1%s}' % (b"0" * 5000), 2, {400}),
}
"""By name: path, fields of the body, how often it is sent at once, and the statuses it may get."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make(tmp_path_factory.mktemp("served") / "model", LENGTH)
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(folder, log, "serve.max_requests=4") as server:
        yield server
        assert "Traceback" not in log.read_text()


def memory(server):
    """Bytes of the process that answers."""
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def descriptors(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.mark.parametrize("name", ATTACKS)
def test_others_are_answered_and_nothing_of_it_stays(server, name):
    path, fields, count, statuses = ATTACKS[name]
    server.complete(guided_regex=name)  # which starts the process that tries grammars
    server.http.get("/health")
    body = fields
    if not isinstance(body, bytes):
        body = {"model": "tiny"} | ({} if "messages" in fields else {"prompt": "x"}) | fields
        body = json.dumps(body).encode()
    before, held = memory(server), descriptors(server)
    found = collections.Counter()

    def attack():
        url = f"{server.http.base_url}{path}".replace("//v1", "/v1")
        found[httpx.post(url, content=body, headers=JSON, timeout=SECONDS).status_code] += 1

    threads = [threading.Thread(target=attack) for _ in range(count)]
    for thread in threads:
        thread.start()
    answered = 0
    while any(thread.is_alive() for thread in threads) or answered < 2:
        assert server.http.get("/health", timeout=SECONDS).status_code == 200
        assert server.complete(max_tokens=2, timeout=SECONDS).choices
        answered += 1
    assert {*found} <= statuses and found.total() == count
    assert server.process.poll() is None
    server.wait_until_idle()
    deadline = time.monotonic() + 10
    while memory(server) > before + MEMORY or descriptors(server) > held:
        assert time.monotonic() < deadline, (memory(server) - before, descriptors(server) - held)
        time.sleep(0.1)
