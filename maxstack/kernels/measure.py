"""Deviation of a backend from the reference, and its time on this machine's device. Both are of a
call with its gradients; a deviation is relative to the largest value of its array."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.kernels.backends import Backend
from maxstack.kernels.examples import Example

TOLERANCE = {"bfloat16": 4e-2, "float32": 1e-2}
"""Deviation from the reference that rounding explains, as a share of the largest value: float32
matmuls may run as tf32 or bfloat16 passes."""
LEAST_SECONDS = 0.02
"""A timing repeats a call until it takes this long."""

Call = Callable[..., Any]


def call(
    backend: Backend, blocks: Mapping[str, int] | None, example: Example
) -> tuple[Call, tuple[Any, ...]]:
    """(a compiled function that computes an example's result and gradients, its arguments)."""
    run = functools.partial(backend.run, **({} if blocks is None else {"blocks": blocks}))
    return with_gradients(functools.partial(example.outputs, run), *example.floats), example.floats


def with_gradients(f: Call, *args: Any) -> Call:
    """Compile `f` with the gradients, by all arguments, of the sum of its result with fixed
    weights. The weights are made beforehand, because their cosines took longer than a norm."""
    # Weights that differ, since the gradient of a plain sum hides errors that cancel.
    weights = jax.tree.map(_weights, jax.eval_shape(f, *args))

    def both(weights: Any, *args: Any) -> Any:
        out, pull = jax.vjp(f, *args)
        return out, pull(weights)

    return functools.partial(jax.jit(both).lower(weights, *args).compile(), weights)


def _weights(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape).astype(x.dtype)


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
    # As a share of the largest value: small entries of a product carry the rounding of large ones.
    array, wanted = (np.asarray(x, np.float64) for x in (array, wanted))
    if not np.isfinite(array).all():
        return float("inf")
    return float(np.abs(array - wanted).max() / max(np.abs(wanted).max(), 1e-6))


def seconds(run: Call, args: tuple[Any, ...]) -> float:
    """Seconds a call, after one to warm up."""
    # The first call warms caches and allocators.
    jax.block_until_ready(run(*args))
    return time_call(run, args)[0]


def time_call(run: Call, args: tuple[Any, ...] = ()) -> tuple[float, float]:
    """Seconds, and processor seconds of this process, of a call: means over as many calls as fill
    `LEAST_SECONDS`."""
    times = 1
    while True:
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(times):
            out = run(*args)
        jax.block_until_ready(out)
        if (taken := time.perf_counter() - begin) >= LEAST_SECONDS:
            return taken / times, (time.process_time() - busy) / times
        times *= 4
