"""Attention where each device has its own rows and heads, and perhaps its own part of each
sequence.

Shapes: B batch  T query time  S key time  N heads  K kv heads  H head dim  V value head dim.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.kernels import sequences
from maxstack.kernels.attention.request import Request, Same


def on_mesh(
    serve: Callable[..., jax.Array],
    request: Request,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    same: Same,
) -> jax.Array:
    """[B, T, N, V]. `serve(ring, q, k, v, sinks, same)` is the attention of one device, over the
    mesh axes `ring` where keys and values go around them."""
    batch, seq = sharding.here("batch seq")
    heads, keys, inner = sequences.head_axes(q_BTNH.shape[2], k_BSKH.shape[2])
    groups, axes = q_BTNH.shape[2] // k_BSKH.shape[2], sequences.split_over()
    assert not axes or not request.offset and q_BTNH.shape[1] == k_BSKH.shape[1], (
        "sequences are split for self-attention alone"
    )

    ulysses = sequences.kind() == "ulysses"

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
        if not ulysses:
            return serve(axes, q_BTNH, k_BSKH, v_BSKV, sinks_N, same)
        q_BTNH, k_BSKH, v_BSKV = (
            sequences.to_heads(x, axes)
            for x in (q_BTNH, *(sequences.repeated(x, axes) for x in (k_BSKH, v_BSKV)))
        )
        sinks_N = None if sinks_N is None else sequences.share(sinks_N, axes)
        same = jax.tree.map(lambda x_BT: sequences.whole(x_BT, axes), same)
        return sequences.to_parts(serve((), q_BTNH, k_BSKH, v_BSKV, sinks_N, same), axes)

    of_q, of_k = PartitionSpec(batch, seq, heads), PartitionSpec(batch, seq, keys)
    specs = of_q, of_k, of_k, PartitionSpec(heads), jax.tree.map(sequences.place, same)
    return sharding.per_device(local, specs, of_q)(q_BTNH, k_BSKH, v_BSKV, sinks_N, same)
