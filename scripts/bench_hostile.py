"""The worst wait of a good client of `maxstack serve` while another client sends what costs most:
long prompts, long conversations, many long streams, grammars.

The good client asks for /health and for an answer of four tokens, in turn and on two connections,
with a key of its own. Each attack has a key of its own too. Reports the longest wait of each, the
statuses that the attack got, how long it took, and the server's memory before, at its most, and
after.

example: python scripts/bench_hostile.py --model runs/quickstart serve.max_requests=4
"""

import argparse
import collections
import http.client
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
SECONDS = 300
"""Longest start of a server, and wait for an answer."""
AFTER = 3
"""Seconds between an attack's end and the second look at the memory."""
LONG = "The quick brown fox jumps over the lazy dog, number 12345. "
LENGTHS = 1, 3, 7, 15, 31, 100, 300, 500
"""Tokens of prompts before the attack, for which steps of all sizes are compiled."""
MESSAGE = {"role": "user", "content": "hello"}


def body(**fields: Any) -> bytes:
    """The JSON of a request."""
    return json.dumps(fields).encode()


def text(size: int) -> str:
    """A text of so many bytes."""
    return (LONG * (size // len(LONG) + 1))[:size]


def attacks(size: int, streams: int) -> dict[str, tuple[str, bytes, int]]:
    """By name: path, body, and how many of them are sent at once."""
    prompt = body(prompt=text(size), max_tokens=4)
    words = body(prompt=text(size), return_token_strs=True)
    chat = body(messages=[MESSAGE] * min(200_000, size // 40), max_tokens=4)
    stream = body(prompt="Once", max_tokens=1000, ignore_eos=True, stream=True)
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1000)}
    chain = {"$ref": "#/$defs/d0", "$defs": links | {"d1000": {"type": "string"}}}
    rules = "".join(f'r{i}: r{i + 1} "a"\n' for i in range(9000))
    choices = [f"{i * 7919 % 1_000_003:06x}" for i in range(100_000)]
    readings = " | ".join("e " * count for count in range(3, 9))
    grammars: dict[str, tuple[dict[str, Any], int]] = {
        "a chain of definitions": ({"guided_json": chain}, 2),
        "a chain of rules": ({"guided_grammar": f'start: r0\n{rules}r9000: "b"'}, 2),
        "a schema of much memory": (
            {"guided_json": {"type": "integer", "multipleOf": 9_999_991}},
            1,
        ),
        "many choices": ({"guided_choice": choices}, 8),
        "an ambiguous grammar": ({"guided_grammar": f'start: e\ne: e e | "a" | {readings}'}, 4),
        "repetitions of repetitions": ({"guided_regex": "(a{1,1000}){1,1000}"}, 4),
    }
    return {
        "one long prompt": ("/v1/completions", prompt, 1),
        "six long prompts": ("/v1/completions", prompt, 6),
        "a long /tokenize": ("/tokenize", words, 1),
        "a chat of many messages": ("/v1/chat/completions", chat, 1),
        "many long streams": ("/v1/completions", stream, streams),
        **{
            name: ("/v1/completions", body(prompt="Once", max_tokens=400, **fields), count)
            for name, (fields, count) in grammars.items()
        },
    }


class Server:
    """The server's process."""

    def __init__(self, words: list[str], folder: Path):
        keys = folder / "keys"
        keys.write_text("good\nhostile\n")
        self._log = (folder / "log").open("w")
        command = [sys.executable, "-m", "maxstack.cli", "serve", *words]
        command += ["--port", "0", "--api-key-file", str(keys), "--served-model-name", "model"]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        until = time.monotonic() + SECONDS
        while not (found := re.search(r"http://\S+?:(\d+)", (folder / "log").read_text())):
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.1)
        self.port = int(found[1])

    def memory(self) -> float:
        """MB that the process and those that it started have in memory."""
        own = str(self.process.pid)
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        pages = [Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in [own, *children]]
        return sum(map(int, pages)) * PAGE / 1e6

    def ask(self, key: str, path: str, content: bytes | None = None) -> int:
        """The status of an answer that is read to its end; 0 where the connection broke."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        try:
            connection.request("GET" if content is None else "POST", path, content, headers)
            answer = connection.getresponse()
            while answer.read(1 << 16):
                pass
            return answer.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


class Watch:
    """Something that is done again and again, and how long it took at most, the last time too,
    which may not have ended."""

    def __init__(self, what: Callable[[], Any], pause: float):
        self.worst, self.count, self._began = 0.0, 0, math.inf
        self._what, self._pause, self._ended = what, pause, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._ended.wait(self._pause):
            self._began = time.monotonic()
            self._what()
            self.worst = max(self.worst, time.monotonic() - self._began)
            self._began, self.count = math.inf, self.count + 1

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.worst = max(self.worst, time.monotonic() - self._began)


def measured(server: Server, path: str, content: bytes, count: int, limit: float) -> dict[str, Any]:
    """What an attack of `count` requests at once costs others, for at most `limit` seconds."""
    statuses: collections.Counter[int] = collections.Counter()
    numbers: Iterator[int] = itertools.count()
    peak, before = [0.0], server.memory()

    def attack() -> None:
        statuses[server.ask("hostile", path, content)] += 1

    def complete() -> None:
        prompt = f"question {next(numbers)}"
        status = server.ask("good", "/v1/completions", body(prompt=prompt, max_tokens=4))
        assert status in (0, 200), status

    def look() -> None:
        peak[0] = max(peak[0], server.memory())

    health = Watch(lambda: server.ask("good", "/health"), 0.01)
    threads = [threading.Thread(target=attack, daemon=True) for _ in range(count)]
    with health, Watch(complete, 0.01) as answers, Watch(look, 0.05):
        time.sleep(0.3)
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0, began + limit - time.monotonic()))
        took = time.monotonic() - began
    time.sleep(AFTER)
    return {
        "health_s": round(health.worst, 3),
        "answer_s": round(answers.worst, 3),
        "answers": answers.count,
        "took_s": round(took, 1),
        "statuses": dict(statuses),
        "before_mb": round(before),
        "peak_mb": round(peak[0]),
        "after_mb": round(server.memory()),
    }


def main() -> None:
    """Serve, attack, and print a line of JSON for each attack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a run, or a Hugging Face folder")
    parser.add_argument("--size", type=int, default=8_000_000, help="bytes of a long prompt")
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--limit", type=float, default=120, help="seconds of an attack at most")
    parser.add_argument("--only", help="attacks whose name has this in it")
    args, overrides = parser.parse_known_args()
    for name, attack in attacks(args.size, args.streams).items():
        if args.only and args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            server = Server([args.model, *overrides], Path(folder))
            try:
                for length in LENGTHS:
                    warm = body(prompt=[1 + i % 100 for i in range(length)], max_tokens=4)
                    server.ask("good", "/v1/completions", warm)
                print(name, json.dumps(measured(server, *attack, args.limit)), flush=True)
            finally:
                server.process.kill()
                server.process.wait()


if __name__ == "__main__":
    main()
