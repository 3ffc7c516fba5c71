"""The grouped matmul of a mixture of experts for bench_gpu.py: every backend against float64 on the
device, then its speed.

Shapes: M rows  E groups  K contracted  N columns.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench.gpu_blocks import Differs, Sizes
from bench.gpu_errors import compare, float64
from bench.gpu_programs import Job, Program, Ran, calls, drawn, elsewhere, passes

from maxstack.kernels.backends import Device
from maxstack.kernels.grouped_matmul import OP, reference
from maxstack.kernels.grouped_matmul.case import Case

Shape = tuple[int, int, int, int]
CHECKS: dict[str, tuple[Shape, str, list[int] | None]] = {
    "even": ((1024, 8, 256, 384), "bfloat16", [128] * 8),
    "uneven": ((1000, 8, 256, 384), "bfloat16", None),
    "empty groups, spare rows": ((777, 6, 192, 320), "bfloat16", [0, 300, 0, 1, 200, 0]),
    "float32": ((500, 4, 128, 192), "float32", None),
}
SHAPES: dict[str, dict[str, Shape]] = {
    "full": {
        "Mixtral 8x7B up, 16,384 rows": (16384, 8, 4096, 14336),
        "Qwen3 30B-A3B up, 65,536 rows": (65536, 128, 2048, 768),
        "Qwen3 30B-A3B down, 65,536 rows": (65536, 128, 768, 2048),
        "DeepSeek-V3 up, 64 of 256 experts, 32,768 rows": (32768, 64, 7168, 2048),
    },
    "quick": {"Qwen3 30B-A3B up, 65,536 rows": (65536, 128, 2048, 768)},
    "small": {"64 experts, 4,096 rows": (4096, 64, 256, 128)},
    "tiny": {"4 experts, 64 rows": (64, 4, 32, 48)},
}
DENSE = "one dense matmul"
"""Of as many rows with one matrix: what a grouped one could reach."""
GREATEST = 2**32
"""Bytes of the reference's [M, E, N] beyond which it is not tried."""


def checks(size: str, device: Device) -> Iterator[Job]:
    """One job for each backend and case."""
    yield from elsewhere(OP, device)
    for name, ((m, e, k, n), dtype, sizes) in CHECKS.items():
        if size == "tiny" and name in ("even", "float32"):
            continue
        given = np.asarray(_uneven(m, e) if sizes is None else sizes, np.int32)
        make = functools.partial(_make, (m, e, k, n), dtype, given)
        expected = functools.cache(functools.partial(_expected, make))
        for backend in OP.backends:
            if backend.name != "reference" and device.platform in backend.platforms:
                yield _check(
                    name,
                    backend.name,
                    make,
                    expected,
                    dtype,
                    _refusal(backend.name, Case(m, e, k, n, dtype, device)),
                )


def _check(
    name: str,
    backend: str,
    make: Callable[[], Any],
    expected: Callable[[], Any],
    dtype: str,
    refused: str | None,
) -> Job:
    return Job(
        "check",
        {"op": "grouped_matmul", "case": name, "backend": backend},
        lambda: {"both": Program(_both(OP[backend].run), make)},
        lambda ran: compare(ran["both"].outputs, expected(), dtype),
        refused,
    )


def _expected(make: Callable[[], Any]) -> dict[str, np.ndarray]:
    return float64(_both(reference.run), make())


def _uneven(m: int, e: int) -> np.ndarray:
    """Rows of each group as a router leaves them, some twice as many as others, all rows taken."""
    shares = np.random.default_rng(0).dirichlet(np.full(e, 8.0))
    ends = np.round(np.cumsum(shares) * m).astype(np.int32)
    ends[-1] = m
    return np.diff(ends, prepend=0).astype(np.int32)


def _make(shape: Shape, dtype: str, sizes_E: np.ndarray) -> tuple[jax.Array, ...]:
    """Rows, matrices, the gradient of the result, and the sizes."""
    m, e, k, n = shape
    x_MK, w_EKN, d_MN = (drawn(i, one, dtype) for i, one in enumerate([(m, k), (e, k, n), (m, n)]))
    return x_MK, w_EKN * (k**-0.5), d_MN, jnp.asarray(sizes_E)


def _both(run: Callable[..., jax.Array]) -> Callable[..., dict[str, jax.Array]]:
    def both(
        x_MK: jax.Array, w_EKN: jax.Array, d_MN: jax.Array, sizes_E: jax.Array
    ) -> dict[str, jax.Array]:
        y_MN, back = jax.vjp(lambda x, w: run(x, w, sizes_E), x_MK, w_EKN)
        dx_MK, dw_EKN = back(d_MN)
        return {"y": y_MN, "dx": dx_MK, "dw": dw_EKN}

    return both


def speeds(
    size: str,
    device: Device,
    peak: float | None,
    allowed: Callable[[str, str, str], str | None],
    sizes: Sizes,
) -> Iterator[Job]:
    """One job for each backend, shape and size of blocks."""
    dtype = "float32" if size == "small" else "bfloat16"
    for name, (m, e, k, n) in SHAPES[size].items():
        for backend in [
            DENSE,
            *(backend.name for backend in OP.backends if device.platform in backend.platforms),
        ]:
            groups = 1 if backend == DENSE else e
            make = functools.partial(_make, (m, groups, k, n), dtype, _uneven(m, groups))
            case = Case(m, e, k, n, dtype, device)
            refused = _refusal(backend, case)
            if refused is None and backend not in (DENSE, "reference"):
                refused = allowed("grouped_matmul", backend, "uneven")
            for place, blocks in enumerate(sizes.of(OP, backend, case)):
                row = {
                    "shape": name,
                    "M": m,
                    "E": e,
                    "K": k,
                    "N": n,
                    "dtype": dtype,
                    "backend": backend,
                    "blocks": blocks,
                }
                yield _speed(
                    row,
                    make,
                    2.0 * m * k * n,
                    peak,
                    refused,
                    functools.partial(sizes.differs, place == 0),
                    dict(case.shape_class),
                )


def _speed(
    row: dict[str, Any],
    make: Callable[[], Any],
    flops: float,
    peak: float | None,
    refused: str | None,
    differs: Differs,
    shape_class: dict[str, Any],
) -> Job:
    backend, blocks = row["backend"], {"blocks": row["blocks"]} if row["blocks"] else {}

    def programs() -> dict[str, Program]:
        run, times = (
            functools.partial(_dense if backend == DENSE else OP[backend].run, **blocks),
            calls(flops, peak),
        )
        return {
            "forward": Program(lambda x, w, d, sizes: run(x, w, sizes), make, times),
            "both": Program(_both(run), make, max(1, times // 3)),
        }

    def finish(ran: dict[str, Ran]) -> dict[str, Any]:
        found = passes(ran, flops, 2 * flops) | {"op": OP.name, "shape_class": shape_class}
        return found | differs(f"{backend} {row['shape']}", ran["both"].outputs, row["dtype"])

    return Job("grouped_matmul", row, programs, finish, refused)


def _dense(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return x_MK @ w_EKN[0]


def _refusal(backend: str, case: Case) -> str | None:
    if backend == DENSE:
        return None
    if backend == "reference":
        held = 4 * case.rows * case.groups * case.columns
        return (
            f"its [rows, groups, columns] would take {held / 2**30:.0f} GiB"
            if held > GREATEST
            else None
        )
    try:
        return OP[backend].supports(case)
    except ImportError as error:
        return f"failed: {error}"
