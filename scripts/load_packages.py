"""Clients that ask `maxstack serve` for a package's signatures, in requests of mixed sizes, while a
damaged version and then a good one are put beside the version that answers.

Reports requests that were sent, answered, refused because as many waited as may, wrong (another
result than the loader computes from the same version, or an older version after a newer one) and
lost (neither answered nor refused); latencies in milliseconds; versions that answered; rows and
zeros of their batches. Exit code 1 where something was lost or wrong, the damaged version is not
refused by name, the good one does not answer at the end, or the server does not end by draining.

The good version is the package with all weights of real numbers halved.

example: python scripts/load_packages.py --package packages/digits --clients 16 --seconds 30
"""

import argparse
import asyncio
import collections
import contextlib
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from bench import arguments
from bench.package_client import (
    Connection,
    Said,
    Sample,
    Server,
    post,
    quantiles,
    sample,
    served,
)
from safetensors import safe_open
from safetensors.numpy import save_file

from maxstack.package.loader import Package

FIRST, DAMAGED, GOOD = 1, 2, 3
SAMPLES = 12
"""Different requests of each signature."""


class Load:
    """The clients, and what they saw."""

    def __init__(self, port: int, samples: list[Sample], expected: dict[tuple[int, int], Any]):
        self._port, self._samples, self._expected = port, samples, expected
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.versions: collections.Counter[int] = collections.Counter()
        self.problems: list[str] = []
        self.seconds: list[float] = []

    async def client(self, number: int, until: float) -> None:
        """A client, which asks again and again."""
        rng, latest = random.Random(number), 0
        while time.monotonic() < until:
            try:
                async with Connection(self._port) as connection:
                    while time.monotonic() < until:
                        latest = await self._ask(connection, rng, latest)
            except (OSError, EOFError, ValueError, LookupError) as error:
                self._count("lost", repr(error))

    async def _ask(self, connection: Connection, rng: random.Random, latest: int) -> int:
        place = rng.randrange(len(self._samples))
        self.outcomes["sent"] += 1
        began = time.monotonic()
        said = await connection.ask(self._samples[place].data)
        took = time.monotonic() - began
        if said.status == 503:
            self._count("refused")
            await asyncio.sleep(rng.uniform(0, 0.1))
            return latest
        if said.status != 200:
            self._count("lost", f"{said.status}: {said.message}")
            return latest
        self.seconds.append(took)
        version = int(said.message["model_version"])
        self.versions[version] += 1
        if version < latest:
            self._count("wrong", f"version {version} after {latest}")
        elif problem := differs(said, self._expected[version, place]):
            self._count("wrong", f"{self._samples[place].model} version {version}: {problem}")
        else:
            self._count("answered")
        return version

    def _count(self, outcome: str, problem: str = "") -> None:
        self.outcomes[outcome] += 1
        if problem:
            self.problems.append(problem)


def differs(said: Said, expected: dict[str, np.ndarray]) -> str:
    """How an answer differs from what it should be; empty where it does not."""
    if said.arrays.keys() != expected.keys():
        return f"outputs {', '.join(said.arrays)}"
    for name, array in expected.items():
        found = said.arrays[name]
        if found.shape != array.shape or found.dtype != array.dtype:
            return f"{name} is {found.dtype} {found.shape}"
        if array.dtype.kind in "iub":
            same = np.array_equal(found, array)
        else:
            found, wide = found.astype(np.float64), array.astype(np.float64)
            near = 8 * float(jnp.finfo(array.dtype).eps) ** 0.75
            least = near * float(np.abs(wide).max(initial=0, where=np.isfinite(wide)))
            same = np.allclose(found, wide, rtol=near, atol=least, equal_nan=True)
        if not same:
            return f"{name} has other values"
    return ""


def halved(package: Path, to: Path) -> None:
    """A package with all weights of real numbers halved."""
    shutil.copytree(package, to)
    manifest = json.loads((to / "manifest.json").read_text())
    files = {spec["file"] for spec in manifest["weights"].values()}
    for file in files:
        with safe_open(to / file, "np") as opened:
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}
        for name, array in arrays.items():
            dtype = jnp.dtype(manifest["weights"].get(name, {"dtype": array.dtype})["dtype"])
            if jnp.issubdtype(dtype, jnp.floating):
                arrays[name] = (array.view(dtype) * dtype.type(0.5)).view(array.dtype)
        save_file(arrays, to / file)
        data = (to / file).read_bytes()
        manifest["files"][file] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (to / "manifest.json").write_text(json.dumps(manifest))


def damaged(package: Path, to: Path) -> None:
    """A package with one bit of its weights changed."""
    shutil.copytree(package, to)
    file = max((to / "weights").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


async def load(
    server: Server, folder: Path, made: Path, clients: Load, args: argparse.Namespace
) -> dict[str, Any]:
    """Run the clients, and put versions beside them -> the report."""
    begun = time.monotonic()
    until = begun + args.seconds

    async def publish() -> None:
        for number in (DAMAGED, GOOD):
            await asyncio.sleep(args.seconds / 3)
            (made / str(number)).rename(folder / str(number))

    publishing = asyncio.create_task(publish())
    await asyncio.gather(*(clients.client(i, until) for i in range(args.clients)))
    took = time.monotonic() - begun
    await publishing
    async with Connection(server.port) as connection:
        rows = (await connection.ask(post("/v2/repository/index"))).message
    refused = [row for row in rows if row["version"] == str(DAMAGED)]
    return {
        "clients": args.clients,
        "seconds": round(took, 1),
        **{name: clients.outcomes[name] for name in OUTCOMES},
        "problems": clients.problems[:10],
        "answers a second": round(len(clients.seconds) / took, 1),
        "latency ms": quantiles(clients.seconds),
        "answers by version": dict(sorted(clients.versions.items())),
        "the damaged version": [f"{row['state']}: {row['reason']}" for row in refused],
    }


OUTCOMES = ("sent", "answered", "refused", "wrong", "lost")


def main() -> int:
    """Print the report; 1 where it is bad."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--package", type=Path, required=True, help="a package's folder")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--poll", default="0.5", help="as `maxstack serve` takes it")
    parser.add_argument("--queue", default="250", help="as `maxstack serve` takes it")
    arguments.takes_json(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, made = Path(temporary) / "versions", Path(temporary) / "made"
        shutil.copytree(args.package, folder / str(FIRST))
        made.mkdir()
        damaged(args.package, made / str(DAMAGED))
        halved(args.package, made / str(GOOD))
        samples, expected = prepared(folder / str(FIRST), made / str(GOOD))
        log = Path(temporary) / "log"
        server = Server([folder], log, "--poll", args.poll, "--queue", args.queue)
        clients = Load(server.port, samples, expected)
        try:
            report = asyncio.run(load(server, folder, made, clients, args))
            report["exit code"] = server.end()
        finally:
            with contextlib.suppress(ProcessLookupError):
                server.process.kill()
    for name, value in report.items():
        print(f"{name}: {json.dumps(value)}")
    arguments.write_json(args.json, report)
    swapped = {*clients.versions} == {FIRST, GOOD} and len(report["the damaged version"]) == 1
    return int(not swapped or bool(report["exit code"] or report["wrong"] or report["lost"]))


def prepared(*folders: Path) -> tuple[list[Sample], dict[tuple[int, int], Any]]:
    """Requests of all signatures, and the results by version and place."""
    rng = np.random.default_rng(0)
    first, good = (Package(folder) for folder in folders)
    names = served(first)
    samples = [sample(first, name, rng) for name in names for _ in range(SAMPLES)]
    expected = {
        (number, place): package.signatures[names[place // SAMPLES]](**each.inputs)
        for number, package in ((FIRST, first), (GOOD, good))
        for place, each in enumerate(samples)
    }
    return samples, expected


if __name__ == "__main__":
    sys.exit(main())
