"""A backend's values against the reference, and its time on the device at hand."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.kernels.backends import Backend
from maxstack.kernels.examples import Example

TOLERANCE = {"bfloat16": 4e-2, "float32": 1e-2}
"""Deviation from the reference that is left to rounding, as a share of the largest value: float32
matmuls may run as tf32 or bfloat16 passes."""
LEAST_SECONDS = 0.02
"""A timing repeats a call until it takes this long."""

Call = Callable[..., Any]


def call(
    backend: Backend, blocks: Mapping[str, int] | None, example: Example
) -> tuple[Call, tuple[Any, ...]]:
    """A compiled function and its arguments: the result, and the gradients of its sum with fixed
    weights."""
    floats = tuple(example.args[i] for i in example.floats)

    def outputs(*floats: jax.Array) -> Any:
        args = list(example.args)
        for place, value in zip(example.floats, floats, strict=True):
            args[place] = value
        return example.result(backend.run(*args, **({} if blocks is None else {"blocks": blocks})))

    def both(*floats: jax.Array) -> Any:
        out, pull = jax.vjp(outputs, *floats)
        return out, pull(
            jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype)
        )

    return jax.jit(both).lower(*floats).compile(), floats


def deviation(
    reference: Backend, backend: Backend, blocks: Mapping[str, int] | None, example: Example
) -> float:
    """The largest difference from the reference of the result and of each gradient, as a share of
    that array's largest value; infinite where one is not finite."""
    ours, theirs = (
        jax.tree.leaves(run(*given))
        for run, given in (call(backend, blocks, example), call(reference, None, example))
    )
    return max(map(_apart, ours, theirs))


def _apart(ours: jax.Array, theirs: jax.Array) -> float:
    got, wanted = (np.asarray(x, np.float64) for x in (ours, theirs))
    return (
        float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-6))
        if np.isfinite(got).all()
        else float("inf")
    )


def seconds(run: Call, given: tuple[Any, ...]) -> float:
    """Of one call, over as many as fill `LEAST_SECONDS`."""
    jax.block_until_ready(run(*given))
    times = 1
    while True:
        begin = time.perf_counter()
        for _ in range(times):
            out = run(*given)
        jax.block_until_ready(out)
        if (taken := time.perf_counter() - begin) >= LEAST_SECONDS:
            return taken / times
        times *= 4
