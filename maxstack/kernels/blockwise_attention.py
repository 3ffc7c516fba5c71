"""Attention a block of queries at a time, in plain XLA: masked blocks are skipped and no score outlives its block.

The backward pass recomputes the scores from the saved log-sum-exp (FlashAttention, Dao et al. 2022, arXiv:2205.14135).
Shapes: B batch  T query time  S key time  N heads  K kv heads  G heads / kv heads  H head dim  V value head dim  Q rows of a block, G x queries
  R blocks of a run.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30
BLOCK, MOST_RUNS = 128, 16
_cut, _dot = jax.lax.dynamic_slice_in_dim, functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def blockwise_attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, sinks_N: jax.Array | None, same: tuple[jax.Array, ...],
                        scale: float, window: int | None, soft_cap: float | None) -> jax.Array:
    """Causal grouped-query attention -> [B, T, N, V] in q's dtype; see kernels/attention.py for the meaning of the arguments.

    No score array has more than BLOCK rows a head, whatever T.
    """
    return _forward(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, scale, window, soft_cap)[0]


class Run(NamedTuple):
    """Blocks of `rows` queries and the `keys` keys that they can see; `starts` and `firsts` say where those of each block begin."""

    starts: tuple[int, ...]
    firsts: tuple[int, ...]
    rows: int
    keys: int


def _runs(t: int, window: int | None) -> Iterator[Run]:
    """All queries in order. Runs are unrolled, and their blocks looped over: at most MOST_RUNS and a remainder."""
    size = BLOCK * -(-t // (BLOCK * MOST_RUNS))
    for start in range(0, t, size):
        end = min(start + size, t)
        whole = end - (end - start) % BLOCK
        for begin, stop, rows in ((start, whole, BLOCK), (whole, end, end - whole)):
            if begin < stop:
                keys = min(stop, rows + window - 1) if window else stop
                starts = tuple(range(begin, stop, rows))
                yield Run(starts, tuple(max(0, at + rows - keys) for at in starts), rows, keys)


def _over(run: Run, step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, *given: jax.Array) -> tuple[Any, Any]:
    """`step` over the blocks of a run as a scan: (carry, results stacked)."""
    if len(run.starts) == 1:
        carry, out = step(carry, (run.starts[0], run.firsts[0], *(x[0] for x in given)))
        return carry, jax.tree.map(lambda x: x[None], out)
    return jax.lax.scan(step, carry, (jnp.asarray(run.starts), jnp.asarray(run.firsts), *given))


def _by_head(x_BTNH: jax.Array, kv: int) -> jax.Array:
    b, t, n, h = x_BTNH.shape
    return x_BTNH.reshape(b, t, kv, n // kv, h).transpose(0, 2, 3, 1, 4)


def _rows(x_BKGTH: jax.Array, start: int | jax.Array, rows: int) -> jax.Array:
    b, k, g, _, h = x_BKGTH.shape
    return _cut(x_BKGTH, start, rows, 3).reshape(b, k, g * rows, h)


def _by_time(runs: list[jax.Array], groups: int) -> jax.Array:
    """[R, B, K, Q, H] of each run -> [B, T, N, H]."""
    _, b, k, _, h = runs[0].shape
    parts = [x.reshape(x.shape[0], b, k, groups, -1, h).transpose(1, 2, 3, 0, 4, 5).reshape(b, k, groups, -1, h) for x in runs]
    return jnp.concatenate(parts, axis=3).transpose(0, 3, 1, 2, 4).reshape(b, -1, k * groups, h)


def _scores(q_BKQH: jax.Array, k_BKSH: jax.Array, same: tuple[jax.Array, ...], start: int | jax.Array, first: int | jax.Array, rows: int,
            window: int | None, soft_cap: float | None) -> tuple[jax.Array, jax.Array]:
    """Masked scores, and the scores before the mask."""
    keys = k_BKSH.shape[2]
    raw = _dot("BKQH,BKSH->BKQS", q_BKQH, k_BKSH)
    if soft_cap:
        raw = soft_cap * jnp.tanh(raw / soft_cap)
    distance = (start + jnp.arange(rows))[:, None] - (first + jnp.arange(keys))[None, :]
    seen = (distance >= 0)[None]
    if window:
        seen = seen & (distance < window)[None]
    for numbers in same:
        seen = seen & (_cut(numbers, start, rows, 1)[:, :, None] == _cut(numbers, first, keys, 1)[:, None, :])
    return jnp.where(jnp.tile(seen, (1, q_BKQH.shape[2] // rows, 1))[:, None], raw, MASKED), raw


def _forward(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, scale, window, soft_cap):
    kv = k_BSKH.shape[2]
    q_BKGTH = _by_head(q_BTNH * jnp.asarray(scale, q_BTNH.dtype), kv)
    k_BKSH, v_BKSV = k_BSKH.transpose(0, 2, 1, 3), v_BSKV.transpose(0, 2, 1, 3)
    groups, outs, logs = q_BKGTH.shape[2], [], []
    for run in _runs(q_BTNH.shape[1], window):
        sinks = None if sinks_N is None else jnp.repeat(sinks_N.astype(jnp.float32).reshape(1, kv, groups, 1), run.rows, axis=2)

        def step(_, at, run=run, sinks=sinks):
            start, first = at
            s_BKQS, _ = _scores(_rows(q_BKGTH, start, run.rows), _cut(k_BKSH, first, run.keys, 2), same, start, first, run.rows, window, soft_cap)
            top = s_BKQS.max(axis=-1, keepdims=True)
            top = top if sinks is None else jnp.maximum(top, sinks)
            p_BKQS = jnp.exp(s_BKQS - top)
            total = p_BKQS.sum(axis=-1, keepdims=True)
            total = total if sinks is None else total + jnp.exp(sinks - top)
            o_BKQV = _dot("BKQS,BKSV->BKQV", p_BKQS.astype(v_BSKV.dtype), _cut(v_BKSV, first, run.keys, 2))
            return None, ((o_BKQV / total).astype(q_BTNH.dtype), top + jnp.log(total))

        _, (out, log) = _over(run, step, None)
        outs.append(out)
        logs.append(log)
    o_BTNV = _by_time(outs, groups)
    return o_BTNV, (q_BTNH, k_BSKH, v_BSKV, sinks_N, same, o_BTNV, logs)


def _backward(scale, window, soft_cap, saved, do_BTNV):
    q_BTNH, k_BSKH, v_BSKV, sinks_N, same, o_BTNV, logs = saved
    kv, dtype = k_BSKH.shape[2], q_BTNH.dtype
    q_BKGTH = _by_head(q_BTNH * jnp.asarray(scale, dtype), kv)
    do_BKGTV, o_BKGTV = _by_head(do_BTNV, kv), _by_head(o_BTNV, kv)
    k_BKSH, v_BKSV = k_BSKH.transpose(0, 2, 1, 3), v_BSKV.transpose(0, 2, 1, 3)
    groups, dqs, grads = q_BKGTH.shape[2], [], (jnp.zeros(k_BKSH.shape, jnp.float32), jnp.zeros(v_BKSV.shape, jnp.float32))
    for run, logs_R in zip(_runs(q_BTNH.shape[1], window), logs, strict=True):

        def step(grads, at, run=run):
            start, first, log = at
            dk, dv = grads
            q, do, o = (_rows(x, start, run.rows) for x in (q_BKGTH, do_BKGTV, o_BKGTV))
            k, v = _cut(k_BKSH, first, run.keys, 2), _cut(v_BKSV, first, run.keys, 2)
            s_BKQS, raw = _scores(q, k, same, start, first, run.rows, window, soft_cap)
            p_BKQS = jnp.exp(s_BKQS - log)
            dv = _add(dv, first, _dot("BKQS,BKQV->BKSV", p_BKQS.astype(dtype), do))
            mean = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(axis=-1, keepdims=True)
            ds = p_BKQS * (_dot("BKQV,BKSV->BKQS", do, v) - mean)
            if soft_cap:
                ds = ds * (1 - jnp.square(raw / soft_cap))
            ds = ds.astype(dtype)
            dk = _add(dk, first, _dot("BKQS,BKQH->BKSH", ds, q))
            return (dk, dv), (_dot("BKQS,BKSH->BKQH", ds, k) * scale).astype(dtype)

        grads, dq = _over(run, step, grads, logs_R)
        dqs.append(dq)
    dk, dv = (x.transpose(0, 2, 1, 3).astype(dtype) for x in grads)
    return _by_time(dqs, groups), dk, dv, _of_sinks(sinks_N, _by_time(logs, groups), o_BTNV, do_BTNV), None


def _add(x_BKSH: jax.Array, first: int | jax.Array, part: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x_BKSH, _cut(x_BKSH, first, part.shape[2], 2) + part, first, 2)


def _of_sinks(sinks_N: jax.Array | None, logs_BTN1: jax.Array, o_BTNV: jax.Array, do_BTNV: jax.Array) -> jax.Array | None:
    """A sink gives nothing, so its gradient is minus its share of the softmax times what the others give."""
    if sinks_N is None:
        return None
    given_BTN = (do_BTNV.astype(jnp.float32) * o_BTNV.astype(jnp.float32)).sum(axis=-1)
    share_BTN = jnp.exp(sinks_N.astype(jnp.float32) - logs_BTN1[..., 0])
    return -(share_BTN * given_BTN).sum(axis=(0, 1)).astype(sinks_N.dtype)


blockwise_attention.defvjp(_forward, _backward)
