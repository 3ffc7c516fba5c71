"""One section of bench_gpu.py in a process of its own, which prints a line of JSON for whatever
happens; a kernel that ends the process costs its own row alone.

A check compares values and gradients of a backend with the reference in float64. A time is the
median of five measurements, each over as many calls as fill 20 ms; on a CPU, which other work
shares, the least.

example: cd scripts; python -m bench.gpu_worker < specification.json    (bench_gpu.py writes it)
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

if __name__ == "__main__":  # before jax is imported, which --help does not need
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()

from maxstack.hardware import devices

devices.environment(None)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bench import gpu_cases  # noqa: E402
from bench.gpu_cases import Call  # noqa: E402

from maxstack.errors import ConfigError  # noqa: E402
from maxstack.kernels import measure, tuning  # noqa: E402

MARK = "@bench "
"""Start of the lines for bench_gpu.py, since libraries print too."""
TOLERANCES = {"bfloat16": (0.01, 0.02), "float32": (0.003, 0.003)}
"""Largest ||x - reference|| / ||reference|| of the result and of gradients: a few times the
rounding error of the dtype; a GPU multiplies float32 as tf32."""
WORST_ROW = 0.1
"""Largest error of a row, relative to its own norm or the mean norm, whichever is larger: a single
wrong row is lost in the norm of all."""
SIDES = {"full": 8192, "quick": 8192, "small": 1024, "tiny": 128}
Figures = dict[str, Any]
Job = tuple[Figures, Callable[[], Figures]]
"""The columns that name a row, and a function that measures the others."""


def tell(**event: Any) -> None:
    """Print an event."""
    print(MARK + json.dumps(event), flush=True)


def main() -> None:
    """Run the jobs of the section that are not done."""
    given, device = json.load(sys.stdin), jax.devices()[0]
    about = {"platform": device.platform, "kind": device.device_kind}
    tell(device=about | {"versions": {name: version(name) for name in ("jax", "jaxlib")}})
    for columns, run in jobs(given["section"], given):
        row = {"section": given["section"], **columns}
        if row in given["done"]:
            continue
        if time.time() > given["end"]:
            tell(row=row, figures={"status": "not reached", "reason": "the time was over"})
            continue
        tell(begin=row)
        figures = attempt(run)
        tell(row=row, figures=figures)
        if figures["status"] == "failed":
            jax.block_until_ready(jnp.ones(8) + 1)  # after an illegal access this ends the process


def attempt(run: Callable[[], Figures]) -> Figures:
    """A job's figures; a kernel that does not compile or run must not hide the others."""
    try:
        return {"status": "ok"} | run()
    except ConfigError as error:
        return unsupported(str(error))
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        return {"status": "failed", "reason": reason}


def unsupported(reason: str | None) -> Figures:
    """The figures of a call that is not tried."""
    return {"status": "unsupported", "reason": reason}


def jobs(section: str, given: Figures) -> Iterator[Job]:
    """The jobs of a section. A speed needs a backend that passed its checks."""
    if section == "ceilings":
        yield from ceilings(SIDES[given["size"]])
    elif section == "check":
        for op in given["ops"]:
            for number, call in enumerate(gpu_cases.checks(op, given["size"])):
                for backend in call.op.backends:
                    elsewhere = jax.default_backend() not in backend.platforms
                    if backend.name != "reference" and not (elsewhere and number):
                        yield of_backend(call, backend.name, check, given)
    else:
        for call in gpu_cases.speeds(section, given["size"]):
            name, peer = call.peer
            for backend, run in ((name, peer), ("reference", call.op["reference"].run)):
                dense = functools.partial(unsupported, call.dense)
                work = dense if call.dense else functools.partial(speed, call, run)
                yield call.row | {"backend": backend}, work
            for backend in call.op.names:
                verdict = given["verdicts"].get(f"{call.op.name} {backend}", "unchecked")
                if backend != "reference" and verdict != "absent":
                    job = of_backend(call, backend, speed, given)
                    refused = {"status": verdict, "reason": f"its checks here are {verdict}"}
                    yield job if verdict == "ok" else (job[0], functools.partial(dict, refused))


def of_backend(call: Call, name: str, measured: Callable[..., Figures], given: Figures) -> Job:
    """A job that checks or times a backend with the block sizes of the table."""

    def work() -> Figures:
        backend, case = call.op[name], call.case
        if reason := backend.supports(case):
            return unsupported(reason)
        with tuning.use(given["tuned"]):
            blocks = tuning.blocks(call.op.name, name, case.device.kind, case.shape_class)
        options = {"blocks": blocks} if blocks else {}
        return measured(call, functools.partial(backend.run, **options))

    return call.row | {"backend": name}, work


def check(call: Call, run: Callable[..., Any]) -> Figures:
    """Errors of the result and of each gradient against float64; wrong where one is too large."""
    floats = call.example.floats
    shape = jax.eval_shape(functools.partial(call.example.outputs, run), *floats)
    weight = jnp.cos(jnp.arange(shape.size, dtype=jnp.float32)).reshape(shape.shape)

    def both(run: Callable[..., Any], weight: Any, *floats: Any) -> list[Any]:
        out, pull = jax.vjp(functools.partial(call.example.outputs, run), *floats)
        return [out, *pull(weight.astype(out.dtype))]

    weight = weight.astype(shape.dtype)
    found = jax.jit(functools.partial(both, run))(weight, *floats)
    with jax.enable_x64(True):
        wide = [np.asarray(x).astype(np.float64) for x in (weight, *floats)]
        expected = jax.jit(functools.partial(both, call.op["reference"].run))(*wide)
    errors, wrong = {}, []
    for i, (array, reference) in enumerate(zip(found, expected, strict=True)):
        name = f"gradient {i}" if i else "result"
        errors[name], worst = compare(np.asarray(array, np.float64), np.asarray(reference))
        most = TOLERANCES[call.case.dtype][min(i, 1)]
        if not (errors[name] <= most and worst <= WORST_ROW):  # also true of NaN
            wrong.append(f"{name} is off by {errors[name]:.2g}, its worst row by {worst:.2g}")
    found_wrong = {"status": "wrong", "reason": "; ".join(wrong)}
    return {"errors": errors} | (found_wrong if wrong else {})


def compare(array: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """(error of all numbers, error of the worst row), as shares of norms."""
    width = reference.shape[-1] if reference.ndim > 1 else reference.size
    difference = (array - reference).reshape(-1, width)
    norms = np.linalg.norm(reference.reshape(-1, width), axis=-1)
    scale = np.maximum(norms, np.sqrt(np.mean(norms**2)) or 1.0)
    worst = np.max(np.linalg.norm(difference, axis=-1) / scale)
    return float(np.linalg.norm(difference) / (np.linalg.norm(reference) or 1.0)), float(worst)


def speed(call: Call, run: Callable[..., Any]) -> Figures:
    """Time, speed and memory of the forward pass alone and of both passes. The backward pass is
    both less the forward pass; None where noise hides it."""
    floats = call.example.floats
    compute = functools.partial(call.example.outputs, run)
    together = measure.with_gradients(compute, *floats)
    forward, both = typical(jax.jit(compute), floats), typical(together, floats)
    back = both - forward if both > 1.02 * forward else None
    memory = together.func.memory_analysis()  # type: ignore[attr-defined]
    return {
        "forward_ms": 1e3 * forward,
        "both_ms": 1e3 * both,
        "backward_ms": back and 1e3 * back,
        "forward_tflops": call.flops[0] / forward / 1e12,
        "backward_tflops": back and call.flops[1] / back / 1e12,
        "both_tflops": sum(call.flops) / both / 1e12,
        "temporary_bytes": memory.temp_size_in_bytes,
        "memory_bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes,
    }


def typical(run: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Seconds of a call, after one that does not count."""
    jax.block_until_ready(run(*arguments))
    seconds = [measure.time_call(run, arguments)[0] for _ in range(5)]
    return min(seconds) if jax.default_backend() == "cpu" else statistics.median(seconds)


def ceilings(side: int) -> Iterator[Job]:
    """A large matmul and a copy."""
    square = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    long = jnp.ones((32 * side, side), jnp.bfloat16)
    matmul, copy = jax.jit(lambda x: x @ x), jax.jit(lambda x: x + 1)
    yield (
        {"what": f"matmul {side} x {side} x {side}, bfloat16"},
        lambda: {"tflops": 2.0 * side**3 / typical(matmul, (square,)) / 1e12},
    )
    yield (
        {"what": f"{long.nbytes / 2**20:,.3g} MiB read and as many written"},
        lambda: {"gigabytes_per_second": 2 * long.nbytes / typical(copy, (long,)) / 1e9},
    )


if __name__ == "__main__":
    main()
