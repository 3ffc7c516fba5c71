"""Calls of Pallas kernels that Triton compiles for GPUs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxstack import sharding
from maxstack.kernels.backends import Device


def call(
    kernel: Callable[..., None],
    out_shape: Any,
    arrays: tuple[jax.Array, ...],
    *,
    warps: int,
    stages: int,
    flops: int,
    transcendentals: int,
    moved: int,
    **options: Any,
) -> Any:
    """`pl.pallas_call` on `arrays`. `flops` count matrix products, and are repeated in `metadata`,
    because the compiled program drops the cost estimate. `moved` is in bytes."""
    with _known_device():
        return pl.pallas_call(
            kernel,
            out_shape=out_shape,
            compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
            metadata={"flops": str(flops)},
            cost_estimate=pl.CostEstimate(
                flops=flops, transcendentals=transcendentals, bytes_accessed=moved
            ),
            **options,
        )(*arrays)


def too_old(device: Device) -> str | None:
    """Why a GPU without tensor cores for bfloat16 cannot run a kernel; None if it has them."""
    if device.capability >= (8, 0):
        return None
    capability = ".".join(map(str, device.capability))
    return f"needs a GPU of compute capability 8.0 (A100) or later; {device.kind} has {capability}"


def size_of(*arrays: Any) -> int:
    """Size of arrays or shapes in bytes."""
    return sum(x.size * x.dtype.itemsize for x in arrays)


@contextlib.contextmanager
def _known_device() -> Iterator[None]:
    """Tells Triton the GPU of a program without `shard_map` where this process has no GPU."""
    mesh = sharding.mesh()
    if mesh is None or jax.default_backend() == "gpu" or not jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield
