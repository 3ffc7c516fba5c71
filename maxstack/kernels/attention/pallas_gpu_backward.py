"""The gradients of pallas_gpu: scores are computed again from the saved log-sum-exp, once for
the queries and once for keys and values.

Two kernels, so that each adds up in registers and nothing is added across blocks (FlashAttention-2,
Dao 2023, arXiv:2307.08691, section 3.1.2). Shapes: B batch  T query time  S key time  N heads  K kv
heads  G heads / kv heads  H head dim  V value head dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maxstack.kernels import triton
from maxstack.kernels.attention import pallas_gpu_tiles as tiles
from maxstack.kernels.attention.pallas_gpu_tiles import Call, Grid
from maxstack.kernels.attention.request import Same

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
"""q, k, v, the gradient of the result, the base 2 log-sum-exp [B, N, T], and the sum of the result
times its gradient [B, N, T]."""


def of_queries(call: Call, inputs: Inputs, same: Same) -> jax.Array:
    """The gradient of the queries [B, T, N, H]."""
    by, q_BTNH = Grid(call, call.dq, same), inputs[0]
    return by.run(attention_dq, (2, 1), inputs, [(q_BTNH, by.queries(call.head_dim))])[0]


def attention_dq(
    by: Grid,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    do_ref: Any,
    log_ref: Any,
    spent_ref: Any,
    *refs: Any,
) -> None:
    """One block of queries of one head."""
    *pairs, spans_ref, dq_ref = refs
    call, size, everything = by.call, by.sizes, (slice(None),)
    _, at_q, rows = tiles.block(by.row(pl.program_id(0)), size.q, call.queries)
    q = tiles.read(q_ref, everything, call.head_dim, rows)
    do = tiles.read(do_ref, everything, call.value_dim, rows)
    log, spent, *own = (
        triton.load(ref.at[:], rows)[:, None] for ref in (log_ref, spent_ref, *pairs[::2])
    )

    def visit(masked: bool, at: Any, dq: Any) -> Any:
        keys, at_k, inside = tiles.block(at, size.k, call.keys, masked)
        k = tiles.read(k_ref, (keys,), call.head_dim, inside)
        bare = scores = tiles.score(call, tiles.across(call, q, k))
        if masked:
            scores = tiles.hide(
                call, bare, at_q[:, None], at_k[None, :], own, pairs[1::2], keys, inside
            )
        p = jnp.exp2(scores * call.steepness - log)
        v = tiles.read(v_ref, (keys,), call.value_dim, inside)
        grad = p * (tiles.across(call, do, v) - spent)
        return tiles.add(call, dq, tiles.slope(call, grad, bare).astype(k[0].dtype), k)

    dq = tiles.over(by.spans, spans_ref, visit, tiles.zeros(size.q, call.head_dim))
    tiles.write(dq_ref, [x * call.request.scale for x in dq], call.head_dim, rows)


def of_keys(call: Call, inputs: Inputs, same: Same) -> tuple[jax.Array, jax.Array]:
    """The gradients of keys [B, S, K, H] and values [B, S, K, V]."""
    by = Grid(call, call.dkv, same, by_keys=True)
    outs = [(inputs[1], by.keys(call.head_dim)), (inputs[2], by.keys(call.value_dim))]
    dk_BSKH, dv_BSKV = by.run(attention_dkv, (2, 2), inputs, outs)
    return dk_BSKH, dv_BSKV


def attention_dkv(
    by: Grid,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    do_ref: Any,
    log_ref: Any,
    spent_ref: Any,
    *refs: Any,
) -> None:
    """One block of keys and values of one kv head, and all heads that share it. Scores lie with the
    keys along the rows."""
    *pairs, spans_ref, dk_ref, dv_ref = refs
    call, size, everything = by.call, by.sizes, (slice(None),)
    _, at_k, rows = tiles.block(pl.program_id(0), size.k, call.keys)
    k = tiles.read(k_ref, everything, call.head_dim, rows)
    v = tiles.read(v_ref, everything, call.value_dim, rows)
    own = [triton.load(ref.at[:], rows)[:, None] for ref in pairs[1::2]]

    def visit(head: Any, masked: bool, at: Any, state: Any) -> Any:
        dk, dv = state
        queries, at_q, inside = tiles.block(at, size.q, call.queries, masked)
        q = tiles.read(q_ref, (queries, head), call.head_dim, inside)
        do = tiles.read(do_ref, (queries, head), call.value_dim, inside)
        log, spent = (
            triton.load(ref.at[head, queries], inside)[None, :] for ref in (log_ref, spent_ref)
        )
        bare = scores = tiles.score(call, tiles.across(call, k, q))
        if masked:
            scores = tiles.hide(
                call, bare, at_q[None, :], at_k[:, None], own, pairs[::2], queries, inside
            )
        p = jnp.exp2(scores * call.steepness - log)
        dv = tiles.add(call, dv, p.astype(do[0].dtype), do)
        grad = p * (tiles.across(call, v, do) - spent)
        return tiles.add(call, dk, tiles.slope(call, grad, bare).astype(q[0].dtype), q), dv

    def visit_head(head: Any, state: Any) -> Any:
        return tiles.over(by.spans, spans_ref, functools.partial(visit, head), state)

    zeros = tiles.zeros(size.k, call.head_dim), tiles.zeros(size.k, call.value_dim)
    dk, dv = jax.lax.fori_loop(0, call.groups, visit_head, zeros)
    tiles.write(dk_ref, [x * call.request.scale for x in dk], call.head_dim, rows)
    tiles.write(dv_ref, dv, call.value_dim, rows)
