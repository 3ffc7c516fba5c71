"""Rows a second of a package: by the server, which joins requests in batches, by the same server
with batches of one row, and by a plain loop over the jitted program without a server.

Both servers are alive the whole time and are asked in turn by as many clients, each with one row at
a time; in the same rounds the loop runs in this process, with batches of one row and with the
largest batch. Ratios are of pairs within a round, and their median is reported. What a request
costs beside its program bounds small models.

example: python scripts/bench/packages.py --package packages/digits --clients 32 --rounds 5
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from bench import arguments
from bench.package_client import (
    Connection,
    Sample,
    Server,
    largest,
    quantiles,
    sample,
    served,
)
from jax import export

from maxstack.package.loader import Package

JOINED, SINGLE, LOOP, LARGE = "joined", "one row", "loop of one row", "loop of the largest batch"


async def asked(server: Server, request: Sample, clients: int, seconds: float) -> dict[str, Any]:
    """Rows a second of so many clients, latencies, and rows of the batches that they saw."""
    latencies: list[float] = []
    rows: list[int] = []
    until = time.monotonic() + seconds

    async def client() -> None:
        async with Connection(server.port) as connection:
            while time.monotonic() < until:
                began = time.monotonic()
                said = await connection.ask(request.data)
                if said.status != 200:
                    raise SystemExit(f"the server answers {said.status}: {said.message}")
                latencies.append(time.monotonic() - began)
                rows.append(said.message["parameters"]["batch_size"])

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    took = time.monotonic() - began
    return {
        "rows a second": request.rows * len(latencies) / took,
        "latency ms": quantiles(latencies),
        "rows of a batch": round(statistics.mean(rows), 1),
    }


class Loop:
    """A program of a package as plain jax calls it: weights on the device, arguments from the host,
    and results there."""

    def __init__(self, package: Package, name: str, rows: int):
        signature = package.signatures[name]
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        request = sample(package, name, np.random.default_rng(0), largest(signature, rows))
        self._inputs = request.inputs
        program = signature.program(signature.arrays(self._inputs)[1])
        least = program["sizes"].get("batch") or rows
        if least > rows:  # a program of more rows: as the loader pads
            self._inputs = sample(
                package, name, np.random.default_rng(0), largest(signature, least)
            ).inputs
        exported = export.deserialize(bytearray((package.folder / program["file"]).read_bytes()))
        self._weights = package.weights(dict.fromkeys(package.manifest["weights"], place))
        self._call, self._rows = jax.jit(exported.call), rows
        self._run()

    def measured(self, seconds: float) -> dict[str, Any]:
        """Rows a second."""
        count, began = 0, time.monotonic()
        while (took := time.monotonic() - began) < seconds:
            self._run()
            count += self._rows
        return {"rows a second": count / took}

    def _run(self) -> None:
        results, _ = self._call(self._weights, {}, jax.device_put(self._inputs))
        jax.tree.map(np.asarray, results)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--package", type=Path, required=True, help="a package's folder")
    parser.add_argument("--signature", help="(default: the first that is served)")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="rows of the largest batch")
    parser.add_argument("--batch-timeout", default="2000", help="as `maxstack serve` takes it")
    arguments.takes_json(parser)
    args = parser.parse_args()
    package = Package(args.package)
    name = args.signature or served(package)[0]
    signature = package.signatures[name]
    fixed = [program["sizes"].get("batch") for program in signature.spec["programs"]]
    most = args.batch if None in fixed else max(size for size in fixed if size)
    request = sample(package, name, np.random.default_rng(0), largest(signature, 1))
    sizes = ",".join(str(2**i) for i in range(most.bit_length()) if 2**i <= most)
    with tempfile.TemporaryDirectory() as logs:
        joined = ["--batch-sizes", sizes, "--batch-timeout", args.batch_timeout]
        single = ["--batch-sizes", "1", "--batch-timeout", "0"]
        servers = {
            kind: Server([args.package], Path(logs) / kind, "--poll", "0", *flags)
            for kind, flags in ((JOINED, joined), (SINGLE, single))
        }
        loops = {LOOP: Loop(package, name, 1), LARGE: Loop(package, name, most)}
        try:
            rounds = [
                {
                    kind: asyncio.run(asked(server, request, args.clients, args.seconds))
                    for kind, server in servers.items()
                }
                | {kind: loop.measured(args.seconds) for kind, loop in loops.items()}
                for _ in range(args.rounds + 1)
            ][1:]
        finally:
            for server in servers.values():
                server.end()
    report(rounds, f"{package.manifest['name']}.{name}, {args.clients} clients")
    arguments.write_json(args.json, rounds)


def report(rounds: list[dict[str, Any]], title: str) -> None:
    """Print medians and ratios."""
    print(title)
    for kind in rounds[0]:
        speeds = [each[kind]["rows a second"] for each in rounds]
        ratio = statistics.median(
            each[JOINED]["rows a second"] / each[kind]["rows a second"] for each in rounds
        )
        shown = {key: each for key, each in rounds[-1][kind].items() if key != "rows a second"}
        print(
            f"{kind}: {statistics.median(speeds):,.0f} rows/s ({min(speeds):,.0f} to "
            f"{max(speeds):,.0f}); joined / this {ratio:.2f}{'; last round ' * bool(shown)}"
            f"{json.dumps(shown) if shown else ''}"
        )


if __name__ == "__main__":
    main()
