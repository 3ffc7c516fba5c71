"""Attention where each device has its own rows and heads, and perhaps its own part of each
sequence.

Shapes: B batch  T query time  S key time  N heads  K kv heads  H head dim  V value head dim.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.kernels import sequences
from maxstack.kernels.attention.request import Inputs, Request


def on_mesh(serve: Callable[..., jax.Array], request: Request, inputs: Inputs) -> jax.Array:
    """[B, T, N, V]. `serve(ring, inputs)` is the attention of one device, over the mesh axes `ring`
    where keys and values go around them."""
    q_BTNH, k_BSKH, *_ = inputs
    batch, seq = sharding.here("batch seq")
    heads, keys, inner = sequences.head_axes(q_BTNH.shape[2], k_BSKH.shape[2])
    groups, axes = q_BTNH.shape[2] // k_BSKH.shape[2], sequences.sequence_axes()
    assert not axes or not request.offset and q_BTNH.shape[1] == k_BSKH.shape[1], (
        "sequences are split for self-attention alone"
    )

    ulysses = sequences.context_kind() == "ulysses"

    def local(inputs: Inputs) -> jax.Array:
        q_BTNH, k_BSKH, v_BSKV, sinks_N, same = inputs
        # Where the mesh splits query heads further than
        # kv heads, a device takes those of its queries.
        k_BSKH, v_BSKV = (
            sequences.kv_heads_of_queries(x, q_BTNH.shape[2], groups, inner)
            for x in (k_BSKH, v_BSKV)
        )
        if not ulysses:
            return serve(axes, Inputs(q_BTNH, k_BSKH, v_BSKV, sinks_N, same))
        # An all-to-all cuts heads into equal parts, and there may be fewer kv heads than devices.
        repeated = [sequences.repeat_kv_heads(x, axes) for x in (k_BSKH, v_BSKV)]
        q_BTNH, k_BSKH, v_BSKV = (sequences.to_heads(x, axes) for x in (q_BTNH, *repeated))
        sinks_N = None if sinks_N is None else sequences.slice_heads(sinks_N, axes)
        # Each device has whole sequences of its heads, so it needs the numbers of all positions.
        same = jax.tree.map(lambda x_BT: sequences.gather_sequences(x_BT, axes), same)
        whole = Inputs(q_BTNH, k_BSKH, v_BSKV, sinks_N, same)
        return sequences.to_parts(serve((), whole), axes)

    of_q, of_k = PartitionSpec(batch, seq, heads), PartitionSpec(batch, seq, keys)
    numbers = jax.tree.map(sequences.spec_of, inputs.same)
    specs = Inputs._make([of_q, of_k, of_k, PartitionSpec(heads), numbers])
    return sharding.per_device(local, (specs,), of_q)(inputs)
