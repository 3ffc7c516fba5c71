"""Gated delta rule: projections, a short convolution, decay and write strength around the
recurrence, and a gated norm after it.

Shapes: B batch  T time  D embed  K key heads  N value heads  H key dim  V value dim  W width of the
convolution.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.kernels import sequences
from maxstack.kernels.gated_delta import gated_delta
from maxstack.kernels.gated_delta.reference import step
from maxstack.layers.cache import LayerCache, Rows
from maxstack.layers.context import Context
from maxstack.layers.layer import Layer
from maxstack.layers.weight import project
from maxstack.schema.mixers import GatedDeltaConfig
from maxstack.sharding import constrain

NORM_EPS = 1e-6
TAILS = "query", "key", "value"
Arrays = tuple[Array, ...]


class GatedDelta(Layer):
    """Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464, section 3.4).

    Initial heads forget at rates of median 0.06 a position, one standard deviation being a factor
    of 5.5: the spread of the usual product of a time step log-uniform in [0.001, 0.1] and a rate
    uniform in [0, 16].
    """

    cfg: GatedDeltaConfig

    def __call__(self, x_BTD: Array, context: Context) -> Array:
        """Gated read of each position from the state of its document: [B, T, D]."""

        def projected(matrix: nnx.Param, axis: str, name: str) -> Array:
            out = constrain(project(x_BTD, matrix), f"batch seq {axis} head_dim")
            return checkpoint_name(out, name)

        q_BTKH = projected(self.query, "kv_heads", "query")
        k_BTKH = projected(self.key, "kv_heads", "key")
        v_BTNV = projected(self.value, "heads", "value")
        beta_BTN = jax.nn.sigmoid(project(x_BTD, self.beta).astype(jnp.float32))
        step_BTN = jax.nn.softplus(
            project(x_BTD, self.decay).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)
        )
        # The logarithm of the factor, at most 0: the kernel
        # adds logarithms instead of multiplying factors.
        decay_BTN = -jnp.exp(self.a_log[...].astype(jnp.float32)) * step_BTN
        of_keys = q_BTKH, k_BTKH, self.conv_query[...], self.conv_key[...]
        of_values = v_BTNV, decay_BTN, beta_BTN, self.conv_value[...]
        if context.cache is None:
            o_BTNV = _on_own_heads(self.cfg, of_keys, of_values, context.segments_BT)
        else:
            o_BTNV = _step_rows(self.cfg, of_keys, of_values, context.cache)
        o_BTNV = checkpoint_name(constrain(o_BTNV, "batch seq heads head_dim"), "context")
        gate_BTNV = constrain(project(x_BTD, self.gate), "batch seq heads head_dim")
        o_BTNV = self.norm(o_BTNV) * jax.nn.silu(gate_BTNV.astype(jnp.float32))
        o_BTNV = o_BTNV.astype(x_BTD.dtype)
        return checkpoint_name(project(o_BTNV, self.out), "mixer_out")


def _convolve_and_recur(
    cfg: GatedDeltaConfig, of_keys: Arrays, of_values: Arrays, segments_BT: Array | None
) -> Array:
    """Convolutions and the recurrence over whole sequences: [B, T, N, V]."""
    q_BTKH, k_BTKH, *taps = of_keys
    v_BTNV, decay_BTN, beta_BTN, taps_v = of_values

    def convolved(x_BTKH: Array, taps_WKH: Array) -> Array:
        # Documents do not see each other through the convolution either.
        return jax.nn.silu(convolve(x_BTKH, taps_WKH, segments_BT))

    # Unit keys keep the state bounded: a write replaces what the key held instead of adding to it.
    q = _unit(convolved(q_BTKH, taps[0])) * cfg.key_dim**-0.5
    k, v = _unit(convolved(k_BTKH, taps[1])), convolved(v_BTNV, taps_v)
    q, k, v = (x.astype(v_BTNV.dtype) for x in (q, k, v))
    return gated_delta(q, k, v, decay_BTN, beta_BTN, segments_BT, cfg.chunk, cfg.backend)


def _on_own_heads(
    cfg: GatedDeltaConfig, of_keys: Arrays, of_values: Arrays, segments_BT: Array | None
) -> Array:
    """`_convolve_and_recur` on each device for its own rows and heads; where sequences are split,
    for whole sequences of some of its heads."""
    if sharding.current() is None:
        return _convolve_and_recur(cfg, of_keys, of_values, segments_BT)
    batch, seq = sharding.here("batch seq")
    heads, kv, inner = sequences.head_axes(cfg.value_heads, cfg.key_heads)
    axes = sequences.sequence_axes()
    assert sequences.context_kind() != "ring", "a recurrence needs whole sequences, in order"

    def local(of_keys: Arrays, of_values: Arrays, segments_BT: Array | None) -> Array:
        queries, groups = of_values[0].shape[2], cfg.value_heads // cfg.key_heads
        of_keys = tuple(
            sequences.kv_heads_of_queries(x, queries, groups, inner, x.ndim - 2) for x in of_keys
        )
        if not axes:
            return _convolve_and_recur(cfg, of_keys, of_values, segments_BT)
        # An all-to-all cuts heads into equal parts, and there may be fewer key heads than devices.
        of_keys = tuple(sequences.repeat_kv_heads(x, axes, x.ndim - 2) for x in of_keys)

        # Taps are weights, of which a device has all heads
        # of its queries: they are cut, not exchanged.
        def of_own_heads(x: Array, taps: bool) -> Array:
            return sequences.slice_heads(x, axes, 1) if taps else sequences.to_heads(x, axes)

        of_keys = tuple(map(of_own_heads, of_keys, (False, False, True, True)))
        of_values = tuple(map(of_own_heads, of_values, (False, False, False, True)))
        if segments_BT is not None:
            segments_BT = sequences.gather_sequences(segments_BT, axes)
        return sequences.to_parts(_convolve_and_recur(cfg, of_keys, of_values, segments_BT), axes)

    own, shared = PartitionSpec(batch, seq, heads), PartitionSpec(batch, seq, kv)
    taps, taps_v = PartitionSpec(None, kv), PartitionSpec(None, heads)
    documents = PartitionSpec() if segments_BT is None else sequences.spec_of(segments_BT)
    specs = (shared, shared, taps, taps), (own, own, own, taps_v), documents
    return sharding.per_device(local, specs, own)(of_keys, of_values, segments_BT)


def _step_rows(
    cfg: GatedDeltaConfig, of_keys: Arrays, of_values: Arrays, cache: LayerCache
) -> Array:
    """Convolutions and the recurrence of rows [R, 1, ..], one row after the other, from the states
    of their requests: [R, 1, N, V]. A row's result does not depend on how its request was cut into
    steps."""
    q_R1KH, k_R1KH, *taps = of_keys
    v_R1NV, decay_R1N, beta_R1N, taps_v = of_values

    def local(
        state: dict[str, Array], x: Arrays, taps: Arrays, rows: Rows
    ) -> tuple[Array, dict[str, Array]]:
        q_RKH, k_RKH, v_RNV, decay_RN, beta_RN = x
        groups = v_RNV.shape[1] // q_RKH.shape[1]

        def row(r: Array, carry: tuple[dict[str, Array], Array]) -> Any:
            state, o_RNV = carry
            # A slot still holds the state of the request that had it before.
            slot, begins = rows.slots_R[r], rows.positions_R[r] == 0
            mixed, state = {}, dict(state)
            for name, x_RKH, taps_WKH in zip(TAILS, (q_RKH, k_RKH, v_RNV), taps, strict=True):
                # The last W - 1 inputs of the request, which
                # are what the convolution needs of its past.
                last_WKH = jnp.where(begins, 0, state[f"last_{name}"][slot])
                seen_WKH = jnp.concatenate([last_WKH, x_RKH[r][None].astype(last_WKH.dtype)])
                # The oldest input leaves the window.
                state[f"last_{name}"] = state[f"last_{name}"].at[slot].set(seen_WKH[1:])
                product_WKH = seen_WKH.astype(jnp.float32) * taps_WKH.astype(jnp.float32)
                # A sum of products and no matmul, so that the bits do not depend on other rows.
                mixed[name] = jax.nn.silu(product_WKH.sum(axis=0))
            q_KH = _unit(mixed["query"]) * cfg.key_dim**-0.5
            q_NH, k_NH = (
                # Rounded as in training, where the kernel gets activations in this type.
                jnp.repeat(x.astype(v_RNV.dtype).astype(jnp.float32), groups, axis=0)
                for x in (q_KH, _unit(mixed["key"]))
            )
            s_NHV = jnp.where(begins, 0, state["state"][slot])
            v_NV = mixed["value"].astype(v_RNV.dtype)
            s_NHV, read_NV = step(s_NHV, q_NH, k_NH, v_NV, decay_RN[r], beta_RN[r])
            state["state"] = state["state"].at[slot].set(s_NHV)
            return state, o_RNV.at[r].set(read_NV.astype(o_RNV.dtype))

        # Unused rows come last, so the loop ends at the last one that is used.
        numbers_R = jnp.arange(1, rows.positions_R.shape[0] + 1)
        end = jnp.where(rows.positions_R >= 0, numbers_R, 0).max()
        state, o_RNV = jax.lax.fori_loop(0, end, row, (state, jnp.zeros_like(v_RNV)))
        return o_RNV, state

    x = tuple(x[:, 0] for x in (q_R1KH, k_R1KH, v_R1NV, decay_R1N, beta_R1N))
    run, weights = local, (*taps, taps_v)
    if sharding.current() is not None:
        batch = sharding.here("batch")[0]
        heads, kv, inner = sequences.head_axes(cfg.value_heads, cfg.key_heads)
        assert not inner, "mesh rules split key heads and value heads alike"
        of_head, of_kv = PartitionSpec(batch, heads), PartitionSpec(batch, kv)
        kept = {
            "state": of_head,
            **{f"last_{name}": PartitionSpec(batch, None, kv) for name in TAILS[:2]},
            "last_value": PartitionSpec(batch, None, heads),
        }
        specs = (
            kept,
            (of_kv, of_kv, of_head, of_head, of_head),
            (PartitionSpec(None, kv), PartitionSpec(None, kv), PartitionSpec(None, heads)),
            PartitionSpec(batch),
        )
        run = sharding.per_device(local, specs, (of_head, kept))
    o_RNV, cache.arrays = run(cache.arrays, x, weights, cache.rows)
    return o_RNV[:, None]


def convolve(x_BTKH: Array, taps_WKH: Array, segments_BT: Array | None) -> Array:
    """The causal convolution of each channel with its own taps, the last for the position itself:
    float32 [B, T, K, H].

    Positions before the document of `segments_BT` count as zeros; None: one document a row.
    """
    width, length = taps_WKH.shape[0], x_BTKH.shape[1]
    x_BTKH, taps_WKH = x_BTKH.astype(jnp.float32), taps_WKH.astype(jnp.float32)
    # W shifted products, not a convolution, since a document's edge masks each distance by itself.
    y_BTKH = x_BTKH * taps_WKH[-1]
    for back in range(1, min(width, length)):
        earlier_BTKH = jnp.pad(x_BTKH, ((0, 0), (back, 0), (0, 0), (0, 0)))[:, :length]
        if segments_BT is not None:
            same_BT = jnp.pad(segments_BT[:, back:] == segments_BT[:, :-back], ((0, 0), (back, 0)))
            earlier_BTKH = jnp.where(same_BT[:, :, None, None], earlier_BTKH, 0.0)
        y_BTKH = y_BTKH + earlier_BTKH * taps_WKH[-1 - back]
    return y_BTKH


def _unit(x_BTKH: Array) -> Array:
    return x_BTKH * jax.lax.rsqrt(jnp.sum(x_BTKH * x_BTKH, axis=-1, keepdims=True) + NORM_EPS)
