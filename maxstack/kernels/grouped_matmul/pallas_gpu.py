"""Our own grouped matmul for GPUs, a Pallas kernel that Triton compiles: only tiles that hold rows
of a group are multiplied.

Forward and gradient of the rows are one kernel, the matrices read as they lie or transposed; the
gradient of the matrices is another. Shapes as in the package, and tiles: R rows  C columns  D of
what is contracted; T tiles of rows.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from maxstack.kernels import triton
from maxstack.kernels.backends import Device
from maxstack.kernels.grouped_matmul.case import Case, power_of_two

LEAST = 16
"""Tensor cores multiply no smaller tiles."""
TOGETHER = 8
"""Tiles of rows whose columns are computed one after the other, so that they share matrices in the
L2 cache."""

STEP_BYTES = 128
"""Of what a step of the loop adds to one row of a tile: three steps of two tiles of 128 rows are 96
KiB, which the shared memory of all these GPUs holds."""


class Blocks(NamedTuple):
    """Sizes of the tile of the result that a program computes and of a step of its loop, warps that
    do it, and steps that are loaded ahead."""

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


def supports(case: Case) -> str | None:
    """Any shape, on what has tensor cores for both types."""
    if case.device.capability < (8, 0):
        return (
            f"compute capability {'.'.join(map(str, case.device.capability))} is below 8.0; "
            "Ampere and later GPUs have it"
        )
    return case.unusual


def candidates(case: Case) -> list[dict[str, int]]:
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
    return [one._asdict() for one in (tall if rows == 128 else low)]


def run(
    x_MK: jax.Array,
    w_EKN: jax.Array,
    sizes_E: jax.Array,
    blocks: Mapping[str, int] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """[M, N], summed in float32 (products of float32 as jax's default matmul precision says);
    `blocks` are one of `candidates`."""
    chosen = Blocks(**(blocks or candidates(Case.of(x_MK, w_EKN, Device.here()))[0]))
    return _grouped_matmul(chosen, interpret, x_MK, w_EKN, sizes_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_matmul(
    blocks: Blocks, interpret: bool, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array
) -> jax.Array:
    return _rows(blocks, interpret, False, x_MK, w_EKN, sizes_E)


def _forward(blocks, interpret, x_MK, w_EKN, sizes_E):
    return _rows(blocks, interpret, False, x_MK, w_EKN, sizes_E), (x_MK, w_EKN, sizes_E)


def _backward(blocks, interpret, saved, dy_MN):
    x_MK, w_EKN, sizes_E = saved
    return (
        _rows(blocks, interpret, True, dy_MN, w_EKN, sizes_E),
        _matrices(blocks, interpret, x_MK, dy_MN, w_EKN, sizes_E),
        None,
    )


_grouped_matmul.defvjp(_forward, _backward)


def _rows(
    blocks: Blocks,
    interpret: bool,
    transposed: bool,
    x_MK: jax.Array,
    w_EKN: jax.Array,
    sizes_E: jax.Array,
) -> jax.Array:
    """Rows times their group's matrix, or its transpose (then x is [M, N] and the result [M, K]).
    Rows of no group are a last group of zeros."""
    (rows, contracted), columns = x_MK.shape, w_EKN.shape[1 if transposed else 2]
    blocks = blocks.fit(columns, contracted)
    tiles = _tiles(sizes_E, rows, blocks.rows)
    programs = tiles[0].shape[0] * pl.cdiv(columns, blocks.columns)
    return _call(
        _rows_kernel,
        "grouped_matmul",
        blocks,
        interpret,
        programs,
        jax.ShapeDtypeStruct((rows, columns), x_MK.dtype),
        2 * rows * contracted * columns,
        (*tiles, x_MK, w_EKN),
        transposed=transposed,
    )


def _matrices(
    blocks: Blocks,
    interpret: bool,
    x_MK: jax.Array,
    dy_MN: jax.Array,
    w_EKN: jax.Array,
    sizes_E: jax.Array,
) -> jax.Array:
    """The sum over each group's rows of outer(x, dy) [E, K, N]."""
    groups, k, n = w_EKN.shape
    step = max(
        LEAST,
        min(
            blocks.contracted,
            STEP_BYTES // w_EKN.dtype.itemsize,
            power_of_two(-(-x_MK.shape[0] // groups)),
        ),
    )
    blocks = Blocks(128, 128, step, blocks.warps, min(blocks.stages, 3)).fit(n, step)
    blocks = blocks._replace(rows=min(blocks.rows, max(LEAST, power_of_two(k))))
    ends_E = jnp.cumsum(sizes_E)
    return _call(
        _matrices_kernel,
        "grouped_matmul_of_matrices",
        blocks,
        interpret,
        groups * pl.cdiv(k, blocks.rows) * pl.cdiv(n, blocks.columns),
        jax.ShapeDtypeStruct(w_EKN.shape, w_EKN.dtype),
        2 * x_MK.shape[0] * k * n,
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
    **given: bool,
) -> jax.Array:
    return triton.call(
        functools.partial(kernel, blocks=blocks, **given),
        out,
        arrays,
        grid=(programs,),
        name=name,
        interpret=interpret,
        warps=blocks.warps,
        stages=blocks.stages,
        flops=flops,
        transcendentals=0,
        moved=triton.size_of(*arrays, out),
    )


def _tiles(sizes_E: jax.Array, rows: int, tall: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each tile its group (E: the rows of none), its first row and the row after the last of its
    group: int32 [T].

    A tile starts where its group does, or a multiple of its height after it. There are at most rows
    // tall + E + 1; what is left over is empty.
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
    tile, column = _place(group_ref.shape[0], pl.cdiv(out_ref.shape[1], blocks.columns))
    group, first, end = group_ref[tile], first_ref[tile], end_ref[tile]
    contracted = x_ref.shape[1]
    mine_R = first + jnp.arange(blocks.rows) < end
    there_C = _there(column * blocks.columns, blocks.columns, out_ref.shape[1])
    rows, columns = pl.ds(first, blocks.rows), pl.ds(column * blocks.columns, blocks.columns)

    def step(i, sum_RC):
        inner, there_D = (
            pl.ds(i * blocks.contracted, blocks.contracted),
            _there(i * blocks.contracted, blocks.contracted, contracted),
        )
        x_RD = _load(x_ref.at[rows, inner], mine_R, there_D)
        if transposed:
            w_CD = _load(w_ref.at[group, columns, inner], there_C, there_D)
            return sum_RC + jax.lax.dot_general(
                x_RD, w_CD, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
        w_DC = _load(w_ref.at[group, inner, columns], there_D, there_C)
        return sum_RC + jnp.dot(x_RD, w_DC, preferred_element_type=jnp.float32)

    @pl.when(first < end)
    def _():
        steps = pl.cdiv(contracted, blocks.contracted) * (group < w_ref.shape[0]).astype(jnp.int32)
        sum_RC = jax.lax.fori_loop(
            0, steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
        )
        _store(out_ref.at[rows, columns], sum_RC, mine_R, there_C)


def _matrices_kernel(first_ref, end_ref, x_ref, dy_ref, out_ref, *, blocks: Blocks) -> None:
    _, k, n = out_ref.shape
    high, wide = pl.cdiv(k, blocks.rows), pl.cdiv(n, blocks.columns)
    group, place = (
        jax.lax.div(pl.program_id(0), high * wide),
        jax.lax.rem(pl.program_id(0), high * wide),
    )
    row, column = jax.lax.div(place, wide) * blocks.rows, jax.lax.rem(place, wide) * blocks.columns
    first, end = first_ref[group], end_ref[group]
    there_R, there_C = _there(row, blocks.rows, k), _there(column, blocks.columns, n)

    def step(i, sum_RC):
        start = first + i * blocks.contracted
        mine_D = start + jnp.arange(blocks.contracted) < end
        inner = pl.ds(start, blocks.contracted)
        x_DR = _load(x_ref.at[inner, pl.ds(row, blocks.rows)], mine_D, there_R)
        dy_DC = _load(dy_ref.at[inner, pl.ds(column, blocks.columns)], mine_D, there_C)
        return sum_RC + jax.lax.dot_general(
            x_DR, dy_DC, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    steps = jax.lax.div(end - first + blocks.contracted - 1, blocks.contracted)
    sum_RC = jax.lax.fori_loop(
        0, steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    )
    _store(
        out_ref.at[group, pl.ds(row, blocks.rows), pl.ds(column, blocks.columns)],
        sum_RC,
        there_R,
        there_C,
    )


def _place(tiles: int, wide: int) -> tuple[jax.Array, jax.Array]:
    """(tile of rows, tile of columns) of this program: TOGETHER tiles of rows down each column,
    then the next column."""
    band, place = (
        jax.lax.div(pl.program_id(0), TOGETHER * wide),
        jax.lax.rem(pl.program_id(0), TOGETHER * wide),
    )
    high = jnp.minimum(tiles - band * TOGETHER, TOGETHER)
    return band * TOGETHER + jax.lax.rem(place, high), jax.lax.div(place, high)


def _there(start: jax.Array, size: int, limit: int) -> jax.Array | None:
    """Which of [start, start + size) are below the limit; None: all, since tiles fill it."""
    return None if limit % size == 0 else start + jnp.arange(size) < limit


def _mask(down: jax.Array | None, across: jax.Array | None) -> jax.Array | None:
    parts = [
        part
        for part in (
            None if down is None else down[:, None],
            None if across is None else across[None, :],
        )
        if part is not None
    ]
    return functools.reduce(jnp.logical_and, parts) if parts else None


def _load(ref, down: jax.Array | None, across: jax.Array | None) -> jax.Array:
    """Zeros where it is not there."""
    mask = _mask(down, across)
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)


def _store(ref, tile: jax.Array, down: jax.Array | None, across: jax.Array | None) -> None:
    plgpu.store(ref, tile.astype(ref.dtype), mask=_mask(down, across))
