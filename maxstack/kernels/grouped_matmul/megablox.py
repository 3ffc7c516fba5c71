"""jax's megablox kernels for TPUs, with rows padded to whole tiles and rows of no group cleared.
Shapes as in the package."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from maxstack.kernels.backends import Device
from maxstack.kernels.grouped_matmul.case import GroupedMatmulCase, differentiable, group_mask

LANES = 128
MOST_TILES = 1024
"""Most tiles of rows. megablox counts visits to tiles with a histogram in float32, whose edges
blur: on a CPU counts were right up to 4,096 tiles and wrong at 6,000. A wrong count silently
multiplies rows by another group's matrix."""
TALLEST = 512


class Blocks(NamedTuple):
    """A tile: of x [rows, contracted], of a matrix [contracted, columns]."""

    rows: int = TALLEST
    contracted: int = 1024
    columns: int = 1024

    def fit(self, contracted: int, columns: int) -> "Blocks":
        """Not larger than the matrix."""
        return Blocks(self.rows, min(self.contracted, contracted), min(self.columns, columns))


def supports(case: GroupedMatmulCase) -> str | None:
    """Why megablox cannot serve `case`; None if it can."""
    most = MOST_TILES * TALLEST
    if case.rows > most:
        return (
            f"{case.rows} rows are more than the {most} that megablox is sure to count right; "
            "split them over more devices or microbatches"
        )
    return case.unsupported


def candidates(case: GroupedMatmulCase) -> list[dict[str, int]]:
    """Sizes to measure, the default first. Tiles of float32 are half as deep and wide, to fit into
    the smallest VMEM of a TPU."""
    rows = min(TALLEST, max(LANES, case.rows_of_a_group))
    part = 1 if case.dtype == "bfloat16" else 2
    sizes = [(rows, k, n) for n in (1024, 512) for k in (1024, 512)]
    sizes += [(max(LANES, rows // 2), 1024, 1024), (LANES, 512, 1024)]
    return [Blocks(m, k // part, n // part)._asdict() for m, k, n in dict.fromkeys(sizes)]


def run(
    x_MK: jax.Array,
    w_EKN: jax.Array,
    sizes_E: jax.Array,
    blocks: Mapping[str, int] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """[M, N], summed in float32; `blocks` are one of `candidates`."""
    blocks = blocks or candidates(GroupedMatmulCase.of(x_MK, w_EKN, Device.here()))[0]
    m = x_MK.shape[0]
    tile = limit_tiles(Blocks(**blocks), m)
    # Whole tiles; the added rows belong to no group.
    padded = jnp.pad(x_MK, ((0, -m % tile.rows), (0, 0)))

    def rows(x_MK, w_EKN, sizes_E, transposed):
        k, n = w_EKN.shape[1:]
        # Of a transposed matrix the columns are contracted.
        tiling = tile.fit(n, k) if transposed else tile.fit(k, n)
        out_MN = gmm(
            x_MK,
            w_EKN,
            sizes_E,
            x_MK.dtype,
            tiling,
            transpose_rhs=transposed,
            interpret=interpret,
        )
        # megablox does not write tiles without a row of a group
        return jnp.where(group_mask(x_MK.shape[0], sizes_E), out_MN, 0)

    def matrices(x_MK, dy_MN, sizes_E):
        tiling = tile.fit(*w_EKN.shape[1:])
        return tgmm(x_MK.swapaxes(0, 1), dy_MN, sizes_E, w_EKN.dtype, tiling, interpret=interpret)

    return differentiable(rows, matrices)(padded, w_EKN, sizes_E)[:m]


def limit_tiles(blocks: Blocks, rows: int) -> Blocks:
    """Blocks tall enough for at most `MOST_TILES` tiles."""
    # Also for measured sizes: a table may come from a smaller case.
    while rows > MOST_TILES * blocks.rows:
        blocks = blocks._replace(rows=2 * blocks.rows)
    return blocks
