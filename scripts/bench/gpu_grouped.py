"""The grouped matmul of a mixture of experts for bench_gpu.py.

Shapes: M rows  E groups  K contracted  N columns.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from bench.gpu_ops import Bench, Call, Run, backends_for, elsewhere
from bench.gpu_ops import checks as checks_of
from bench.gpu_ops import speeds as speeds_of
from bench.gpu_programs import Job, drawn, passes

from maxstack.kernels.backends import Device
from maxstack.kernels.grouped_matmul import OP, GroupedMatmulCase

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
"""A matmul of as many rows with one matrix: the speed that a grouped one could reach."""
GREATEST = 2**32
"""Largest size in bytes of the reference's [M, E, N] that is tried."""


def checks(size: str, device: Device) -> Iterator[Job]:
    """One job for each backend and case."""
    yield from elsewhere(OP, device)
    for name, (shape, dtype, sizes) in CHECKS.items():
        if size != "tiny" or name not in ("even", "float32"):
            yield from checks_of(_call(shape, dtype, device, sizes), name)


def speeds(bench: Bench) -> Iterator[Job]:
    """One job for each backend, shape and size of blocks."""
    dtype = "float32" if bench.size == "small" else "bfloat16"
    for name, (m, e, k, n) in SHAPES[bench.size].items():
        row = {"shape": name, "M": m, "E": e, "K": k, "N": n, "dtype": dtype}
        flops = 2.0 * m * k * n
        figures = functools.partial(passes, forward_flops=flops, backward_flops=2 * flops)
        dense, call = (_call((m, groups, k, n), dtype, bench.device) for groups in (1, e))
        yield from speeds_of(
            bench, "grouped_matmul", dense, row, DENSE, "", flops, figures, peer=_dense
        )
        size = 4 * m * e * n
        too_large = f"its [rows, groups, columns] would take {size / 2**30:.0f} GiB"
        for backend in backends_for(OP, bench.device):
            yield from speeds_of(
                bench,
                "grouped_matmul",
                call,
                row,
                backend,
                "uneven",
                flops,
                figures,
                too_large=too_large if size > GREATEST else None,
            )


def _call(shape: Shape, dtype: str, device: Device, sizes: list[int] | None = None) -> Call:
    m, e, k, n = shape
    sizes_E = np.asarray(_uneven(m, e) if sizes is None else sizes, np.int32)

    def make() -> tuple[jax.Array, ...]:
        """Rows, matrices, the gradient of the result, and the sizes."""
        x_MK, w_EKN, d_MN = (
            drawn(i, shape, dtype) for i, shape in enumerate([(m, k), (e, k, n), (m, n)])
        )
        return x_MK, w_EKN * (k**-0.5), d_MN, jnp.asarray(sizes_E)

    return Call(OP, GroupedMatmulCase(m, e, k, n, dtype, device), make, _forward, _both)


def _uneven(m: int, e: int) -> np.ndarray:
    """Rows of each group as from a router, some twice as many as others, all rows taken."""
    shares = np.random.default_rng(0).dirichlet(np.full(e, 8.0))
    ends = np.round(np.cumsum(shares) * m).astype(np.int32)
    ends[-1] = m
    return np.diff(ends, prepend=0).astype(np.int32)


def _forward(run: Run) -> Run:
    return lambda x_MK, w_EKN, d_MN, sizes_E: run(x_MK, w_EKN, sizes_E)


def _both(run: Run) -> Callable[..., dict[str, jax.Array]]:
    def both(
        x_MK: jax.Array, w_EKN: jax.Array, d_MN: jax.Array, sizes_E: jax.Array
    ) -> dict[str, jax.Array]:
        y_MN, back = jax.vjp(lambda x, w: run(x, w, sizes_E), x_MK, w_EKN)
        dx_MK, dw_EKN = back(d_MN)
        return {"y": y_MN, "dx": dx_MK, "dw": dw_EKN}

    return both


def _dense(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return x_MK @ w_EKN[0]
