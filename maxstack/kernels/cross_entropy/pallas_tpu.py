"""Linear cross-entropy on TPUs: logits are made in tiles that never leave the chip's vector memory.

One kernel gives the statistics of all rows; a second makes the tiles again, a block of rows at a
time, and writes the gradient of the logits in x's dtype, which XLA multiplies into the gradients of
x and head: four matmuls, and no float32 logits in HBM. Shapes: M rows  D embed  V vocab  R, C, K
rows, columns and depth of a tile  L 128 lanes.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxstack.kernels.backends import Device
from maxstack.kernels.cross_entropy.differentiable import differentiable
from maxstack.kernels.cross_entropy.request import (
    Call,
    CrossEntropyCase,
    Gradients,
    Inputs,
    Request,
    Scores,
)
from maxstack.kernels.cross_entropy.row_blocks import map_rows_with_gradients, sizes
from maxstack.kernels.cross_entropy.softmax import (
    LOWEST,
    Statistics,
    apply_soft_cap,
    combine,
    gradient,
)

LANES, ROWS = 128, 64
DEPTHS = (512, 256, 128)
VECTOR_MEMORY = 48 << 20
LARGE_TILES = ("TPU v6", "TPU7", "TPU v7")
"""Kinds whose matrix units need more FLOPs a byte of HBM than tiles of 1024 x 1024 give."""


def supports(case: CrossEntropyCase) -> str | None:
    """Why the kernels cannot serve `case`; None if they can."""
    if case.dtype not in ("bfloat16", "float32"):
        return f"they compute in float32, and x is {case.dtype}"
    # A remainder of the depth would read past the head's rows and add them to the sums.
    if case.embed > DEPTHS[0] and not _depth(case.embed, DEPTHS[0]):
        return f"embed {case.embed} is more than {DEPTHS[0]} and not a multiple of {LANES}"
    return None


def candidates(case: CrossEntropyCase) -> list[dict[str, int]]:
    """Rows of a block whose gradients of logits are kept, and tiles of rows x columns x depth."""
    default = _tile(case.device.kind)
    tiles = [
        {"tile_rows": r, "tile_columns": c, "depth": DEPTHS[0]}
        for r, c in ((1024, 1024), (512, 1024), (1024, 2048), (512, 2048))
    ]
    tiles.remove(default)
    return [{"rows": sizes(case)[0], **tile} for tile in (default, *tiles)]


def forward(inputs: Inputs, call: Call) -> Scores:
    """(nll [M], log Z [M])."""
    columns = _call(_statistics, inputs, (inputs.targets_M,), call)
    return combine(Statistics(*(a[:, 0] for a in columns)), call.axes)


def forward_with_gradients(inputs: Inputs, call: Call) -> tuple[Scores, Gradients]:
    """`forward` and the gradients of the total."""
    # Two passes over the tiles: a gradient needs log
    # Z of the whole row, known only after the first.
    nll_M, log_z_M = forward(inputs, call)

    def step(x_RD: jax.Array, *per_row: jax.Array) -> tuple[None, jax.Array]:
        # For one block of rows at a time, so that gradients of all logits never exist at once.
        return None, _call(_gradient, inputs._replace(x_MD=x_RD), per_row, call, x_RD.dtype)[0]

    per_row = inputs.targets_M, inputs.weights_M.astype(jnp.float32), log_z_M
    return (nll_M, log_z_M), map_rows_with_gradients(step, inputs, call, per_row)[1]


run = differentiable(forward, forward_with_gradients)


def _depth(embed: int, most: int) -> int:
    """The largest depth of a tile: all of a small embed, else the largest that divides it; 0 if
    none does."""
    if embed <= most:
        return embed
    return next((depth for depth in DEPTHS if depth <= most and embed % depth == 0), 0)


def _tile(kind: str) -> dict[str, int]:
    return {
        "tile_rows": 1024,
        "tile_columns": 2048 if kind.startswith(LARGE_TILES) else 1024,
        "depth": DEPTHS[0],
    }


def _call(
    kernel: Any, inputs: Inputs, per_row: tuple[jax.Array, ...], call: Call, dtype: Any = None
) -> Any:
    """Run `kernel` over tiles, the depth innermost, then the columns -> an [M, V] of `dtype`, or
    the statistics, three float32 [M, 1], where that is None."""
    x_MD, head_DV, bias_V, *_ = inputs
    m, d = x_MD.shape
    v = head_DV.shape[1]
    tile = {**_tile(Device.here().kind), **call.blocks}
    # Tiles are no larger than the problem, in whole sublanes (8) and lanes (128).
    rows = min(tile["tile_rows"], m + -m % 8)
    columns = min(tile["tile_columns"], v + -v % LANES)
    depth = _depth(d, tile["depth"])
    assert depth, "supports() refuses this"
    # Zeros for no bias, so that there is one kernel.
    bias_1V = (jnp.zeros((v,)) if bias_V is None else bias_V).astype(jnp.float32)[None]
    per_row_spec = pl.BlockSpec((rows, 1), lambda i, j, k: (i, 0))
    # The sum of a tile over the depth.
    scratch = [pltpu.VMEM((rows, columns), jnp.float32)]
    if dtype is None:
        outs = [jax.ShapeDtypeStruct((m, 1), jnp.float32)] * 3
        out_specs = [per_row_spec] * 3
        scratch += [pltpu.VMEM((rows, LANES), jnp.float32)] * 3
    else:
        outs = [jax.ShapeDtypeStruct((m, v), dtype)]
        out_specs = [pl.BlockSpec((rows, columns), lambda i, j, k: (i, j))]
    tiles_of_rows, tiles_of_columns = pl.cdiv(m, rows), pl.cdiv(v, columns)
    # Every tile of rows reads the whole head, every tile of columns all rows.
    moved = tiles_of_rows * d * v + m * d * tiles_of_columns + (0 if dtype is None else m * v)
    return pl.pallas_call(
        functools.partial(_tiles, kernel, request=call.request, vocab=v, per_row=len(per_row)),
        # The depth is innermost, so a tile of logits stays in scratch until its sum is complete.
        grid=(tiles_of_rows, tiles_of_columns, d // depth),
        out_shape=outs,
        out_specs=out_specs,
        interpret=call.interpret,
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, j, k: (i, k)),
            pl.BlockSpec((depth, columns), lambda i, j, k: (k, j)),
            pl.BlockSpec((1, columns), lambda i, j, k: (0, j)),
            *[per_row_spec] * len(per_row),
        ],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            # Tiles of rows are independent; statistics go
            # from column to column, sums along the depth.
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VECTOR_MEMORY,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * d * v,
            transcendentals=m * v,
            bytes_accessed=x_MD.dtype.itemsize * moved,
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

    # Assigned and not added to zeros, which would write the whole tile once more.
    @pl.when(k == 0)
    def _() -> None:
        acc_ref[...] = product

    @pl.when(k > 0)
    def _() -> None:
        acc_ref[...] += product

    height, width = acc_ref.shape
    # Pieces of 64 rows by 128 lanes: registers hold them, and not a tile of 1,024 x 1,024.
    rows = math.gcd(height, ROWS)

    def piece(at: Any, start: int) -> tuple[jax.Array, jax.Array]:
        """(columns, logits) [R, L]."""
        columns_RL = j * width + start + jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
        return columns_RL, apply_soft_cap(
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
    targets_R1 = refs[0][at]
    outs, lanes = refs[1:4], refs[5:]

    @pl.when(j == 0)
    def _() -> None:
        for ref, value in zip(lanes, (LOWEST, 0.0, 0.0), strict=True):
            ref[at] = jnp.full((targets_R1.shape[0], LANES), value, jnp.float32)

    running = Statistics(*(ref[at] for ref in lanes))
    for start in range(0, width, LANES):
        columns_RL, logits_RL = piece(start)
        running = running.with_logits(logits_RL, columns_RL == targets_R1, columns_RL < vocab)
    for ref, value in zip(lanes, running, strict=True):
        ref[at] = value
    # each tile of columns writes its statistics, and those of the last stay
    for ref, value in zip(outs, running.over_lanes(axis=1, keepdims=True), strict=True):
        ref[at] = value


def _gradient(
    piece: Any, at: Any, refs: Any, request: Request, vocab: int, width: int, j: Any
) -> None:
    """The gradient of a tile; columns past the last one are not written."""
    targets_R1, weights_R1, log_z_R1 = (ref[at] for ref in refs[:3])
    out_ref = refs[3]
    for start in range(0, width, LANES):
        columns_RL, logits_RL = piece(start)
        d_RL = gradient(logits_RL, columns_RL == targets_R1, weights_R1, log_z_R1, request)
        out_ref[at, pl.ds(start, LANES)] = d_RL.astype(out_ref.dtype)
