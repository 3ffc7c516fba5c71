"""A server of packages as a process, and clients that ask it by binary tensors over connections
that stay open: one thread, which reads no more than is compared, so that the server is measured."""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench.connection import Opened

from maxstack.inference.packages.tensors import DATATYPES, NAMES
from maxstack.package.loader import Package, Signature

SECONDS = 300
"""Longest start of a server, and wait for an answer."""
FREE = 16
"""Size of a dimension that may have any."""
ROWS = 4
"""Rows of a request at most, where they are drawn."""


class Sample(NamedTuple):
    """A request that is ready to be sent, and what it was made of."""

    model: str
    inputs: dict[str, np.ndarray]
    rows: int
    data: bytes


class Said(NamedTuple):
    """An answer."""

    status: int
    message: Any
    """Its JSON."""
    arrays: dict[str, np.ndarray]


class Server:
    """The process of `maxstack serve`, once it listens. SystemExit where it does not start."""

    def __init__(self, folders: list[Path], log: Path, *flags: str):
        words = [sys.executable, "-m", "maxstack.cli", "serve", *map(str, folders), "--port", "0"]
        self.process = subprocess.Popen(
            [*words, *flags], stdout=log.open("w"), stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(r"http://\S+:(\d+)/v2", log.read_text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                sys.exit(f"the server did not start: {log.read_text()}")
            time.sleep(0.05)
        self.port = int(found[1])

    def end(self) -> int:
        """Ask it to end -> its exit code."""
        self.process.terminate()
        return self.process.wait(SECONDS)


class Connection(Opened):
    """A connection that stays open; any error of it is an OSError, EOFError or ValueError."""

    async def ask(self, data: bytes) -> Said:
        """Send a request's bytes -> the answer."""
        self._writer.write(data)
        await self._writer.drain()
        return await asyncio.wait_for(self._said(), SECONDS)

    async def _said(self) -> Said:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(head.split(None, 2)[1])
        fields = dict(re.findall(r"^([\w-]+): (.*?)\r?$", head, re.M))
        body = await self._reader.readexactly(int(fields["content-length"]))
        length = int(fields.get("inference-header-content-length", len(body)))
        message, place, arrays = json.loads(body[:length]), length, {}
        for output in message["outputs"] if length < len(body) else ():
            size = output["parameters"]["binary_data_size"]
            array = np.frombuffer(body[place : place + size], _dtype(output["datatype"]))
            arrays[output["name"]] = array.reshape(output["shape"])
            place += size
        return Said(status, message, arrays)


def post(path: str, body: bytes = b"", **headers: str) -> bytes:
    """The bytes of a request."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def sample(
    package: Package, name: str, rng: np.random.Generator, sizes: Mapping[str, int] | None = None
) -> Sample:
    """A request of random numbers for a signature, of `sizes` or of some that a program takes."""
    signature = package.signatures[name]
    sizes = drawn(signature, rng) if sizes is None else sizes
    inputs = {
        key: _array(rng, [sizes.get(dim, dim) for dim in spec["shape"]], spec["dtype"])
        for key, spec in signature.spec["inputs"].items()
    }
    model = f"{package.manifest['name']}.{name}"
    blobs = [array.tobytes() for array in inputs.values()]
    tensors = [
        {
            "name": key,
            "datatype": NAMES[array.dtype.name],
            "shape": array.shape,
            "parameters": {"binary_data_size": len(blob)},
        }
        for (key, array), blob in zip(inputs.items(), blobs, strict=True)
    ]
    text = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    data = post(
        f"/v2/models/{model}/infer",
        b"".join([text, *blobs]),
        Inference_Header_Content_Length=str(len(text)),
    )
    return Sample(model, inputs, sizes.get("batch", 1), data)


def drawn(signature: Signature, rng: np.random.Generator) -> dict[str, int]:
    """Sizes at random up to those of one of the programs."""
    programs = signature.spec["programs"]
    most = programs[rng.integers(len(programs))]["sizes"]
    return {
        dim: int(rng.integers(1, min(size or FREE, ROWS if dim == "batch" else FREE) + 1))
        for dim, size in most.items()
    }


def largest(signature: Signature, rows: int) -> dict[str, int]:
    """Sizes of a request of so many rows for the largest program."""
    sizes = max(
        (program["sizes"] for program in signature.spec["programs"]),
        key=lambda sizes: [size or 0 for size in sizes.values()],
    )
    return {dim: rows if dim == "batch" else size or FREE for dim, size in sizes.items()}


def served(package: Package) -> list[str]:
    """The signatures that a server answers."""
    return [
        name
        for name, signature in package.signatures.items()
        if not signature.spec["state"]
        and all(
            spec["dtype"] in NAMES
            for kind in ("inputs", "outputs")
            for spec in signature.spec[kind].values()
        )
    ]


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and the largest, in milliseconds."""
    ordered = sorted(seconds) or [float("nan")]
    last = len(ordered) - 1
    places = {"p50": last // 2, "p99": last * 99 // 100, "largest": last}
    return {name: round(1000 * ordered[place], 2) for name, place in places.items()}


def _array(rng: np.random.Generator, shape: list[int], dtype: str) -> np.ndarray:
    """Normal numbers, or small integers."""
    wanted = _dtype(NAMES[dtype])
    if wanted.kind in "iub":
        return rng.integers(0, 2, shape).astype(wanted)
    return rng.standard_normal(shape).astype(wanted)


def _dtype(datatype: str) -> np.dtype:
    import jax.numpy as jnp

    return jnp.dtype(DATATYPES[datatype.upper()])
