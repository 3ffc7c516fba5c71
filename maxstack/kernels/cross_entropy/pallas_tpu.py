"""Linear cross-entropy on TPUs: logits are made in tiles that never leave the chip's vector memory.

One kernel gives the statistics of all rows; a second makes the tiles again, a block of rows at a
time, and writes the gradient of the logits in x's dtype, which XLA multiplies into the gradients of
x and head: four matmuls, and no float32 logits in HBM. Shapes: M rows  D embed  V vocab  R, C, K
rows, columns and depth of a tile  L 128 lanes.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxstack.kernels.backends import Device
from maxstack.kernels.cross_entropy.by_rows import graded_by_rows, sizes
from maxstack.kernels.cross_entropy.differentiable import on_one_device
from maxstack.kernels.cross_entropy.request import Case, Gradients, Request
from maxstack.kernels.cross_entropy.softmax import Statistics, capped, together

LANES, ROWS, LOWEST = 128, 64, -1e30
DEPTHS = (512, 256, 128)
VECTOR_MEMORY = 48 << 20
LARGE_TILES = ("TPU v6", "TPU7", "TPU v7")
"""Kinds whose matrix units need more FLOPs a byte of HBM than tiles of 1024 x 1024 give."""


def supports(case: Case) -> str | None:
    """Why the kernels cannot serve `case`; None: they can."""
    if case.dtype not in ("bfloat16", "float32"):
        return f"they compute in float32, and x is {case.dtype}"
    if case.embed > DEPTHS[0] and not _depth(case.embed, DEPTHS[0]):
        return f"embed {case.embed} is more than {DEPTHS[0]} and not a multiple of {LANES}"
    return None


def candidates(case: Case) -> list[dict[str, int]]:
    """Rows of a block whose gradients of logits are kept, and tiles of rows x columns x depth."""
    usual = _tile(case.device.kind)
    tiles = [
        usual,
        *(
            {"tile_rows": r, "tile_columns": c, "depth": DEPTHS[0]}
            for r, c in ((1024, 1024), (512, 1024), (1024, 2048), (512, 2048))
        ),
    ]
    return [
        {"rows": sizes(case)[0], **tile} for i, tile in enumerate(tiles) if tile not in tiles[:i]
    ]


def forward(
    x_MD: jax.Array,
    head_DV: jax.Array,
    bias_V: jax.Array | None,
    targets_M: jax.Array,
    request: Request,
    axes: tuple[str, ...] = (),
    blocks: Mapping[str, int] | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(nll [M], log Z [M]); the vocabulary's other slices lie along `axes`, and targets count this
    slice's columns."""
    found = _call(
        _statistics,
        3,
        None,
        x_MD,
        head_DV.astype(x_MD.dtype),
        bias_V,
        (targets_M,),
        request,
        blocks or {},
        interpret,
    )
    return together(Statistics(*(a[:, 0] for a in found)), axes)


def graded(
    x_MD: jax.Array,
    head_DV: jax.Array,
    bias_V: jax.Array | None,
    targets_M: jax.Array,
    weights_M: jax.Array,
    request: Request,
    axes: tuple[str, ...] = (),
    blocks: Mapping[str, int] | None = None,
    interpret: bool = False,
) -> Any:
    """((nll, log Z), Gradients)."""
    head_DV, blocks = head_DV.astype(x_MD.dtype), blocks or {}
    nll_M, log_z_M = forward(x_MD, head_DV, bias_V, targets_M, request, axes, blocks, interpret)

    def step(x_RD: jax.Array, *per_row: jax.Array) -> tuple[None, jax.Array]:
        return None, _call(
            _gradient, 0, x_RD.dtype, x_RD, head_DV, bias_V, per_row, request, blocks, interpret
        )[0]

    given = targets_M, weights_M.astype(jnp.float32), log_z_M
    gradients = graded_by_rows(step, x_MD, head_DV, given, bias_V is not None, blocks.get("rows"))[
        1
    ]
    return (nll_M, log_z_M), Gradients(*gradients)


run = on_one_device(forward, graded)


def _depth(embed: int, most: int) -> int:
    """The most of a tile's depth: all of a small embed, else what divides it; 0 where nothing
    does."""
    return (
        embed
        if embed <= most
        else next((depth for depth in DEPTHS if depth <= most and embed % depth == 0), 0)
    )


def _tile(kind: str) -> dict[str, int]:
    return {
        "tile_rows": 1024,
        "tile_columns": 2048 if kind.startswith(LARGE_TILES) else 1024,
        "depth": DEPTHS[0],
    }


def _call(
    kernel: Any,
    columns: int,
    dtype: Any,
    x_MD: jax.Array,
    head_DV: jax.Array,
    bias_V: jax.Array | None,
    per_row: tuple[jax.Array, ...],
    request: Request,
    blocks: Mapping[str, int],
    interpret: bool,
) -> Any:
    """`kernel` over tiles, the depth innermost, then the columns -> `columns` float32 [M, 1], and
    an [M, V] of `dtype` if there is one."""
    (m, d), v = x_MD.shape, head_DV.shape[1]
    tile = {**_tile(Device.here().kind), **blocks}
    rows, columns_C, depth = (
        min(tile["tile_rows"], m + -m % 8),
        min(tile["tile_columns"], v + -v % LANES),
        _depth(d, tile["depth"]),
    )
    assert depth, "supports() refuses this"
    bias_1V = (jnp.zeros((v,)) if bias_V is None else bias_V).astype(jnp.float32)[None]
    per_row_spec = pl.BlockSpec((rows, 1), lambda i, j, k: (i, 0))
    outs = [jax.ShapeDtypeStruct((m, 1), jnp.float32)] * columns
    out_specs, scratch = (
        [per_row_spec] * columns,
        [pltpu.VMEM((rows, LANES), jnp.float32)] * columns,
    )
    if dtype is not None:
        outs, out_specs = (
            [jax.ShapeDtypeStruct((m, v), dtype)],
            [pl.BlockSpec((rows, columns_C), lambda i, j, k: (i, j))],
        )
    size, tiles_of_rows = x_MD.dtype.itemsize, pl.cdiv(m, rows)
    return pl.pallas_call(
        functools.partial(_tiles, kernel, request=request, vocab=v, per_row=len(per_row)),
        grid=(tiles_of_rows, pl.cdiv(v, columns_C), d // depth),
        out_shape=outs,
        out_specs=out_specs,
        interpret=interpret,
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, j, k: (i, k)),
            pl.BlockSpec((depth, columns_C), lambda i, j, k: (k, j)),
            pl.BlockSpec((1, columns_C), lambda i, j, k: (0, j)),
            *[per_row_spec] * len(per_row),
        ],
        scratch_shapes=[pltpu.VMEM((rows, columns_C), jnp.float32), *scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VECTOR_MEMORY,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * d * v,
            transcendentals=m * v,
            bytes_accessed=size
            * (tiles_of_rows * d * v + m * d * pl.cdiv(v, columns_C) + (dtype is not None) * m * v),
        ),
        name=f"cross_entropy{kernel.__name__}",
    )(x_MD, head_DV, bias_1V, *(a[:, None] for a in per_row))


def _tiles(
    finish: Any,
    x_ref: Any,
    head_ref: Any,
    bias_ref: Any,
    *refs: Any,
    request: Request,
    vocab: int,
    per_row: int,
) -> None:
    """Sums the product over the depth; at its end, `finish` reads the tile a piece of [R, L] at a
    time, so that it fits into registers."""
    acc_ref = refs[per_row + (3 if finish is _statistics else 1)]
    j, k = pl.program_id(1), pl.program_id(2)
    product = jnp.dot(x_ref[...], head_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == 0)
    def _() -> None:
        acc_ref[...] = product

    @pl.when(k > 0)
    def _() -> None:
        acc_ref[...] += product

    height, width = acc_ref.shape
    rows = math.gcd(height, ROWS)

    def piece(at: Any, start: int) -> tuple[jax.Array, jax.Array]:
        """(columns, logits) [R, L]."""
        columns_RL = j * width + start + jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
        return columns_RL, capped(
            acc_ref[at, pl.ds(start, LANES)] + bias_ref[:, pl.ds(start, LANES)], request.soft_cap
        )

    @pl.when(k == pl.num_programs(2) - 1)
    def _() -> None:
        @pl.loop(0, height // rows)
        def _(i: Any) -> None:
            at = pl.ds(pl.multiple_of(i * rows, rows), rows)
            finish(functools.partial(piece, at), at, refs, request, vocab, width, j)


def _statistics(
    piece: Any, at: Any, refs: Any, request: Request, vocab: int, width: int, j: Any
) -> None:
    """Each lane keeps its own greatest logit, sum and target's logit until the last tile of
    columns."""
    targets_R1, outs, lanes = refs[0][at], refs[1:4], refs[5:]

    @pl.when(j == 0)
    def _() -> None:
        for ref, value in zip(lanes, (LOWEST, 0.0, 0.0), strict=True):
            ref[at] = jnp.full((targets_R1.shape[0], LANES), value, jnp.float32)

    top_RL, sum_RL, picked_RL = (ref[at] for ref in lanes)
    for start in range(0, width, LANES):
        columns_RL, logits_RL = piece(start)
        inside_RL, greater_RL = columns_RL < vocab, logits_RL > top_RL
        e_RL = jnp.exp(-jnp.abs(logits_RL - top_RL))
        sum_RL = jnp.where(
            inside_RL, jnp.where(greater_RL, sum_RL * e_RL + 1, sum_RL + e_RL), sum_RL
        )
        top_RL = jnp.where(inside_RL & greater_RL, logits_RL, top_RL)
        picked_RL = jnp.where(inside_RL & (columns_RL == targets_R1), logits_RL, picked_RL)
    for ref, value in zip(lanes, (top_RL, sum_RL, picked_RL), strict=True):
        ref[at] = value
    top_R1 = top_RL.max(axis=1, keepdims=True)  # what the last tile of columns writes stays
    found = (
        top_R1,
        (sum_RL * jnp.exp(top_RL - top_R1)).sum(axis=1, keepdims=True),
        picked_RL.sum(axis=1, keepdims=True),
    )
    for ref, value in zip(outs, found, strict=True):
        ref[at] = value


def _gradient(
    piece: Any, at: Any, refs: Any, request: Request, vocab: int, width: int, j: Any
) -> None:
    """softmax.gradient of the tile; what lies past the last column is not written."""
    targets_R1, weights_R1, log_z_R1 = (ref[at] for ref in refs[:3])
    out_ref, share_R1 = refs[3], weights_R1 * (1 + 2 * request.z_loss * log_z_R1)
    for start in range(0, width, LANES):
        columns_RL, logits_RL = piece(start)
        d_RL = share_R1 * jnp.exp(logits_RL - log_z_R1) - jnp.where(
            columns_RL == targets_R1, weights_R1, 0.0
        )
        if request.soft_cap:
            d_RL = d_RL * (1 - jnp.square(logits_RL / request.soft_cap))
        out_ref[at, pl.ds(start, LANES)] = d_RL.astype(out_ref.dtype)
