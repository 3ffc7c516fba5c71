"""The grouped matmul on GPUs as a Pallas kernel that Triton compiles; only tiles that hold rows of
a group are multiplied.

Forward and gradient of the rows are one kernel, which reads the matrices as they are or transposed;
the gradient of the matrices is another. Shapes as in the package, and tiles: R rows  C columns  D
of the contracted dimension; T tiles of rows.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maxstack.kernels.backends import Device
from maxstack.kernels.grouped_matmul.case import GroupedMatmulCase, differentiable, power_of_two
from maxstack.kernels.triton import call, divided, inside, load_tile, store_tile

LEAST = 16
"""Tensor cores multiply no smaller tiles."""
TOGETHER = 8
"""Tiles of rows whose columns are computed one after the other, so that they share matrices in the
L2 cache."""

STEP_BYTES = 128
"""Bytes that a step of the loop adds to one row of a tile: three steps of two tiles of 128 rows are
96 KiB, which the shared memory of all these GPUs holds."""


class Blocks(NamedTuple):
    """Sizes of the tile of the result that a program computes and of a step of its loop, its warps,
    and the steps that are loaded ahead."""

    rows: int = 128
    columns: int = 128
    contracted: int = 64
    warps: int = 8
    stages: int = 3

    def fit(self, columns: int, contracted: int) -> "Blocks":
        """Not larger than the matrix."""
        return self._replace(
            columns=min(self.columns, max(LEAST, power_of_two(columns))),
            contracted=min(self.contracted, max(LEAST, power_of_two(contracted))),
        )


def supports(case: GroupedMatmulCase) -> str | None:
    """Why the kernels cannot serve `case`; None if they can."""
    return case.device.older_than_ampere or case.unusual


def candidates(case: GroupedMatmulCase) -> list[dict[str, int]]:
    """Sizes worth measuring, the default first: tiles about as tall as a group."""
    rows = min(128, max(LEAST, case.rows_of_a_group))
    step = STEP_BYTES // jnp.dtype(case.dtype).itemsize
    tall = [
        Blocks(128, 128, step, 8, 3),
        Blocks(128, 128, step, 4, 3),
        Blocks(128, 128, step // 2, 4, 4),
        Blocks(128, 256, step, 8, 3),
        Blocks(64, 256, step, 8, 3),
        Blocks(64, 128, step, 4, 4),
    ]
    low = [
        Blocks(rows, 128, step, 4, 4),
        Blocks(rows, 256, step, 8, 3),
        Blocks(rows, 128, step, 8, 4),
        Blocks(rows, 64, 2 * step, 4, 4),
    ]
    return [blocks._asdict() for blocks in (tall if rows == 128 else low)]


def run(
    x_MK: jax.Array,
    w_EKN: jax.Array,
    sizes_E: jax.Array,
    blocks: Mapping[str, int] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """[M, N], summed in float32 (products of float32 as jax's default matmul precision says);
    `blocks` are one of `candidates`."""
    blocks = blocks or candidates(GroupedMatmulCase.of(x_MK, w_EKN, Device.here()))[0]
    tile = Blocks(**blocks)
    return differentiable(
        functools.partial(_rows, tile, interpret), functools.partial(_matrices, tile, interpret)
    )(x_MK, w_EKN, sizes_E)


def _rows(
    blocks: Blocks,
    interpret: bool,
    x_MK: jax.Array,
    w_EKN: jax.Array,
    sizes_E: jax.Array,
    transposed: bool,
) -> jax.Array:
    """`case.Rows`. Rows of no group are a last group, whose result is zero."""
    (rows, contracted), columns = x_MK.shape, w_EKN.shape[1 if transposed else 2]
    blocks = blocks.fit(columns, contracted)
    tiles = _tiles(sizes_E, rows, blocks.rows)
    return _call(
        functools.partial(_rows_kernel, transposed=transposed),
        "grouped_matmul",
        blocks,
        interpret,
        tiles[0].shape[0] * pl.cdiv(columns, blocks.columns),
        jax.ShapeDtypeStruct((rows, columns), x_MK.dtype),
        2 * rows * contracted * columns,
        (*tiles, x_MK, w_EKN),
    )


def _matrices(
    blocks: Blocks, interpret: bool, x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array
) -> jax.Array:
    """`case.Matrices`."""
    (rows, k), n, groups = x_MK.shape, dy_MN.shape[1], sizes_E.shape[0]
    step = min(
        blocks.contracted,
        STEP_BYTES // x_MK.dtype.itemsize,
        power_of_two(-(-rows // groups)),
    )
    step = max(LEAST, step)
    blocks = Blocks(128, 128, step, blocks.warps, min(blocks.stages, 3)).fit(n, step)
    blocks = blocks._replace(rows=min(blocks.rows, max(LEAST, power_of_two(k))))
    ends_E = jnp.cumsum(sizes_E)
    return _call(
        _matrices_kernel,
        "grouped_matmul_of_matrices",
        blocks,
        interpret,
        groups * pl.cdiv(k, blocks.rows) * pl.cdiv(n, blocks.columns),
        jax.ShapeDtypeStruct((groups, k, n), x_MK.dtype),
        2 * rows * k * n,
        (ends_E - sizes_E, ends_E, x_MK, dy_MN),
    )


def _call(
    kernel: Callable[..., None],
    name: str,
    blocks: Blocks,
    interpret: bool,
    programs: int,
    out: jax.ShapeDtypeStruct,
    flops: int,
    arrays: tuple[jax.Array, ...],
) -> jax.Array:
    return call(
        functools.partial(kernel, blocks=blocks),
        out,
        arrays,
        grid=(programs,),
        name=name,
        interpret=interpret,
        warps=blocks.warps,
        stages=blocks.stages,
        flops=flops,
        transcendentals=0,
    )


def _tiles(sizes_E: jax.Array, rows: int, tall: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group of each tile (E for rows of no group), its first row and the end of its group: int32
    [T].

    Tiles of a group start at its first row and every `tall` rows after it. At most rows // tall + E
    + 1 tiles are needed; the others are empty.
    """
    groups = sizes_E.shape[0]
    sizes = jnp.append(sizes_E, rows - sizes_E.sum())
    ends, counts = jnp.cumsum(sizes), -(-sizes // tall)
    before = jnp.cumsum(counts) - counts
    tile_T = jnp.arange(rows // tall + groups + 1, dtype=jnp.int32)
    group_T = (
        jnp.searchsorted(before, tile_T, side="right", method="compare_all").astype(jnp.int32) - 1
    )
    first_T = (ends - sizes)[group_T] + (tile_T - before[group_T]) * tall
    return group_T, first_T, ends[group_T]


def _rows_kernel(
    group_ref, first_ref, end_ref, x_ref, w_ref, out_ref, *, blocks: Blocks, transposed: bool
) -> None:
    tile, column = _tile_of_program(group_ref.shape[0], pl.cdiv(out_ref.shape[1], blocks.columns))
    group, first, end = group_ref[tile], first_ref[tile], end_ref[tile]
    contracted = x_ref.shape[1]
    inside_R = first + jnp.arange(blocks.rows) < end
    inside_C = inside(column * blocks.columns, blocks.columns, out_ref.shape[1])
    rows, columns = pl.ds(first, blocks.rows), pl.ds(column * blocks.columns, blocks.columns)

    def step(i, sum_RC):
        start = i * blocks.contracted
        inner = pl.ds(start, blocks.contracted)
        inside_D = inside(start, blocks.contracted, contracted)
        x_RD = load_tile(x_ref.at[rows, inner], inside_R, inside_D)
        if transposed:
            w_CD = load_tile(w_ref.at[group, columns, inner], inside_C, inside_D)
            return sum_RC + _product(x_RD, w_CD, 1, 1)
        w_DC = load_tile(w_ref.at[group, inner, columns], inside_D, inside_C)
        return sum_RC + _product(x_RD, w_DC, 1, 0)

    @pl.when(first < end)
    def _():
        steps = pl.cdiv(contracted, blocks.contracted) * (group < w_ref.shape[0]).astype(jnp.int32)
        sum_RC = jax.lax.fori_loop(
            0, steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
        )
        store_tile(out_ref.at[rows, columns], sum_RC, inside_R, inside_C)


def _matrices_kernel(first_ref, end_ref, x_ref, dy_ref, out_ref, *, blocks: Blocks) -> None:
    _, k, n = out_ref.shape
    high, wide = pl.cdiv(k, blocks.rows), pl.cdiv(n, blocks.columns)
    group, tile = divided(pl.program_id(0), high * wide)
    tile_row, tile_column = divided(tile, wide)
    row, column = tile_row * blocks.rows, tile_column * blocks.columns
    first, end = first_ref[group], end_ref[group]
    inside_R, inside_C = inside(row, blocks.rows, k), inside(column, blocks.columns, n)

    def step(i, sum_RC):
        start = first + i * blocks.contracted
        inside_D = start + jnp.arange(blocks.contracted) < end
        inner = pl.ds(start, blocks.contracted)
        x_DR = load_tile(x_ref.at[inner, pl.ds(row, blocks.rows)], inside_D, inside_R)
        dy_DC = load_tile(dy_ref.at[inner, pl.ds(column, blocks.columns)], inside_D, inside_C)
        return sum_RC + _product(x_DR, dy_DC, 0, 0)

    steps = jax.lax.div(end - first + blocks.contracted - 1, blocks.contracted)
    sum_RC = jax.lax.fori_loop(
        0, steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    )
    store_tile(
        out_ref.at[group, pl.ds(row, blocks.rows), pl.ds(column, blocks.columns)],
        sum_RC,
        inside_R,
        inside_C,
    )


def _tile_of_program(tiles: int, wide: int) -> tuple[jax.Array, jax.Array]:
    """(tile of rows, tile of columns) of this program: TOGETHER tiles of rows down each column,
    then the next column."""
    band, rest = divided(pl.program_id(0), TOGETHER * wide)
    column, row = divided(rest, jnp.minimum(tiles - band * TOGETHER, TOGETHER))
    return band * TOGETHER + row, column


def _product(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
    """The product over a dimension of each, summed in float32."""
    return jax.lax.dot_general(
        a, b, (((a_dim,), (b_dim,)), ((), ())), preferred_element_type=jnp.float32
    )
