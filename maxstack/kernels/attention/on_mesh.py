"""Attention where each device has its own rows and heads, and perhaps its own part of each
sequence.

Shapes: B batch  T query time  S key time  N heads  K kv heads  H head dim  V value head dim.
"""

import functools
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.kernels import sequences
from maxstack.kernels.attention.blockwise import Scoring
from maxstack.kernels.attention.request import Request, Same
from maxstack.kernels.attention.ring import ring_attention

Serve = Callable[..., jax.Array]
"""(q, k, v, sinks, same, request) -> o, of whole sequences on one device."""


def on_mesh(
    serve: Serve,
    check_ring: Callable[..., None],
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    same: Same,
    request: Request,
) -> jax.Array:
    """[B, T, N, V]. `check_ring` takes the arrays of one device of a ring, and raises ConfigError
    where that cannot be served."""
    batch, seq = sharding.here("batch seq")
    heads, keys, inner = sequences.head_axes(q_BTNH.shape[2], k_BSKH.shape[2])
    groups, axes = q_BTNH.shape[2] // k_BSKH.shape[2], sequences.split_over()
    assert not axes or not request.offset and q_BTNH.shape[1] == k_BSKH.shape[1], (
        "sequences are split for self-attention alone"
    )
    kinds: dict[str | None, Serve] = {
        None: serve,
        "ulysses": functools.partial(_by_heads, serve, axes),
        "ring": functools.partial(_in_ring, check_ring, axes),
    }
    split = kinds[sequences.kind()]

    def local(
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKV: jax.Array,
        sinks_N: jax.Array | None,
        same: Same,
    ) -> jax.Array:
        k_BSKH, v_BSKV = (
            sequences.of_queries(x, q_BTNH.shape[2], groups, inner) for x in (k_BSKH, v_BSKV)
        )
        return split(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, request)

    of_q, of_k = PartitionSpec(batch, seq, heads), PartitionSpec(batch, seq, keys)
    specs = of_q, of_k, of_k, PartitionSpec(heads), jax.tree.map(sequences.place, same)
    return sharding.per_device(local, specs, of_q)(q_BTNH, k_BSKH, v_BSKV, sinks_N, same)


def _by_heads(
    serve: Serve,
    axes: sequences.Axes,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    same: Same,
    request: Request,
) -> jax.Array:
    """Whole sequences of some heads; back to all heads of this device's part."""
    keys, values = (sequences.to_heads(sequences.repeated(x, axes), axes) for x in (k_BSKH, v_BSKV))
    sinks_N = None if sinks_N is None else sequences.share(sinks_N, axes)
    same = jax.tree.map(lambda x_BT: sequences.whole(x_BT, axes), same)
    return sequences.to_parts(
        serve(sequences.to_heads(q_BTNH, axes), keys, values, sinks_N, same, request), axes
    )


def _in_ring(
    check: Callable[..., None],
    axes: sequences.Axes,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    same: Same,
    request: Request,
) -> jax.Array:
    check(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, request)
    scoring = Scoring(request.scale, request.reach, request.soft_cap, request.causal)
    return ring_attention(
        q_BTNH, k_BSKH, v_BSKV, sinks_N, tuple(mine for mine, _ in same), scoring, axes
    )
