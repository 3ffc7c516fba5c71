"""The gradients of pallas_gpu: scores are made again from the saved log-sum-exp, once for the
queries and once for keys and values.

Two kernels, so that each adds up in registers and nothing is added across blocks (FlashAttention-2,
Dao 2023, arXiv:2307.08691, section 3.1.2). Shapes: B batch  T query time  S key time  N heads  K kv
heads  G heads / kv heads  H head dim  V value head dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maxstack.kernels.attention import pallas_gpu_tiles as tiles
from maxstack.kernels.attention.pallas_gpu_tiles import ByQuery, Call
from maxstack.kernels.attention.request import Same

Given = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
"""q, k, v, the gradient of the result, the base 2 log-sum-exp [B, N, T], and the sum of the result
times its gradient [B, N, T]."""


def of_queries(call: Call, given: Given, same: Same) -> jax.Array:
    """The gradient of the queries [B, T, N, H]."""
    q_BTNH, (h, v), spans = (
        given[0],
        (call.head_dim, call.value_dim),
        tiles.of_queries(call, call.dq, same),
    )
    by = ByQuery(call, call.dq, spans)
    specs = by.queries(h), by.keys(h), by.keys(v), by.queries(v), by.logs(), by.logs()
    [dq_BTNH] = tiles.kernel(
        call,
        functools.partial(attention_dq, by),
        by.sizes,
        spans.visits,
        (2, 1),
        grid=(by.count, call.heads, q_BTNH.shape[0]),
        given=[*zip(given, specs, strict=True), *by.masks(same)],
        wanted=[(jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype), by.queries(h))],
    )
    return dq_BTNH


def attention_dq(
    by: ByQuery,
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
    call, size = by.call, by.sizes
    at_q = by.row(pl.program_id(0)) * size.q + jnp.arange(size.q)
    row_inside = at_q < call.queries if call.queries % size.q else None
    everything = (slice(None),)
    q, do = (
        tiles.read(q_ref, everything, call.head_dim, row_inside),
        tiles.read(do_ref, everything, call.value_dim, row_inside),
    )
    log, spent, *mine = (
        tiles.read_row(ref, everything, row_inside)[:, None]
        for ref in (log_ref, spent_ref, *pairs[::2])
    )

    def visit(masked: bool, at: Any, dq: Any) -> Any:
        keys = pl.ds(at * size.k, size.k)
        at_k = at * size.k + jnp.arange(size.k)
        inside = at_k < call.keys if masked and call.keys % size.k else None
        k = tiles.read(k_ref, (keys,), call.head_dim, inside)
        bare = found = tiles.score(call, tiles.across(call, q, k))
        if masked:
            numbers = [
                (x, tiles.read_row(ref, (keys,), inside)[None, :])
                for x, ref in zip(mine, pairs[1::2], strict=True)
            ]
            found = tiles.hide(
                call,
                found,
                at_q[:, None],
                at_k[None, :],
                numbers,
                [] if inside is None else [inside[None, :]],
            )
        p = jnp.exp2(found * call.steepness - log)
        grad = p * (
            tiles.across(call, do, tiles.read(v_ref, (keys,), call.value_dim, inside)) - spent
        )
        return tiles.add(call, dq, tiles.slope(call, grad, bare).astype(k[0].dtype), k)

    dq = tiles.over(by.spans, spans_ref, visit, tiles.zeros(size.q, call.head_dim))
    tiles.write(dq_ref, [x * call.request.scale for x in dq], call.head_dim, row_inside)


def of_keys(call: Call, given: Given, same: Same) -> tuple[jax.Array, jax.Array]:
    """The gradients of keys [B, S, K, H] and values [B, S, K, V]."""
    (b, s, kv, h), v, size, groups = given[1].shape, call.value_dim, call.dkv, call.groups
    spans, columns = tiles.of_keys(call, size, same), tiles.blocks(call.queries, size.q) * size.q

    def queries(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, columns, groups, tiles.padded(dim)), lambda j, n, b: (b, 0, n, 0)
        )

    def keys(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, size.k, None, tiles.padded(dim)), lambda j, n, b: (b, j, n, 0))

    logs = pl.BlockSpec((None, groups, columns), lambda j, n, b: (b, n, 0))
    arrays = [*zip(given, (queries(h), keys(h), keys(v), queries(v), logs, logs), strict=True)]
    for mine, theirs in same:
        arrays += [
            (mine, pl.BlockSpec((None, columns), lambda j, n, b, x=mine: (tiles.of_row(x, b), 0))),
            (
                theirs,
                pl.BlockSpec((None, size.k), lambda j, n, b, x=theirs: (tiles.of_row(x, b), j)),
            ),
        ]
    arrays.append(
        (
            spans.table,
            pl.BlockSpec((None, None, 4), lambda j, n, b: (tiles.of_row(spans.table, b), j, 0)),
        )
    )
    wanted = [(jax.ShapeDtypeStruct((b, s, kv, dim), given[1].dtype), keys(dim)) for dim in (h, v)]
    dk_BSKH, dv_BSKV = tiles.kernel(
        call,
        functools.partial(attention_dkv, call, spans),
        size,
        spans.visits,
        (2, 2),
        grid=(tiles.blocks(s, size.k), kv, b),
        given=arrays,
        wanted=wanted,
    )
    return dk_BSKH, dv_BSKV


def attention_dkv(
    call: Call,
    spans: tiles.Spans,
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
    size = call.dkv
    at_k = pl.program_id(0) * size.k + jnp.arange(size.k)
    row_inside = at_k < call.keys if call.keys % size.k else None
    everything = (slice(None),)
    k, v = (
        tiles.read(k_ref, everything, call.head_dim, row_inside),
        tiles.read(v_ref, everything, call.value_dim, row_inside),
    )
    theirs = [tiles.read_row(ref, everything, row_inside)[:, None] for ref in pairs[1::2]]

    def visit(head: Any, masked: bool, at: Any, state: Any) -> Any:
        dk, dv = state
        queries = pl.ds(at * size.q, size.q)
        at_q = at * size.q + jnp.arange(size.q)
        inside = at_q < call.queries if masked and call.queries % size.q else None
        q, do = (
            tiles.read(ref, (queries, head), dim, inside)
            for ref, dim in ((q_ref, call.head_dim), (do_ref, call.value_dim))
        )
        log, spent = (
            tiles.read_row(ref, (head, queries), inside)[None, :] for ref in (log_ref, spent_ref)
        )
        bare = found = tiles.score(call, tiles.across(call, k, q))
        if masked:
            numbers = [
                (tiles.read_row(ref, (queries,), inside)[None, :], x)
                for x, ref in zip(theirs, pairs[::2], strict=True)
            ]
            found = tiles.hide(
                call,
                found,
                at_q[None, :],
                at_k[:, None],
                numbers,
                [] if inside is None else [inside[None, :]],
            )
        p = jnp.exp2(found * call.steepness - log)
        dv = tiles.add(call, dv, p.astype(do[0].dtype), do)
        grad = p * (tiles.across(call, v, do) - spent)
        return tiles.add(call, dk, tiles.slope(call, grad, bare).astype(q[0].dtype), q), dv

    state: Any = tiles.zeros(size.k, call.head_dim), tiles.zeros(size.k, call.value_dim)
    dk, dv = jax.lax.fori_loop(
        0,
        call.groups,
        lambda head, state: tiles.over(spans, spans_ref, functools.partial(visit, head), state),
        state,
    )
    tiles.write(dk_ref, [x * call.request.scale for x in dk], call.head_dim, row_inside)
    tiles.write(dv_ref, dv, call.value_dim, row_inside)
