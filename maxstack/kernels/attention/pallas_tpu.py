"""Attention on TPUs by our own Pallas kernels: the cases they serve, their sizes, and the gradient.

The heads that share a kv head share its fetched block. Tiles outside the bounds of positions are
not in the grid; of the others those whose numbers cannot meet are neither computed nor fetched, and
only tiles that are partly hidden are masked. The backward pass recomputes the scores from the saved
log-sum-exp (FlashAttention, Dao et al. 2022, arXiv:2205.14135). Shapes: B batch  T query time  S
key time  N heads  K kv heads  H head dim  V value head dim.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxstack.kernels.attention import pallas_tpu_kernels as kernels
from maxstack.kernels.attention.pallas_tpu_tiles import LANES, MOST_BLOCKS, MOST_TILES, Tiling
from maxstack.kernels.attention.request import AttentionCase, Request, Same

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
    groups, sizes = case.heads // case.kv_heads, _default(case)
    for tiling in _tilings(case.queries, case.keys, groups, case.request, sizes):
        if max(tiling.counts) >= MOST_BLOCKS or len(tiling.tiles()) > MOST_TILES:
            return (
                f"{case.queries} queries and {case.keys} keys make more than {MOST_TILES} "
                "tiles; splitting the sequence over devices would do"
            )
    return None


def candidates(case: AttentionCase) -> list[dict[str, int]]:
    """Sizes worth measuring, the default first."""
    default, most = _default(case), -(-case.keys // LANES) * LANES
    sizes = [default]
    for q in (256, 512, 1024):
        sizes += [default._replace(block_q=q, block_k=k) for k in (512, 1024, 2048) if k <= most]
        sizes += [default._replace(block_q_dkv=q, block_k_dkv=k) for k in (512, 1024) if k <= most]
    return [each._asdict() for each in dict.fromkeys(sizes)]


def run(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    same: Same,
    request: Request,
    blocks: Mapping[str, int] | None = None,
    interpret: Any = False,
) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] in q's dtype, as reference.run; float32 is multiplied in
    full precision.

    `blocks`: any of the sizes of `Blocks`. `interpret`: True or pltpu.InterpretParams, to run on a
    CPU.
    """
    groups, keys = q_BTNH.shape[2] // k_BSKH.shape[2], k_BSKH.shape[1]
    sizes = _sizes(groups, min(keys, request.reach or keys))._replace(**blocks or {})
    assert all(size % LANES == 0 for size in sizes), sizes
    tilings = _tilings(q_BTNH.shape[1], keys, groups, request, sizes, same)
    return _attention(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, tilings, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, tilings, interpret):
    return _forward(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, tilings, interpret)[0]


def _forward(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, tilings, interpret):
    tiling, _ = tilings
    arrays = tiling.of_queries(q_BTNH), tiling.of_keys(k_BSKH), tiling.of_keys(v_BSKV)
    o, log = kernels.forward(tiling, *arrays, sinks_N, same, interpret)
    o_BTNV = tiling.by_time(o, v_BSKV.shape[3])
    log_BTN = tiling.by_time(log.swapaxes(3, 4), 1)[..., 0]
    return o_BTNV, (q_BTNH, k_BSKH, v_BSKV, sinks_N, same, o_BTNV, log_BTN)


def _backward(tilings, interpret, saved, do_BTNV):
    q_BTNH, k_BSKH, v_BSKV, sinks_N, same, o_BTNV, log_BTN = saved
    mean_BTN = (do_BTNV.astype(jnp.float32) * o_BTNV.astype(jnp.float32)).sum(axis=-1)
    by_queries, by_keys = (
        kernels.Inputs(
            tiling.of_queries(q_BTNH),
            tiling.of_keys(k_BSKH),
            tiling.of_keys(v_BSKV),
            tiling.of_queries(do_BTNV),
            tiling.in_lanes(log_BTN),
            tiling.in_lanes(mean_BTN),
        )
        for tiling in tilings
    )
    dq = kernels.of_queries(tilings[0], by_queries, same, interpret)
    dkv = kernels.of_keys(tilings[1], by_keys, same, interpret)
    dk_BSKH, dv_BSKV = (
        x.transpose(0, 2, 1, 3)[:, : like.shape[1], :, : like.shape[3]]
        for x, like in zip(dkv, (k_BSKH, v_BSKV), strict=True)
    )
    dsinks_N = None
    if sinks_N is not None:
        share_BTN = jnp.exp(sinks_N.astype(jnp.float32) - log_BTN)
        dsinks_N = -(share_BTN * mean_BTN).sum(axis=(0, 1)).astype(sinks_N.dtype)
    return tilings[0].by_time(dq, q_BTNH.shape[3]), dk_BSKH, dv_BSKV, dsinks_N, None


_attention.defvjp(_forward, _backward)


def _tilings(
    queries: int, keys: int, groups: int, request: Request, sizes: Blocks, same: Same = ()
) -> tuple[Tiling, Tiling]:
    """By blocks of queries, and by blocks of keys."""
    rows = max((x.shape[0] for pair in same for x in pair), default=1)

    def tiling(block_q: int, block_k: int, by_keys: bool) -> Tiling:
        block_q, block_k = (
            min(size, -(-length // LANES) * LANES)
            for size, length in ((block_q, queries), (block_k, keys))
        )
        heads = max(
            n for n in range(1, groups + 1) if groups % n == 0 and n * block_q <= max(ROWS, block_q)
        )
        return Tiling(
            request,
            queries,
            keys,
            heads,
            groups // heads,
            block_q,
            block_k,
            by_keys,
            len(same),
            rows,
        )

    return (
        tiling(sizes.block_q, sizes.block_k, False),
        tiling(sizes.block_q_dkv, sizes.block_k_dkv, True),
    )


def _default(case: AttentionCase) -> Blocks:
    return _sizes(case.heads // case.kv_heads, min(case.keys, case.request.reach or case.keys))


def _sizes(groups: int, span: int) -> Blocks:
    """Wide blocks of keys cost less for each score, and compute more hidden ones at the edge of the
    mask."""
    shared = max(n for n in (1, 2, 3, 4) if groups % n == 0)
    block_q, block_k = ROWS // shared // LANES * LANES, 512 if span <= 8192 else 1024
    return Blocks(block_q, block_k, block_q, block_k)
