"""Attention: one meaning, the dense reference, and the backends that compute it.

Shapes: B batch  T query time  S key time  N heads  K kv heads  G heads / kv heads  H head dim  V
value head dim.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from maxstack import sharding
from maxstack.kernels import sequences
from maxstack.kernels.attention.on_mesh import on_mesh
from maxstack.kernels.attention.request import Case, Request, Same
from maxstack.kernels.backends import Backend, Device, Op


def _whole_sequences(case: Case) -> str | None:
    return (
        "keys and values go around a ring of devices; mesh.context_kind: ulysses would "
        "give it whole sequences"
        if case.ring
        else None
    )


OP = Op(
    "attention",
    (
        Backend("cudnn", "maxstack.kernels.attention.cudnn", ("gpu",), _whole_sequences),
        Backend("pallas_gpu", "maxstack.kernels.attention.pallas_gpu", ("gpu",), _whole_sequences),
        Backend("splash", "maxstack.kernels.attention.splash", ("tpu",), _whole_sequences),
        Backend("pallas_tpu", "maxstack.kernels.attention.pallas_tpu", ("tpu",), _whole_sequences),
        Backend("tokamax", "maxstack.kernels.attention.tokamax", ("gpu", "tpu"), _whole_sequences),
        Backend("hopper", "maxstack.kernels.attention.hopper", ("gpu",), _whole_sequences),
        Backend("blockwise", "maxstack.kernels.attention.blockwise"),
        Backend("reference", "maxstack.kernels.attention.reference", refuses=_whole_sequences),
    ),
)
"""Libraries that others have measured stand before our own kernels, which no hardware has run
yet."""


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    segments_BT: jax.Array | None,
    request: Request,
    backend: str = "auto",
    sinks_N: jax.Array | None = None,
    positions_BT: jax.Array | None = None,
    keys: tuple[jax.Array | None, jax.Array | None] | None = None,
) -> jax.Array:
    """softmax(scores) v with float32 softmax -> [B, T, N, V] in q's dtype; a query sees what
    `Request` says, of its own segment.

    `sinks_N` is one more score for each head, neither scaled nor capped, that takes its share of
    the softmax and gives nothing. Chunks are counted by `positions_BT`, places within the document;
    None: by the place since the segment number last changed. `keys` are segments and positions [B,
    S] of the keys where they are others than the queries'. ConfigError if a backend is asked for
    that cannot serve.
    """
    same = _same(segments_BT, positions_BT, q_BTNH.shape[1], keys, request)
    assert same or not request.chunk
    with jax.named_scope("attention"):
        serve = functools.partial(_serve, backend)
        if sharding.current() is None:
            return serve(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, request)
        return on_mesh(
            serve,
            functools.partial(_check_ring, backend),
            q_BTNH,
            k_BSKH,
            v_BSKV,
            sinks_N,
            same,
            request,
        )


def _same(
    segments_BT: jax.Array | None,
    positions_BT: jax.Array | None,
    queries: int,
    keys: tuple[jax.Array | None, jax.Array | None] | None,
    request: Request,
) -> Same:
    """Segments and chunks of queries and keys."""
    key_segments, key_positions = keys or (segments_BT, positions_BT)
    same: Same = (
        () if segments_BT is None or key_segments is None else ((segments_BT, key_segments),)
    )
    if not request.chunk:
        return same
    if positions_BT is None or key_positions is None:
        assert not sequences.split_over(), "parts of a sequence cannot count its positions"
        assert keys is None and not request.offset, "keys of their own come with positions"
        positions_BT = key_positions = _places(segments_BT, queries)
    return *same, (positions_BT // request.chunk, key_positions // request.chunk)


def _case(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, same: Same, request: Request
) -> Case:
    return Case(
        request,
        q.shape[1],
        k.shape[1],
        q.shape[2],
        k.shape[2],
        q.shape[3],
        v.shape[3],
        q.dtype.name,
        len(same) > bool(request.chunk),
        sinks is not None,
        Device.here(),
    )


def _serve(
    backend: str,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    same: Same,
    request: Request,
) -> jax.Array:
    """One device's attention by the backend that is chosen for it."""
    case = _case(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, request)
    choice = OP.choose(case, backend)
    return OP[choice.backend].run(
        q_BTNH, k_BSKH, v_BSKV, sinks_N, same, request, blocks=choice.blocks
    )


def _check_ring(backend: str, *call: Any) -> None:
    chosen = OP.choose(dataclasses.replace(_case(*call), ring=True), backend).backend
    assert chosen == "blockwise", "ring.py is made of it"


def _places(segments_BT: jax.Array | None, t: int) -> jax.Array:
    """int32 [B or 1, T]: places since the segment number last changed."""
    index = jnp.arange(t)[None]
    if segments_BT is None:
        return index
    new_BT = jnp.concatenate(
        [jnp.ones((segments_BT.shape[0], 1), bool), segments_BT[:, 1:] != segments_BT[:, :-1]],
        axis=1,
    )
    return index - jax.lax.cummax(jnp.where(new_BT, index, 0), axis=1)
