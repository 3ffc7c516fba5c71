"""Paged attention in XLA's operations, a block of keys at a time: memory is linear in the rows.

Shapes as in the package, and B keys of a block, G query heads of a kv head.
"""

import jax
import jax.numpy as jnp

from maxstack.kernels.attention.request import Request
from maxstack.kernels.backends import product_dtype
from maxstack.kernels.paged_attention import Inputs, read_pages, split_keys_values

BLOCK = 128
"""Keys of a block. Blocks lie at fixed positions of a request and one that a row does not see
changes nothing in it, so a row's bits do not depend on how many blocks others need."""
LOWEST = -1e30
Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""The largest score [..], the sum of exponentials above it [..], and of values weighed by them
[.., V] (Milakov & Gimelshein 2018, arXiv:1805.02867)."""


def run(inputs: Inputs, request: Request, value_dim: int | None) -> jax.Array:
    """Online softmax over the blocks from the first to the last that any row sees."""
    q_RNH, pages_PLCH, tables_RW, positions_R, sinks_N, kv_heads, _ = inputs
    rows, heads, size = q_RNH.shape
    length = pages_PLCH.shape[1]
    pages = max(1, BLOCK // length)
    block, dtype = pages * length, product_dtype(q_RNH.dtype)
    # The last block may reach past the table; page 0 is masked there.
    tables_RW = jnp.pad(tables_RW, ((0, 0), (0, -tables_RW.shape[1] % pages)))
    real_R, first_R = positions_R >= 0, first_visible(request, positions_R)
    last = jnp.max(positions_R // block)
    # Unused rows see nothing, so they may not lengthen the walk.
    first = jnp.min(jnp.where(real_R, first_R // block, last))
    sample = jax.eval_shape(lambda: split_keys_values(pages_PLCH[0], value_dim, kv_heads))
    kv, value_size = sample[1].shape[1:]
    q_RKGH = q_RNH.astype(dtype).reshape(rows, kv, heads // kv, size)

    def step(j: jax.Array, carry: Softmax) -> Softmax:
        ids = jax.lax.dynamic_slice_in_dim(tables_RW, j * pages, pages, axis=1)
        kept = read_pages(inputs, ids, dtype).reshape(rows, block, *pages_PLCH.shape[2:])
        # All rows read a block each, whether of their own
        # request or of none: memory stays linear in rows.
        k_RBKH, v_RBKV = split_keys_values(kept, value_dim, kv_heads)
        scores = jnp.einsum("RKGH,RBKH->RKGB", q_RKGH, k_RBKH, preferred_element_type=jnp.float32)
        scores = apply_soft_cap(scores * request.scale, request)
        at_B = j * block + jnp.arange(block)
        seen = (at_B <= positions_R[:, None]) & (at_B >= first_R[:, None])
        return update_softmax(carry, scores, seen[:, None, None], v_RBKV, "RKGB,RBKV->RKGV")

    groups = (rows, kv, heads // kv)
    start = init_softmax(
        groups, value_size, sinks_N if sinks_N is None else sinks_N.reshape(groups[1:])
    )
    o_RKGV = finish_softmax(jax.lax.fori_loop(first, last + 1, step, start))
    o_RKGV = jnp.where(real_R[:, None, None, None], o_RKGV, 0.0)
    return o_RKGV.reshape(rows, heads, value_size).astype(q_RNH.dtype)


def first_visible(request: Request, positions: jax.Array) -> jax.Array:
    """The earliest position that each row sees."""
    first = jnp.zeros_like(positions)
    if request.window:
        first = jnp.maximum(first, positions - request.window + 1)
    if request.chunk:
        first = jnp.maximum(first, positions - jax.lax.rem(positions, request.chunk))
    return first


def apply_soft_cap(scores: jax.Array, request: Request) -> jax.Array:
    """Scores with the soft cap, if there is one."""
    cap = request.soft_cap
    return cap * jnp.tanh(scores / cap) if cap else scores


def init_softmax(groups: tuple[int, ...], value_size: int, sinks: jax.Array | None) -> Softmax:
    """Begin an online softmax for each of `groups`, before any key; `sinks` are broadcast to
    them."""
    none = jnp.zeros((*groups, value_size))
    if sinks is None:
        return jnp.full(groups, LOWEST), jnp.zeros(groups), none
    # A sink is a key with this score and no value: total begins at exp(0) = 1.
    return jnp.broadcast_to(sinks.astype(jnp.float32), groups), jnp.ones(groups), none


def update_softmax(
    softmax: Softmax, scores: jax.Array, seen: jax.Array, v: jax.Array, equation: str
) -> Softmax:
    """Update an online softmax by a block of keys with these scores [.., B], of which some are
    seen; `equation` weighs the values by their shares."""
    most, total, o = softmax
    higher = jnp.maximum(most, jnp.where(seen, scores, LOWEST).max(-1))
    # A block without a seen key changes no bit of a row: its shares are 0 and `left` is exactly 1.
    share = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0.0)
    left = jnp.exp(most - higher)
    added = jnp.einsum(equation, share.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return higher, total * left + share.sum(-1), o * left[..., None] + added


def finish_softmax(softmax: Softmax) -> jax.Array:
    """Divide by the sum -> the weighed values; zeros where no key was seen."""
    _, total, o = softmax
    # Divided once, at the end. jax's ragged kernel divides after each block, which rounds, so a
    # row's bits would depend on later rows of its request.
    return o / jnp.where(total == 0, 1.0, total)[..., None]
