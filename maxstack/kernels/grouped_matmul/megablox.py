"""jax's megablox kernels for TPUs, with rows padded to whole tiles and rows of no group cleared.
Shapes as in the package."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from maxstack.kernels.backends import Device
from maxstack.kernels.grouped_matmul.case import Case, grouped

LANES = 128
MOST_TILES = 1024
"""Tiles of rows. megablox counts visits to them with a histogram in float32, whose edges blur: on a
CPU counts were right up to 4,096 tiles and wrong at 6,000. A wrong count gives rows another group's
matrix, without an error."""
TALLEST = 512


class Blocks(NamedTuple):
    """A tile: of x [rows, contracted], of a matrix [contracted, columns]."""

    rows: int = TALLEST
    contracted: int = 1024
    columns: int = 1024


def supports(case: Case) -> str | None:
    """Rows that it can count."""
    most = MOST_TILES * TALLEST
    if case.rows > most:
        return (
            f"{case.rows} rows are more than the {most} that megablox surely counts right; "
            "split them over more devices or microbatches"
        )
    return case.unusual


def candidates(case: Case) -> list[dict[str, int]]:
    """Sizes worth measuring, the default first. Those of float32 are half as deep and wide: tiles
    must fit a TPU's smallest VMEM."""
    rows = min(TALLEST, max(LANES, case.rows_of_a_group))
    part = 1 if case.dtype == "bfloat16" else 2
    sizes = [
        (rows, 1024, 1024),
        (rows, 512, 1024),
        (rows, 1024, 512),
        (rows, 512, 512),
        (max(LANES, rows // 2), 1024, 1024),
        (LANES, 512, 1024),
    ]
    return [Blocks(m, k // part, n // part)._asdict() for m, k, n in dict.fromkeys(sizes)]


def run(
    x_MK: jax.Array,
    w_EKN: jax.Array,
    sizes_E: jax.Array,
    blocks: Mapping[str, int] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """[M, N], summed in float32; `blocks` are one of `candidates`."""
    chosen = countable(
        Blocks(**(blocks or candidates(Case.of(x_MK, w_EKN, Device.here()))[0])), x_MK.shape[0]
    )
    padded = jnp.pad(x_MK, ((0, -x_MK.shape[0] % chosen.rows), (0, 0)))
    return _grouped_matmul(chosen, interpret, padded, w_EKN, sizes_E)[: x_MK.shape[0]]


def countable(blocks: Blocks, rows: int) -> Blocks:
    """Tall enough that there are no more tiles than `MOST_TILES`."""
    while rows > MOST_TILES * blocks.rows:
        blocks = blocks._replace(rows=2 * blocks.rows)
    return blocks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_matmul(
    blocks: Blocks, interpret: bool, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array
) -> jax.Array:
    return _rows(blocks, interpret, False, x_MK, w_EKN, sizes_E)


def _forward(blocks, interpret, x_MK, w_EKN, sizes_E):
    return _rows(blocks, interpret, False, x_MK, w_EKN, sizes_E), (x_MK, w_EKN, sizes_E)


def _backward(blocks, interpret, saved, dy_MN):
    x_MK, w_EKN, sizes_E = saved
    dw_EKN = tgmm(
        x_MK.swapaxes(0, 1),
        dy_MN,
        sizes_E,
        w_EKN.dtype,
        _tiling(blocks, *w_EKN.shape[1:]),
        interpret=interpret,
    )
    return _rows(blocks, interpret, True, dy_MN, w_EKN, sizes_E), dw_EKN, None


_grouped_matmul.defvjp(_forward, _backward)


def _rows(
    blocks: Blocks,
    interpret: bool,
    transposed: bool,
    x_MK: jax.Array,
    w_EKN: jax.Array,
    sizes_E: jax.Array,
) -> jax.Array:
    """Tiles without a row of a group are never written, so what stands there is anything."""
    _, k, n = w_EKN.shape
    tiling = _tiling(blocks, n, k) if transposed else _tiling(blocks, k, n)
    out_MN = gmm(
        x_MK, w_EKN, sizes_E, x_MK.dtype, tiling, transpose_rhs=transposed, interpret=interpret
    )
    return jnp.where(grouped(x_MK.shape[0], sizes_E), out_MN, 0)


def _tiling(blocks: Blocks, contracted: int, columns: int) -> tuple[int, int, int]:
    """Not larger than the matrix."""
    return blocks.rows, min(blocks.contracted, contracted), min(blocks.columns, columns)
