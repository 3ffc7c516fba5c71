"""Causal attention: one meaning, the dense reference, and the backends that compute it.

Shapes: B batch  T query time  S key time  N heads  K kv heads  G heads / kv heads  H head dim  V value head dim.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.kernels import sequences
from maxstack.kernels.blockwise_attention import Scoring, blockwise_attention
from maxstack.kernels.ring_attention import ring_attention

MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Request:
    """What a layer asks: scores are q.k * scale, soft-capped, and a query sees the last `window` positions of its own document and `chunk`."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    chunk: int | None = None


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, segments_BT: jax.Array | None, request: Request,
              backend: Literal["auto", "reference", "blockwise"] = "auto", sinks_N: jax.Array | None = None,
              positions_BT: jax.Array | None = None) -> jax.Array:
    """softmax(scores) v with float32 softmax -> [B, T, N, V] in q's dtype; a position sees itself and earlier ones of the same segment.

    `sinks_N` is one more score for each head, neither scaled nor capped, that takes its share of the softmax and gives nothing. Chunks are
    counted by `positions_BT`, places within the document; None: by the place since the segment number last changed.
    """
    same = () if segments_BT is None else (segments_BT,)
    if request.chunk:
        if positions_BT is None:
            assert not sequences.split_over(), "parts of a sequence cannot count its positions"
            positions_BT = _places(segments_BT, q_BTNH.shape[1])
        same = (*same, positions_BT // request.chunk)
    with jax.named_scope("attention"):
        if sharding.current() is None:
            return BACKENDS[choose(backend)](q_BTNH, k_BSKH, v_BSKV, sinks_N, same, request)
        return _on_own_part(choose(backend), q_BTNH, k_BSKH, v_BSKV, sinks_N, same, request)


def choose(backend: Literal["auto", "reference", "blockwise"]) -> str:
    """The backend that `auto` stands for; blockwise serves every request, in less time and memory than the reference."""
    return "blockwise" if backend == "auto" else backend


def reference(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, sinks_N: jax.Array | None, same: tuple[jax.Array, ...],
              request: Request) -> jax.Array:
    """The definition, with the whole score matrix in memory. A query sees keys with equal numbers in every [B or 1, T] of `same`."""
    b, t, n, h = q_BTNH.shape
    kv = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(b, t, kv, n // kv, h)
    s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * request.scale
    if request.soft_cap:
        s_BKGTS = request.soft_cap * jnp.tanh(s_BKGTS / request.soft_cap)
    distance_TS = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
    seen = ((distance_TS >= 0) & (distance_TS < (request.window or t)))[None, None, None]
    for numbers_BT in same:
        seen = seen & (numbers_BT[:, :, None] == numbers_BT[:, None, :])[:, None, None]
    s_BKGTS = jnp.where(seen, s_BKGTS, MASKED)
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.astype(jnp.float32).reshape(kv, n // kv, 1, 1), (*s_BKGTS.shape[:-1], 1))
        s_BKGTS = jnp.concatenate([s_BKGTS, sinks], axis=-1)
    p_BKGTS = jax.nn.softmax(s_BKGTS, axis=-1)[..., :t]
    o_BTKGV = jnp.einsum("BKGTS,BSKV->BTKGV", p_BKGTS.astype(v_BSKV.dtype), v_BSKV, preferred_element_type=jnp.float32)
    return o_BTKGV.reshape(b, t, n, -1).astype(q_BTNH.dtype)


def _blockwise(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, sinks_N: jax.Array | None, same: tuple[jax.Array, ...],
               request: Request) -> jax.Array:
    return blockwise_attention(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, _scoring(request))


def _scoring(request: Request) -> Scoring:
    reach = min((limit for limit in (request.window, request.chunk) if limit), default=None)
    return Scoring(request.scale, reach, request.soft_cap)


def _on_own_part(backend: str, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, sinks_N: jax.Array | None, same: tuple[jax.Array, ...],
                 request: Request) -> jax.Array:
    """Each device attends with its own rows and heads."""
    batch, seq = sharding.here("batch seq")
    heads, keys, inner = sequences.head_axes(q_BTNH.shape[2], k_BSKH.shape[2])
    groups, serve = q_BTNH.shape[2] // k_BSKH.shape[2], functools.partial(KINDS[sequences.kind()], backend, sequences.split_over(), request)

    def local(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, sinks_N: jax.Array | None, same: tuple[jax.Array, ...]) -> jax.Array:
        k_BSKH, v_BSKV = (sequences.of_queries(x, q_BTNH.shape[2], groups, inner) for x in (k_BSKH, v_BSKV))
        return serve(q_BTNH, k_BSKH, v_BSKV, sinks_N, same)

    of_q, of_k = PartitionSpec(batch, seq, heads), PartitionSpec(batch, seq, keys)
    specs = of_q, of_k, of_k, PartitionSpec(heads), tuple(sequences.place(x) for x in same)
    return sharding.per_device(local, specs, of_q)(q_BTNH, k_BSKH, v_BSKV, sinks_N, same)


def _whole(backend: str, axes: sequences.Axes, request: Request, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, sinks_N: jax.Array | None,
           same: tuple[jax.Array, ...]) -> jax.Array:
    return BACKENDS[backend](q_BTNH, k_BSKH, v_BSKV, sinks_N, same, request)


def _by_heads(backend: str, axes: sequences.Axes, request: Request, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array,
              sinks_N: jax.Array | None, same: tuple[jax.Array, ...]) -> jax.Array:
    """Whole sequences of some heads; back to all heads of this device's part."""
    keys, values = (sequences.to_heads(sequences.repeated(x, axes), axes) for x in (k_BSKH, v_BSKV))
    sinks_N = None if sinks_N is None else sequences.share(sinks_N, axes)
    same = tuple(sequences.whole(x, axes) for x in same)
    return sequences.to_parts(BACKENDS[backend](sequences.to_heads(q_BTNH, axes), keys, values, sinks_N, same, request), axes)


def _in_ring(backend: str, axes: sequences.Axes, request: Request, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array,
             sinks_N: jax.Array | None, same: tuple[jax.Array, ...]) -> jax.Array:
    """Around the ring; the reference gathers whole sequences on every device instead."""
    if backend == "blockwise":
        return ring_attention(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, _scoring(request), axes)
    order = np.argsort(sequences.zigzag(jax.lax.axis_size(axes)))

    def whole(x: jax.Array) -> jax.Array:
        chunks = sequences.whole(x, axes).reshape(x.shape[0], len(order), -1, *x.shape[2:])
        return chunks[:, order].reshape(x.shape[0], -1, *x.shape[2:])

    o_BTNV = BACKENDS[backend](whole(q_BTNH), whole(k_BSKH), whole(v_BSKV), sinks_N, tuple(whole(x) for x in same), request)
    chunks, device = jnp.stack(jnp.split(o_BTNV, len(order), axis=1)), jax.lax.axis_index(axes)
    return jnp.concatenate([chunks[device], chunks[len(order) - 1 - device]], axis=1)


KINDS = {None: _whole, "ulysses": _by_heads, "ring": _in_ring}


def _places(segments_BT: jax.Array | None, t: int) -> jax.Array:
    """int32 [B or 1, T]: places since the segment number last changed."""
    index = jnp.arange(t)[None]
    if segments_BT is None:
        return index
    new_BT = jnp.concatenate([jnp.ones((segments_BT.shape[0], 1), bool), segments_BT[:, 1:] != segments_BT[:, :-1]], axis=1)
    return index - jax.lax.cummax(jnp.where(new_BT, index, 0), axis=1)


BACKENDS = {"reference": reference, "blockwise": _blockwise}
