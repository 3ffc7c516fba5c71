"""Clients that ask `maxstack serve` for minutes, and behave as clients do: they read streams, wait
for whole answers, read slowly, leave in the middle, die, send bodies that are too large or no
requests.

Reports requests by what became of them; those that were lost, neither answered in full nor refused;
different answers to one same request; pages that are in use when all is over; growth of the
server's memory; p50 and p99 of the time to the first token and between tokens, as clients see them.
Exit code 1 where something was lost, differs or leaks, or the server does not end by draining.

example: python scripts/soak_server.py --model runs/quickstart --minutes 5 --clients 64
"""

import argparse
import asyncio
import collections
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench.connection import Opened

BEHAVIOURS = {
    "reads a stream": 40,
    "waits for the whole": 20,
    "asks the same": 10,
    "reads slowly": 5,
    "leaves": 12,
    "dies": 8,
    "sends no request": 4,
    "sends too much": 1,
}
"""How often each is chosen."""
WRONG = (b"{", b"[]", b'{"prompt": 3}', b'{"prompt": [-1]}', b'{"prompt": "x", "n": 0}', b"\xff")
OVERSIZED = 9 << 20
SLOW = 0.05
"""Seconds that a slow reader waits before each line."""
PAGE = os.sysconf("SC_PAGE_SIZE")
SECONDS = 300
"""Longest start of a server, wait for a line, and end."""


class Connection(Opened):
    """A request over a connection of its own."""

    async def ask(self, body: bytes, sent: int | None = None) -> None:
        """Send a completion's body, or its first bytes."""
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write((head.encode() + body)[:sent])
        await self._writer.drain()

    async def status(self) -> int:
        """The status of the answer, after whose header its body is read."""
        status = int((await self._line()).split()[1])
        while (await self._line()).strip():
            pass
        return status

    async def whole(self) -> Any:
        """The JSON of the answer."""
        return json.loads(await asyncio.wait_for(self._reader.read(), SECONDS))

    async def events(self, pause: float = 0.0) -> AsyncIterator[Any]:
        """The events of the answer up to [DONE]; EOFError where it ends before."""
        while True:
            await asyncio.sleep(pause)
            line = await self._line()
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    def die(self) -> None:
        """End the connection as the system does for a process that was killed."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def _line(self) -> bytes:
        line = await asyncio.wait_for(self._reader.readline(), SECONDS)
        if not line:
            raise EOFError("the connection ended within an answer")
        return line


class Soak:
    """The clients, and what they saw."""

    def __init__(self, port: int, args: argparse.Namespace):
        self._port, self._args = port, args
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.problems: list[str] = []
        self.first: list[float] = []
        self.between: list[float] = []
        self.same: set[str] = set()
        self.same_tokens: set[str] = set()
        rng = random.Random(0)
        self._shared = [rng.randrange(args.tokens) for _ in range(args.prompt)]

    async def client(self, number: int, until: float) -> None:
        """A client, which asks again and again."""
        rng = random.Random(number)
        while time.monotonic() < until:
            (behaviour,) = rng.choices([*BEHAVIOURS], [*BEHAVIOURS.values()])
            try:
                async with Connection(self._port) as connection:
                    outcome = await self._behave(behaviour, connection, rng)
            except (OSError, EOFError, ValueError, LookupError) as error:
                outcome = "lost"
                self.problems.append(f"{behaviour}: {error!r}")
            self.outcomes[behaviour][outcome] += 1
            if outcome == "refused":
                await asyncio.sleep(rng.uniform(0.5, 1.5))

    async def _behave(self, behaviour: str, connection: Connection, rng: random.Random) -> str:
        if behaviour in ("reads a stream", "reads slowly"):
            return await self._stream(connection, rng, SLOW * (behaviour == "reads slowly"))
        if behaviour in ("waits for the whole", "asks the same"):
            return await self._whole(connection, rng, behaviour == "asks the same")
        if behaviour == "leaves":
            return await self._leave(connection, rng)
        if behaviour == "dies":
            body = self._body(rng, stream=True)
            await connection.ask(body, rng.choice([50, len(body), None]))
            await asyncio.sleep(rng.uniform(0, 0.3))
            connection.die()
            return "died"
        wrong = rng.choice(WRONG), 400
        body, wanted = (b"x" * OVERSIZED, 413) if behaviour == "sends too much" else wrong
        await connection.ask(body)
        return self._checked(await connection.status() == wanted, "refused by name", behaviour)

    async def _stream(self, connection: Connection, rng: random.Random, pause: float) -> str:
        body = self._body(rng, stream=True)
        began, times, count, reason = time.monotonic(), [], 0, None
        await connection.ask(body)
        status = await connection.status()
        if status == 429:
            return "refused"
        async for event in connection.events(pause):
            for choice in event["choices"]:
                times.append(time.monotonic())
                count += len(choice["token_ids"])
                reason = choice["finish_reason"]
        if not pause and times:
            self.first.append(times[0] - began)
            self.between += [late - early for early, late in zip(times, times[1:], strict=False)]
        whole = count == json.loads(body)["max_tokens"] and reason == "length"
        return self._checked(whole, "answered", f"{status}, {count} tokens, {reason}")

    async def _whole(self, connection: Connection, rng: random.Random, same: bool) -> str:
        body = self._body(random.Random(0) if same else rng, logprobs=1)
        await connection.ask(body)
        status = await connection.status()
        if status == 429:
            return "refused"
        choice = (await connection.whole())["choices"][0]
        if same:
            self.same.add(json.dumps(choice))
            self.same_tokens.add(json.dumps(choice["token_ids"]))
        count = len(choice["token_ids"])
        return self._checked(
            count == json.loads(body)["max_tokens"], "answered", f"{status}, {count} tokens"
        )

    async def _leave(self, connection: Connection, rng: random.Random) -> str:
        await connection.ask(self._body(rng, stream=rng.random() < 0.7))
        if rng.random() < 0.5:
            await asyncio.sleep(rng.uniform(0, 0.3))
            return "left"
        if await connection.status() == 429:
            return "refused"
        return "left"

    def _body(self, rng: random.Random, **fields: Any) -> bytes:
        """A request whose prompt may begin as others do."""
        shared = self._shared[: rng.choice([0, 0, len(self._shared) // 2])]
        own = [rng.randrange(self._args.tokens) for _ in range(rng.randint(1, self._args.prompt))]
        settings = {
            "prompt": (shared + own)[: self._args.prompt],
            "max_tokens": rng.randint(1, self._args.answer),
            "seed": rng.randrange(1 << 30),
            "temperature": rng.choice([0, 0.7, 1]),
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return json.dumps(settings | fields).encode()

    def _checked(self, holds: bool, outcome: str, problem: str) -> str:
        if holds:
            return outcome
        self.problems.append(problem)
        return "lost"


async def figures(port: int) -> dict[str, float]:
    """The server's metrics, without labels; `_total` names are sums."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    found: collections.Counter[str] = collections.Counter()
    for name, value in re.findall(r"^vllm:(\w+)\{.*\} (\S+)$", text, re.M):
        found[name] += float(value)
    return dict(found)


async def idle(port: int) -> bool:
    """False where requests or pages are still in use after a while."""
    names = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
    for _ in range(600):
        found = await figures(port)
        if not any(found[name] for name in names):
            return True
        await asyncio.sleep(0.1)
    return False


async def soak(port: int, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run the clients -> the report."""
    clients, memory = Soak(port, args), []
    begun = time.monotonic()
    until = begun + 60 * args.minutes

    async def watch() -> None:
        while True:
            memory.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE)
            await asyncio.sleep(max(0.1, args.minutes / 4))

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(clients.client(i, until) for i in range(args.clients)))
    took = time.monotonic() - begun
    freed = await idle(port)
    watching.cancel()
    found = await figures(port)
    early, late = memory[len(memory) // 4], memory[-1]
    total = sum(clients.outcomes.values(), collections.Counter())
    return {
        "clients": args.clients,
        "seconds": round(took, 1),
        "requests": sum(total.values()),
        "outcomes": {name: dict(counts) for name, counts in clients.outcomes.items()},
        "lost": total["lost"],
        "problems": clients.problems[:10],
        "same request, different answers": max(0, len(clients.same) - 1),
        "of these with different tokens": max(0, len(clients.same_tokens) - 1),
        "all pages free at the end": freed,
        "pages in use at the end": found["kv_cache_usage_perc"],
        "preemptions": found["num_preemptions_total"],
        "prompt tokens from the cache": found["prefix_cache_hits_total"],
        "generated tokens a second": round(found["generation_tokens_total"] / took, 1),
        "memory MiB": {
            "after a quarter": round(early / 2**20, 1),
            "at the end": round(late / 2**20, 1),
            "largest": round(max(memory) / 2**20, 1),
        },
        "seconds to first token": quantiles(clients.first),
        "seconds between tokens": quantiles(clients.between),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p99 and the largest."""
    ordered = sorted(values) or [float("nan")]
    last = len(ordered) - 1
    return {
        "p50": round(ordered[last // 2], 4),
        "p99": round(ordered[last * 99 // 100], 4),
        "largest": round(ordered[last], 4),
    }


def start(args: argparse.Namespace, log: Path) -> tuple[subprocess.Popen, int]:
    """A server's process that listens, and its port."""
    words = [sys.executable, "-m", "maxstack.cli", "serve", args.model, "--port", "0"]
    process = subprocess.Popen(
        [*words, *args.overrides], stdout=log.open("w"), stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + SECONDS
    while not (found := re.search(r"http://\S+:(\d+)/v1", log.read_text())):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            sys.exit(f"the server did not start: {log.read_text()}")
        time.sleep(0.1)
    return process, int(found[1])


def main() -> int:
    """Print the report; 1 where it is bad."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="key=value, as `maxstack serve` takes them")
    parser.add_argument("--model", required=True, help="a run, or a Hugging Face folder")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="ids of prompts are below this")
    parser.add_argument("--prompt", type=int, default=100, help="longest prompt, in tokens")
    parser.add_argument("--answer", type=int, default=60, help="longest answer, in tokens")
    parser.add_argument("--json", metavar="FILE", help="write the report there too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, port = start(args, Path(folder) / "log")
        try:
            report = asyncio.run(soak(port, process.pid, args))
            process.send_signal(signal.SIGTERM)
            report["exit code"] = process.wait(SECONDS)
        finally:
            process.kill()
    for name, value in report.items():
        print(f"{name}: {json.dumps(value)}")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    good = report["all pages free at the end"] and report["exit code"] == 0
    return int(not good or report["lost"] + report["same request, different answers"] > 0)


if __name__ == "__main__":
    sys.exit(main())
