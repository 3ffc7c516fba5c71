"""One kernel of bench_gpu.py in a process of its own, which reads ARGS as JSON: its checks, then
its times, an event for each row.

A check compares values and gradients with the reference in float64. A time is the median of five
measurements, each over as many calls as fill 20 ms; on a CPU, which other work shares, the least.
"""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench import gpu_cases
from bench.gpu_cases import Call
from bench.workers import tell

from maxstack.errors import ConfigError
from maxstack.kernels import measure, tuning

TOLERANCES = {"bfloat16": (0.01, 0.02), "float32": (0.003, 0.003)}
"""Largest ||x - reference|| / ||reference|| of the result and of gradients: a few times the
rounding error of the dtype; a GPU multiplies float32 as tf32."""
WORST_ROW = 0.1
"""Largest error of a row, relative to its own norm or the mean norm, whichever is larger: a single
wrong row is lost in the norm of all."""
Figures = dict[str, Any]
Run = Callable[..., Any]
ARGS = SimpleNamespace(tuned=None, checks=False, end=float("inf"))
"""`section`, `size`, `backend` (a backend, `reference`, or `peer`, which is plain JAX), `tuned` (a
file of block sizes), `checks` (True for no times), `end` (the time at which to stop)."""


def main() -> None:
    """Check the kernel, then time it if no check failed."""
    device = jax.devices()[0]
    about = {"platform": device.platform, "kind": device.device_kind}
    tell(device=about | {"versions": {name: version(name) for name in ("jax", "jaxlib")}})
    if ARGS.section == "ceilings":
        return ceilings(gpu_cases.TABLE["sizes"][ARGS.size]["ceilings"])
    statuses = {"ok"}
    if ARGS.backend not in ("peer", "reference"):
        statuses = {
            work("check", call, check) for call in gpu_cases.checks(ARGS.section, ARGS.size)
        }
    if "ok" in statuses and statuses <= {"ok", "unsupported"} and not ARGS.checks:
        plain = ARGS.backend in ("peer", "reference", "blockwise") and device.platform == "gpu"
        for call in gpu_cases.speeds(ARGS.section, ARGS.size):
            if not plain or call.row.get("length", 4096) == 4096:  # one is enough on a GPU
                work(ARGS.section, call, speed)


def work(section: str, call: Call, measured: Callable[[Call, Run], Figures]) -> str:
    """Print a row -> its status; a call that does not compile or run must not hide the others."""
    name = call.peer[0] if ARGS.backend == "peer" else ARGS.backend
    row = {"section": section, "op": call.op.name, **call.row, "backend": name}
    figures: Figures = {"status": "not reached", "reason": "the time was over"}
    if time.time() < ARGS.end:
        try:
            figures = {"status": "ok"} | measured(call, backend_of(call))
        except ConfigError as error:
            figures = {"status": "unsupported", "reason": str(error)}
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            figures = {"status": "failed", "reason": reason}
    tell(row=row | figures)
    return figures["status"]


def backend_of(call: Call) -> Run:
    """The function to measure, with the block sizes of the table. ConfigError if it cannot serve
    the call."""
    if ARGS.backend in ("peer", "reference"):
        if call.dense:
            raise ConfigError(call.dense)
        return call.peer[1] if ARGS.backend == "peer" else call.op["reference"].run
    backend, case = call.op[ARGS.backend], call.case
    if reason := backend.supports(case):
        raise ConfigError(reason)
    with tuning.use(ARGS.tuned):
        blocks = tuning.blocks(call.op.name, ARGS.backend, case.device.kind, case.shape_class)
    return functools.partial(backend.run, blocks=blocks) if blocks else backend.run


def check(call: Call, run: Run) -> Figures:
    """Errors of the result and of each gradient against float64; wrong where one is too large."""
    found = with_gradients(call, run, call.example.floats)
    with jax.enable_x64(True):
        wide = [np.asarray(x).astype(np.float64) for x in call.example.floats]
        expected = with_gradients(call, call.op["reference"].run, wide)
    errors, wrong = {}, []
    for i, (array, reference) in enumerate(zip(found, expected, strict=True)):
        name = f"gradient {i}" if i else "result"
        errors[name], worst = compare(np.asarray(array, np.float64), np.asarray(reference))
        most = TOLERANCES[call.case.dtype][min(i, 1)]
        if not (errors[name] <= most and worst <= WORST_ROW):  # also true of NaN
            wrong.append(f"{name} is off by {errors[name]:.2g}, its worst row by {worst:.2g}")
    found_wrong = {"status": "wrong", "reason": "; ".join(wrong)}
    return {"errors": errors} | (found_wrong if wrong else {})


def with_gradients(call: Call, run: Run, floats: Sequence[Any]) -> list[Any]:
    """The result and its gradients."""
    both = measure.with_gradients(functools.partial(call.example.outputs, run), *floats)
    return jax.tree.leaves(both(*floats))


def compare(array: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """(error of all numbers, error of the worst row), as shares of norms."""
    width = reference.shape[-1] if reference.ndim > 1 else reference.size
    difference = (array - reference).reshape(-1, width)
    norms = np.linalg.norm(reference.reshape(-1, width), axis=-1)
    scale = np.maximum(norms, np.sqrt(np.mean(norms**2)) or 1.0)
    worst = np.max(np.linalg.norm(difference, axis=-1) / scale)
    return float(np.linalg.norm(difference) / (np.linalg.norm(reference) or 1.0)), float(worst)


def speed(call: Call, run: Run) -> Figures:
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


def typical(run: Run, arguments: tuple[Any, ...]) -> float:
    """Seconds of a call, after one that does not count."""
    jax.block_until_ready(run(*arguments))
    seconds = [measure.time_call(run, arguments)[0] for _ in range(5)]
    return min(seconds) if jax.default_backend() == "cpu" else statistics.median(seconds)


def ceilings(side: int) -> None:
    """Print the speed of a large matmul and of a copy."""
    square = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    long = jnp.ones((32 * side, side), jnp.bfloat16)
    matmul, copy = jax.jit(lambda x: x @ x), jax.jit(lambda x: x + 1)
    row = {"section": "ceilings", "status": "ok"}
    speed = 2.0 * side**3 / typical(matmul, (square,)) / 1e12
    tell(row=row | {"what": f"matmul {side} x {side} x {side}, bfloat16", "tflops": speed})
    size, rate = long.nbytes / 2**20, 2 * long.nbytes / typical(copy, (long,)) / 1e9
    what = f"{size:,.3g} MiB read and as many written"
    tell(row=row | {"what": what, "gigabytes_per_second": rate})


if __name__ == "__main__":
    vars(ARGS).update(json.load(sys.stdin))
    main()
