"""Attention on TPUs by jax's splash kernels (jax.experimental.pallas.ops.tpu.splash_attention), for
requests that they compute exactly.

Shapes: B batch  T query time  S key time  N heads  K kv heads  H head dim  V value head dim.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from maxstack.kernels.attention.request import AttentionCase, Inputs, Request

LANES = 128
BLOCKS = (512, 384, 256, 128)
NO_SINK = -1e30
"""A sink without a share, except for queries that see no key: without a sink, splash gives those
the mean of hidden values."""
MOST_POSITIONS = 1 << 32


def supports(case: AttentionCase) -> str | None:
    """Why splash cannot serve `case`; None if it can: bfloat16, lengths in multiples of 128, and
    some query sees some key."""
    request = case.request
    if case.dtype != "bfloat16":
        return f"rounds {case.dtype} to bfloat16 before it multiplies; use bfloat16"
    if case.numbered > 1:
        return "takes one number a position, and documents and chunks need two"
    if case.sinks and jax.__version_info__ < (0, 12):
        return f"jax {jax.__version__} rounds the gradient of sinks to bfloat16; 0.12 does not"
    if max(case.head_dim, case.value_dim) > 256:
        return f"head_dim {max(case.head_dim, case.value_dim)} is more than 256"
    for what, length in ("queries", case.queries), ("keys", case.keys):
        if not length or length % LANES:
            return f"{length} {what} are not a multiple of {LANES}"
    # Refused rather than slow: the tables are made while the step is traced.
    if case.queries * case.keys > MOST_POSITIONS:
        return (
            f"jax visits all of {case.queries} x {case.keys} positions while it traces; at most "
            f"{MOST_POSITIONS} are supported"
        )
    nearest, furthest = request.offset - case.keys + 1, request.offset + case.queries - 1
    window = request.window or case.queries + case.keys + abs(request.offset)
    if furthest < (0 if request.causal else 1 - window) or nearest >= window:
        return f"offset {request.offset} leaves no query a key"
    return None


def candidates(case: AttentionCase) -> list[dict[str, int]]:
    """Sizes to measure, the default first: whole blocks alone, each different from the default in
    one pass."""
    sizes = [_default(case.queries, case.keys)]
    for suffix, most in ("", 2048), ("_dkv", 1024):
        for q, k in itertools.product((256, 512, 1024), (512, 1024, 2048)):
            other = sizes[0] | {f"block_q{suffix}": q, f"block_k{suffix}": k}
            if k <= most and not case.queries % q and not case.keys % k and other != sizes[0]:
                sizes.append(other)
    return sizes


def run(
    inputs: Inputs,
    request: Request,
    blocks: Mapping[str, int] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] in q's dtype, as reference.run."""
    q_BTNH, k_BSKH, v_BSKV, sinks_N, same = inputs
    b, t, n, _ = q_BTNH.shape
    s = k_BSKH.shape[1]
    sizes = tuple((_default(t, s) | dict(blocks or {})).items())
    # Splash has no scale: q is multiplied by it, and requests that differ in it share their tables.
    attend = _kernel(dataclasses.replace(request, scale=1.0), n, t, s, sizes, interpret)
    # Rounded once, after the product in float32.
    scaled = (q_BTNH.astype(jnp.float32) * request.scale).astype(q_BTNH.dtype)
    q_BNTH, k_BKSH, v_BKSV = (x.swapaxes(1, 2) for x in (scaled, k_BSKH, v_BSKV))
    sinks = jnp.full(n, NO_SINK, jnp.float32)
    if sinks_N is not None:
        sinks = jnp.maximum(sinks_N.astype(jnp.float32), NO_SINK)
    numbers = None
    if same:
        # Numbers of one row stand for all, while vmap wants as many as rows.
        of_q, of_k = (jnp.broadcast_to(x, (b, x.shape[1])) for x in same[0])
        numbers = kernels.SegmentIds(of_q, of_k)
    # Splash attends in one row of a batch.
    rows = 0, 0, 0, numbers and 0, None
    return jax.vmap(attend, in_axes=rows)(q_BNTH, k_BKSH, v_BKSV, numbers, sinks).swapaxes(1, 2)


def _default(queries: int, keys: int) -> dict[str, int]:
    q = next(size for size in BLOCKS if queries % size == 0)
    k = next(size for size in BLOCKS if keys % size == 0)
    return {"block_q": q, "block_k": k, "block_q_dkv": q, "block_k_dkv": k}


@functools.lru_cache(maxsize=64)
def _kernel(
    request: Request,
    heads: int,
    t: int,
    s: int,
    sizes: tuple[tuple[str, int], ...],
    interpret: bool,
) -> Any:
    """Splash's kernels with their tables of tiles; cached, because making them takes long for long
    sequences."""
    mask: masks.Mask
    if request.window:
        before = request.window - 1
        after = 0 if request.causal else before
        mask = masks.LocalMask((t, s), (before, after), request.offset)
    elif request.causal:
        mask = masks.CausalMask((t, s), request.offset)
    else:
        mask = masks.FullMask((t, s))
    q, k, q_dkv, k_dkv = dict(sizes).values()
    # The tables outlive the trace that first asks for them, so they may not be tracers of it.
    with jax.ensure_compile_time_eval():
        made = kernels.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=kernels.BlockSizes(
                block_q=q,
                block_kv=k,
                block_q_dq=q,
                block_kv_dq=k,
                block_q_dkv=q_dkv,
                block_kv_dkv=k_dkv,
            ),
            attn_logits_soft_cap=request.soft_cap,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        # As numpy arrays the tables belong to no device, so any mesh may use them.
        return jax.tree.map(np.asarray, made)
