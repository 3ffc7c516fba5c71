"""Packages by hand for tests of their server, and a process that serves them, with clients."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import processes
from jax import export
from safetensors.numpy import save_file

KERNEL = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
TYPES = ("bool", "uint8", "int8", "uint16", "int16", "int32", "uint32", "float16", "bfloat16")


def classify(weights, state, inputs):
    """Any number of rows."""
    return {"logits": inputs["x"] @ weights["kernel"]}, {}


def mean(weights, state, inputs):
    """Four rows, of 8 or of 32 tokens."""
    tokens, lengths = inputs["tokens"], inputs["lengths"]
    used = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
    sums = used.sum(1).astype(jnp.float32)
    return {"used": used, "mean": sums / jnp.maximum(lengths, 1)}, {}


def same(weights, state, inputs):
    """A tensor of each type."""
    return inputs, {}


def count(weights, state, inputs):
    """How often it was called."""
    return {"count": state["count"]}, {"count": state["count"] + 1}


def root(weights, state, inputs):
    """The root of each number; NaN for those below 0."""
    return {"root": jnp.sqrt(inputs["x"])}, {}


def make(folder: Path, scale: float = 1.0, name: str = "toy") -> Path:
    """A package whose `classify` multiplies by `scale` times KERNEL."""
    scaled, f32, i32 = {"kernel": KERNEL * scale}, jnp.float32, jnp.int32
    weights = {"kernel": ((16, 4), f32)}
    (batch,) = export.symbolic_shape("b")
    programs = {
        "classify": _program(classify, weights, {}, {"x": ((batch, 16), f32)}),
        "mean-8": _program(mean, weights, {}, {"tokens": ((4, 8), i32), "lengths": ((4,), i32)}),
        "mean-32": _program(mean, weights, {}, {"tokens": ((4, 32), i32), "lengths": ((4,), i32)}),
        "same": _program(same, weights, {}, {each: ((2, 3), each) for each in TYPES}),
        "count": _program(count, weights, {"count": ((), i32)}, {"x": ((1,), f32)}),
        "root": _program(root, weights, {}, {"x": ((batch,), f32)}),
    }
    same_spec = {each: _spec(each, 2, 3) for each in TYPES}
    lengths = [{"file": f"programs/mean-{n}", "sizes": {"batch": 4, "length": n}} for n in (8, 32)]
    free = {"batch": None}
    signatures = {
        "classify": _signature(
            {"x": _spec("float32", "batch", 16)},
            {"logits": _spec("float32", "batch", 4)},
            [{"file": "programs/classify", "sizes": free}],
        ),
        "mean": _signature(
            {
                "tokens": _spec("int32", "batch", "length") | {"range": [0, 99]},
                "lengths": _spec("int32", "batch") | {"range": [1, "length"]},
            },
            {"used": _spec("int32", "batch", "length"), "mean": _spec("float32", "batch")},
            lengths,
        ),
        "same": _signature(same_spec, same_spec, [{"file": "programs/same", "sizes": {}}]),
        "count": _signature(
            {"x": _spec("float32", 1)},
            {"count": _spec("int32")},
            [{"file": "programs/count", "sizes": {}}],
            "count",
        ),
        "root": _signature(
            {"x": _spec("float32", "batch")},
            {"root": _spec("float32", "batch")},
            [{"file": "programs/root", "sizes": free}],
        ),
    }
    (folder / "programs").mkdir(parents=True)
    (folder / "weights").mkdir()
    for program, data in programs.items():
        (folder / "programs" / program).write_bytes(data)
    save_file(scaled, folder / "weights" / "1.safetensors")
    file = {"file": "weights/1.safetensors", "shape": [16, 4], "dtype": "float32"}
    manifest = {
        "format": "maxstack.package/1",
        "name": name,
        "made": "2026-11-25T00:00:00Z",
        "good_until": "2999-01-01",
        "versions": {"jax": jax.__version__},
        "platforms": ["cpu"],
        "devices": 1,
        "weights": {"kernel": file},
        "states": {"count": {"count": _spec("int32")}},
        "signatures": signatures,
        "files": {
            path.relative_to(folder).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def _program(function: Any, *arguments: dict[str, Any]) -> bytes:
    shapes = [
        {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in each.items()}
        for each in arguments
    ]
    return export.export(jax.jit(function), platforms=("cpu",))(*shapes).serialize()


def _spec(dtype: str, *shape: int | str) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype}


def _signature(inputs: Any, outputs: Any, programs: Any, state: str | None = None) -> Any:
    return {"inputs": inputs, "outputs": outputs, "state": state, "programs": programs}


class Packages:
    """A server's process, its address and a client."""

    def __init__(self, log: Path, *words: str | Path, key: str = "none"):
        self.output = log
        self.process, address = processes.serve(
            ["serve", "--port", "0", *map(str, words)],
            processes.environment() | {"JAX_COMPILATION_CACHE_DIR": processes.COMPILED},
            log,
        )
        self.address = address.removeprefix("http://")
        self.http = httpx.Client(
            base_url=address,
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        )

    def infer(self, model: str, version: str = "", **inputs: np.ndarray) -> httpx.Response:
        """The answer to tensors as JSON."""
        datatypes = {"float32": "FP32", "int32": "INT32"}
        body = {
            "inputs": [
                {
                    "name": name,
                    "datatype": datatypes[array.dtype.name],
                    "shape": array.shape,
                    "data": array.tolist(),
                }
                for name, array in inputs.items()
            ]
        }
        path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "")
        return self.http.post(f"{path}/infer", json=body)

    def figure(self, name: str, model: str, version: int = 1) -> float:
        """A figure of /metrics."""
        labels = re.escape(f'{{model="{model}",version="{version}"}}')
        found = re.search(
            rf"^maxstack_package_{name}{labels} (\S+)$", self.http.get("/metrics").text, re.M
        )
        assert found, name
        return float(found[1])

    def index(self) -> dict[tuple[str, str], tuple[str, str]]:
        """State and reason by name and version."""
        rows = self.http.post("/v2/repository/index", json={}).json()
        return {(row["name"], row["version"]): (row["state"], row["reason"]) for row in rows}


@contextlib.contextmanager
def serving(log: Path, *words: str | Path, **more: str) -> Iterator[Packages]:
    """A server that is killed at the end."""
    server = Packages(log, *words, **more)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def values(answer: httpx.Response, name: str) -> np.ndarray:
    """A tensor of an answer in JSON."""
    assert answer.status_code == 200, answer.text
    (found,) = [each for each in answer.json()["outputs"] if each["name"] == name]
    return np.array(found["data"]).reshape(found["shape"])
