"""Deviation of a backend from the reference, and its time on this machine's device."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.kernels.backends import Backend
from maxstack.kernels.examples import Example

TOLERANCE = {"bfloat16": 4e-2, "float32": 1e-2}
"""Deviation from the reference that rounding can explain, as a share of the largest value: float32
matmuls may run as tf32 or bfloat16 passes."""
LEAST_SECONDS = 0.02
"""A timing repeats a call until it takes this long."""

Call = Callable[..., Any]


def call(
    backend: Backend, blocks: Mapping[str, int] | None, example: Example
) -> tuple[Call, tuple[Any, ...]]:
    """A compiled function and its arguments; it computes the result and the gradients of the
    result's sum with fixed weights."""
    floats = tuple(example.args[i] for i in example.floats)

    def outputs(*floats: jax.Array) -> Any:
        args = list(example.args)
        for i, value in zip(example.floats, floats, strict=True):
            args[i] = value
        options = {} if blocks is None else {"blocks": blocks}
        return example.result(backend.run(*args, **options))

    def both(*floats: jax.Array) -> Any:
        out, pull = jax.vjp(outputs, *floats)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32))
        return out, pull(weights.reshape(out.shape).astype(out.dtype))

    return jax.jit(both).lower(*floats).compile(), floats


def deviation(
    reference: Backend, backend: Backend, blocks: Mapping[str, int] | None, example: Example
) -> float:
    """The largest difference from the reference of the result and of each gradient, as a share of
    that array's largest value; infinite where one is not finite."""
    calls = call(backend, blocks, example), call(reference, None, example)
    return max(map(difference, *(jax.tree.leaves(run(*args)) for run, args in calls)))


def difference(array: Any, wanted: Any) -> float:
    """The largest difference as a share of the largest wanted value; infinite where one is not
    finite."""
    array, wanted = (np.asarray(x, np.float64) for x in (array, wanted))
    if not np.isfinite(array).all():
        return float("inf")
    return float(np.abs(array - wanted).max() / max(np.abs(wanted).max(), 1e-6))


def seconds(run: Call, args: tuple[Any, ...]) -> float:
    """Seconds a call, over as many calls as fill `LEAST_SECONDS`."""
    jax.block_until_ready(run(*args))
    times = 1
    while True:
        begin = time.perf_counter()
        for _ in range(times):
            out = run(*args)
        jax.block_until_ready(out)
        if (taken := time.perf_counter() - begin) >= LEAST_SECONDS:
            return taken / times
        times *= 4
