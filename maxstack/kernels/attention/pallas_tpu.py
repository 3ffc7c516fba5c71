"""Attention on TPUs by our own Pallas kernels: the cases they serve, their sizes, and the gradient.

The heads that share a kv head share its fetched block. Tiles outside the bounds of positions are
not in the grid; of the others those whose numbers cannot meet are neither computed nor fetched, and
only tiles that are partly hidden are masked. Shapes: B batch  T query time  S
key time  N heads  K kv heads  H head dim  V value head dim.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from maxstack.kernels.attention import pallas_tpu_kernels as kernels
from maxstack.kernels.attention.pallas_tpu_tiles import (
    LANES,
    MOST_BLOCKS,
    MOST_TILES,
    Tiling,
    sizes_to_measure,
)
from maxstack.kernels.attention.request import (
    AttentionCase,
    Inputs,
    Request,
    Same,
    differentiable,
)
from maxstack.kernels.backends import Device

ROWS = 1024
"""Most rows of a tile: queries times heads."""


class Blocks(NamedTuple):
    """Queries and keys of a tile, for the result and the gradient of queries, then for the
    gradients of keys and values. Multiples of 128."""

    block_q: int
    block_k: int
    block_q_dkv: int
    block_k_dkv: int


def supports(case: AttentionCase) -> str | None:
    """Head dims up to 256, and tables of tiles that fit in scalar memory."""
    if case.dtype not in ("bfloat16", "float32"):
        return f"{case.dtype} is neither bfloat16 nor float32"
    if max(case.head_dim, case.value_dim) > 256:
        return f"head_dim {max(case.head_dim, case.value_dim)} is more than 256"
    if not case.queries or not case.keys:
        return "there are no queries or no keys"
    case = dataclasses.replace(case, request=case.request.narrowed)
    for tiling in _tilings(case, _default(case)):
        if max(tiling.counts) >= MOST_BLOCKS or len(tiling.tiles()) > MOST_TILES:
            return (
                f"{case.queries} queries and {case.keys} keys make more than {MOST_TILES} "
                "tiles; splitting the sequence over devices would do"
            )
    return None


def candidates(case: AttentionCase) -> list[dict[str, int]]:
    """Sizes worth measuring, the default first: blocks of keys no longer than the keys."""
    case = dataclasses.replace(case, request=case.request.narrowed)
    most = -(-case.keys // LANES) * LANES
    return sizes_to_measure(
        _default(case)._asdict(), lambda name, size: "_q" in name or size <= most
    )


def run(
    inputs: Inputs,
    request: Request,
    blocks: Mapping[str, int] | None = None,
    interpret: Any = False,
) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] in q's dtype, as reference.run; float32 is multiplied in
    full precision.

    `blocks`: any of the sizes of `Blocks`. `interpret`: True or pltpu.InterpretParams, to run on a
    CPU.
    """
    case = AttentionCase.of(inputs, request.narrowed, Device.here())
    sizes = _default(case)._replace(**blocks or {})
    assert all(size % LANES == 0 for size in sizes), sizes
    return _attention(inputs, (_tilings(case, sizes, inputs.same), interpret))


Call = tuple[tuple[Tiling, Tiling], Any]
"""Tiles by queries and by keys, and `interpret`."""


def _forward(inputs: Inputs, call: Call) -> tuple[jax.Array, jax.Array]:
    (tiling, _), interpret = call
    o, log = kernels.forward(tiling, tiling.arrays(inputs), inputs.sinks_N, inputs.same, interpret)
    log_BTN1 = tiling.by_time(log.swapaxes(3, 4), 1)
    return tiling.by_time(o, inputs.v_BSKV.shape[3]), log_BTN1[..., 0].swapaxes(1, 2)


def _backward(
    call: Call, inputs: Inputs, log_BNT: jax.Array, mean_BNT: jax.Array, do_BTNV: jax.Array
) -> list[jax.Array]:
    tilings, interpret = call
    by_queries, by_keys = (
        [
            *tiling.arrays(inputs),
            tiling.of_queries(do_BTNV),
            tiling.in_lanes(log_BNT),
            tiling.in_lanes(mean_BNT),
        ]
        for tiling in tilings
    )
    dq = kernels.of_queries(tilings[0], by_queries, inputs.same, interpret)
    dkv = kernels.of_keys(tilings[1], by_keys, inputs.same, interpret)
    return [
        tilings[0].by_time(dq, inputs.q_BTNH.shape[3]),
        *(
            x.swapaxes(1, 2)[:, : like.shape[1], :, : like.shape[3]]
            for x, like in zip(dkv, inputs[1:3], strict=True)
        ),
    ]


_attention = differentiable(_forward, _backward)


def _tilings(case: AttentionCase, sizes: Blocks, same: Same = ()) -> tuple[Tiling, Tiling]:
    """By blocks of queries, and by blocks of keys."""
    rows = max((x.shape[0] for pair in same for x in pair), default=1)

    def tiling(block_q: int, block_k: int, by_keys: bool) -> Tiling:
        block_q, block_k = (
            min(size, -(-length // LANES) * LANES)
            for size, length in ((block_q, case.queries), (block_k, case.keys))
        )
        most, groups = max(1, ROWS // block_q), case.groups
        heads = max(n for n in range(1, groups + 1) if groups % n == 0 and n <= most)
        shape = case.queries, case.keys, heads, groups // heads, block_q, block_k
        return Tiling(case.request, *shape, by_keys, len(same), rows)

    by_queries = tiling(sizes.block_q, sizes.block_k, False)
    return by_queries, tiling(sizes.block_q_dkv, sizes.block_k_dkv, True)


def _default(case: AttentionCase) -> Blocks:
    """Wide blocks of keys cost less for each score, and compute more hidden ones at the edge of the
    mask."""
    shared = max(n for n in (1, 2, 3, 4) if case.groups % n == 0)
    span = min(case.keys, case.request.window or case.keys)
    block_q, block_k = ROWS // shared // LANES * LANES, 512 if span <= 8192 else 1024
    return Blocks(block_q, block_k, block_q, block_k)
