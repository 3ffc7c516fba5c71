"""Calls of Pallas kernels that Triton compiles for GPUs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxstack import sharding
from maxstack.kernels.backends import size_of


def call(
    kernel: Callable[..., None],
    out_shape: Any,
    arrays: tuple[jax.Array, ...],
    *,
    warps: int,
    stages: int,
    flops: int,
    transcendentals: int,
    moved: int | None = None,
    **options: Any,
) -> Any:
    """`pl.pallas_call` on `arrays`. `flops` count matrix products, and are repeated in `metadata`,
    because the compiled program drops the cost estimate. `moved`: bytes; None: those of all arrays
    once."""
    if moved is None:
        moved = size_of(*arrays, *jax.tree.leaves(out_shape))
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


def inside(start: Any, size: int, limit: int) -> jax.Array | None:
    """Mask of the indices start..start + size - 1 that are below `limit`; None: all are. A traced
    `start` is a multiple of `size`."""
    if limit % size == 0 or (isinstance(start, int) and start + size <= limit):
        return None
    return start + jnp.arange(size) < limit


def divided(a: jax.Array, b: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder."""
    return jax.lax.div(a, b), jax.lax.rem(a, b)


def _mask(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    if columns is None:
        return None if rows is None else rows[:, None]
    return columns[None, :] if rows is None else rows[:, None] & columns[None, :]


def load(ref: Any, mask: jax.Array | None) -> jax.Array:
    """The array at `ref`, 0 outside of the mask; None: no mask."""
    return triton.load(ref, mask=mask, other=None if mask is None else 0)


def load_tile(ref: Any, rows: jax.Array | None, columns: jax.Array | None) -> jax.Array:
    """A tile, 0 outside of the masks of its rows and columns."""
    return load(ref, _mask(rows, columns))


def store_tile(
    ref: Any, tile: jax.Array, rows: jax.Array | None, columns: jax.Array | None
) -> None:
    """The reverse of `load_tile`, in the dtype of `ref`."""
    triton.store(ref, tile.astype(ref.dtype), mask=_mask(rows, columns))


@contextlib.contextmanager
def _known_device() -> Iterator[None]:
    """Tells Triton the GPU of a program without `shard_map` where this process has no GPU."""
    mesh = sharding.mesh()
    if mesh is None or jax.default_backend() == "gpu" or not jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield
