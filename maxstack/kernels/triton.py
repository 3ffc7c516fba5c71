"""Pallas kernels for GPUs through Triton: what every call of one needs beside its kernel."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxstack import sharding


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
    **given: Any,
) -> Any:
    """`pl.pallas_call` on `arrays`. `flops` are those of matrix products; they stand in `metadata`
    too, which the compiled program keeps where it drops the cost estimate."""
    with _known_device():
        return pl.pallas_call(
            kernel,
            out_shape=out_shape,
            compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
            metadata={"flops": str(flops)},
            cost_estimate=pl.CostEstimate(
                flops=flops, transcendentals=transcendentals, bytes_accessed=moved
            ),
            **given,
        )(*arrays)


def size_of(*arrays: Any) -> int:
    """Bytes of arrays or shapes."""
    return sum(x.size * x.dtype.itemsize for x in arrays)


@contextlib.contextmanager
def _known_device() -> Iterator[None]:
    """Tells Triton which GPU a program without `shard_map` is for, where that GPU is not here."""
    mesh = sharding.mesh()
    if mesh is None or jax.default_backend() == "gpu" or not jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield
