"""Programs that are compiled side by side and timed one after the other, for bench_gpu.py."""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.errors import ConfigError

LONG_ENOUGH = {"gpu": 0.03, "cpu": 0.0}
"""Seconds of work in one dispatch, by platform, that hide the dispatch."""


MANY, POOL = 2**22, 1_048_573
"""Largest array that the device does not draw, and the size of the pool for those: a prime, so that
rows of a matrix differ."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, and a function that makes its arguments on the device."""

    function: Callable[..., Any]
    make: Callable[[], tuple[jax.Array, ...]]
    times: int = 1
    """Calls of the function in one dispatch, each of which waits for the one before."""
    runs: bool = True
    """False: compiled only for the compiler's figures of its memory."""

    def lower(self) -> Any:
        """Traced, for jax's own device."""
        function = self.function
        if self.times > 1:
            function = functools.partial(repeated, function, self.times)
        return jax.jit(function).lower(*jax.eval_shape(self.make))


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One row of the results, its programs, and a function from their runs to its figures."""

    section: str
    row: dict[str, Any]
    programs: Callable[[], dict[str, Program]]
    finish: Callable[[dict[str, "Ran"]], dict[str, Any]]
    """Figures of the row; a `status` among them replaces ok."""
    refused: str | None = None
    """Reason not to run; can begin with a status and a colon."""
    late: bool = False
    """Runs after the other jobs of its section."""

    @property
    def key(self) -> str:
        """Unique name."""
        return " ".join([self.section, *(f"{name}={value}" for name, value in self.row.items())])


@dataclasses.dataclass(frozen=True)
class Ran:
    """Result of a program."""

    outputs: Any
    seconds: tuple[float, ...]
    """Seconds a call of the function, by dispatch; empty if it did not run."""
    temporaries: int
    """Bytes that the compiled program takes besides arguments and results."""
    results: int
    """Bytes of its results."""

    @property
    def typical(self) -> float:
        """The median of `seconds`; on a CPU, which other work shares, the least."""
        return (min if jax.default_backend() == "cpu" else statistics.median)(self.seconds)


def drawn(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers. Small arrays are cut from numbers that numpy drew once, which saves a
    compilation for every shape."""
    if math.prod(shape) > MANY:
        return jax.random.normal(jax.random.key(seed), shape, dtype)
    return jnp.asarray(np.resize(np.roll(_pool(), 7919 * seed), shape), dtype)


@functools.cache
def _pool() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(POOL).astype(np.float32)


def repeated(function: Callable[..., Any], times: int, first: jax.Array, *others: jax.Array) -> Any:
    """`times` calls in a loop on the device. Each call rewrites an element of `first` depending on
    every result of the last call, always with the same value, which no compiler can know: so none
    is left out, moved out of the loop or begun early."""
    start = (0,) * first.ndim

    def call(_: jax.Array, state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        first, outputs = state
        seen = sum(
            jax.lax.dynamic_slice(x, (0,) * x.ndim, (1,) * x.ndim).astype(jnp.float32).reshape(())
            for x in jax.tree.leaves(outputs)
        )
        element = jax.lax.dynamic_slice(first, start, (1,) * first.ndim)
        first = jax.lax.dynamic_update_slice(
            first, jnp.where(jnp.isnan(seen), jnp.zeros_like(element), element), start
        )
        return first, function(first, *others)

    nothing = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, first, *others)
    )
    return jax.lax.fori_loop(0, times, call, (first, nothing))[1]


def calls(flops: float, peak: float | None) -> int:
    """Calls of so much work in a dispatch, at half of the device's peak FLOP/s; one if that is
    unknown."""
    return max(1, min(200, round(LONG_ENOUGH["gpu"] * peak / 2 / flops))) if peak else 1


def run(
    jobs: Iterator[Job], threads: int, repeats: int, begin: Callable[[Job, str], None]
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """(job, its figures). Programs of `threads` jobs are compiled at once, then each runs alone. A
    failure becomes figures.

    `begin` gets (job, "compile") and (job, "run") before each of the two.
    """
    while batch := [*itertools.islice(jobs, threads)]:
        lowered: dict[Job, Any] = {}
        for job in batch:
            begin(job, "compile")
            lowered[job] = _attempt(functools.partial(_lower, job))
        with ThreadPoolExecutor(threads) as pool:
            built = {
                job: pool.submit(_attempt, functools.partial(_compile, programs))
                for job, programs in lowered.items()
            }
        for job in batch:
            begin(job, "run")
            yield job, _attempt(functools.partial(_finish, job, built[job].result(), repeats))


def passes(ran: dict[str, Ran], forward_flops: float, backward_flops: float) -> dict[str, Any]:
    """Time and speed of the forward pass, which ran alone, and of the backward pass: both less the
    forward pass, None where noise hides it."""
    names = "forward", "both"
    forward, both = (ran[name].typical for name in names)
    back = both - forward if both > 1.02 * forward else None
    return {
        "forward_ms": 1e3 * forward,
        "both_ms": 1e3 * both,
        "backward_ms": back and 1e3 * back,
        "forward_tflops": forward_flops / forward / 1e12,
        "backward_tflops": back and backward_flops / back / 1e12,
        "spread": max(max(ran[name].seconds) / min(ran[name].seconds) for name in names),
    }


class Failed(dict[str, Any]):
    """Figures of a job that ended in an exception."""


def _attempt(function: Callable[[], Any]) -> Any:
    """The function's result, or a `Failed`: a kernel that does not compile or run must not hide
    the others."""
    try:
        return function()
    except ConfigError as error:
        return Failed(status="unsupported", reason=str(error))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Failed(status="failed", reason=f"{type(error).__name__}: {' '.join(lines)[:400]}")


def _lower(job: Job) -> Any:
    return {name: (program, program.lower()) for name, program in job.programs().items()}


def _compile(programs: Any) -> Any:
    if isinstance(programs, Failed):
        return programs
    begin = time.perf_counter()
    compiled = {name: (program, lowered.compile()) for name, (program, lowered) in programs.items()}
    return compiled, time.perf_counter() - begin


def _finish(job: Job, built: Any, repeats: int) -> dict[str, Any]:
    if isinstance(built, Failed):
        return built
    compiled, seconds = built
    ran = {
        name: _ran(program, executable, repeats) for name, (program, executable) in compiled.items()
    }
    return {"status": "ok", "compile_seconds": round(seconds, 2)} | job.finish(ran)


def _ran(program: Program, executable: Any, repeats: int) -> Ran:
    memory = executable.memory_analysis()
    temporaries = memory.temp_size_in_bytes if memory else 0
    results = memory.output_size_in_bytes if memory else 0
    if not program.runs:
        return Ran(None, (), temporaries, results)
    arguments = program.make()
    outputs, seconds = jax.block_until_ready(executable(*arguments)), []
    for _ in range(repeats):
        del outputs
        begin = time.perf_counter()
        outputs = jax.block_until_ready(executable(*arguments))
        seconds.append((time.perf_counter() - begin) / program.times)
    return Ran(outputs, tuple(seconds), temporaries, results)
