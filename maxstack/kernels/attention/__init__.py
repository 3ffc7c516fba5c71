"""Attention: its definition (reference.py), and the backends that compute it.

On a mesh each device attends over its own rows and heads (on_mesh.py); where sequences are split,
keys and values go around a ring (ring.py) or all-to-alls give each device whole sequences of some
heads. What XLA would have to guess runs in `sharding.per_device`.

Shapes: B batch  T query time  S key time  N heads  K kv heads  G heads / kv heads  H head dim  V
value head dim.
"""

import functools

import jax
import jax.numpy as jnp

from maxstack import sharding
from maxstack.kernels import sequences
from maxstack.kernels.attention.on_mesh import on_mesh
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request, Same
from maxstack.kernels.attention.ring import ring_attention
from maxstack.kernels.backends import ALL, Backend, Device, Op


def _whole_sequences(case: AttentionCase) -> str | None:
    if not case.ring:
        return None
    return (
        "keys and values go around a ring of devices; mesh.context_kind: ulysses would "
        "give it whole sequences"
    )


OP = Op(
    "attention",
    tuple(
        Backend(
            name, f"{__name__}.{name}", platforms, None if name == "blockwise" else _whole_sequences
        )
        for name, platforms in {
            "cudnn": ("gpu",),
            "hopper": ("gpu",),
            "splash": ("tpu",),
            "blockwise": ALL,
            "reference": ALL,
        }.items()
    ),
)
"""Preferred first: a library whose speed others have published before our own kernel, which no
hardware has run yet."""


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
    """softmax(scores) v with float32 softmax -> [B, T, N, V] in q's dtype; a query sees the keys of
    its own segment that `Request` lets it see.

    `sinks_N` is one more score for each head, neither scaled nor capped, that takes its share of
    the softmax and gives nothing. Chunks are counted by `positions_BT`, positions within the
    document; None: counted since the segment number last changed. `keys` are segments and positions
    [B, S] of the keys where they differ from the queries'. ConfigError if a backend is asked for
    that cannot serve.
    """
    request = request.with_narrow_window
    # Documents and chunks are both equal numbers, so a backend needs to know one kind of mask.
    same = _match_numbers(segments_BT, positions_BT, q_BTNH.shape[1], keys, request)
    inputs = Inputs(q_BTNH, k_BSKH, v_BSKV, sinks_N, same)
    with jax.named_scope("attention"):
        serve = functools.partial(_serve, backend, request)
        if sharding.current() is None:
            return serve((), inputs)
        return on_mesh(serve, request, inputs)


def _match_numbers(
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
        # Counting from the start of a device's part would begin a new chunk there.
        assert not sequences.sequence_axes(), "parts of a sequence cannot count its positions"
        assert keys is None and not request.offset, "keys of their own come with positions"
        positions_BT = key_positions = _positions(segments_BT, queries)
    return *same, (positions_BT // request.chunk, key_positions // request.chunk)


def _serve(backend: str, request: Request, ring: sequences.Axes, inputs: Inputs) -> jax.Array:
    """One device's attention by the backend chosen for it; `ring`: mesh axes over which keys and
    values go around, if any."""
    # Chosen in here, where shapes are those of one device.
    choice = OP.choose(AttentionCase.of(inputs, request, Device.here(), bool(ring)), backend)
    if ring:
        assert choice.backend == "blockwise", "ring.py is made of it"
        own = tuple(numbers for numbers, _ in inputs.same)
        return ring_attention(inputs._replace(same=own), request, ring)
    return OP[choice.backend].run(inputs, request, blocks=choice.blocks)


def _positions(segments_BT: jax.Array | None, t: int) -> jax.Array:
    """int32 [B or 1, T]: positions since the segment number last changed."""
    index = jnp.arange(t)[None]
    if segments_BT is None:
        return index
    # The first position begins a document whatever its number: it is compared with another one.
    new_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1] - 1) != 0
    return index - jax.lax.cummax(jnp.where(new_BT, index, 0), axis=1)
