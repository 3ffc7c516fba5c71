"""Grouped-query attention: projections, norms, RoPE and gate around the attention kernel.

Shapes: B batch  T query time  S key time  D embed  N heads  K kv heads  H head dim.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from maxstack.kernels.attention import attention
from maxstack.kernels.attention.request import Request
from maxstack.layers.context import Context
from maxstack.layers.layer import Layer
from maxstack.layers.norm import Norm
from maxstack.layers.rope import rotate
from maxstack.layers.weight import project
from maxstack.schema.mixers import AttentionConfig, TemperatureConfig
from maxstack.sharding import constrain


class Attention(Layer):
    """Self-attention (Vaswani 2017; grouped queries: Ainslie 2023, arXiv:2305.13245) with the parts
    that its configuration has."""

    cfg: AttentionConfig

    def __call__(self, x_BTD: Array, context: Context) -> Array:
        """Attention of each position over the positions of its document that it sees: [B, T, D]."""
        cfg = self.cfg
        q_BTNH = _project_heads(x_BTD, self.query, self.query_bias, "heads")
        q_BTNH = self._norm_and_rotate(q_BTNH, self.query_norm, context)
        # After the norm, which would undo it.
        if cfg.temperature:
            factor_BT = temperature(cfg.temperature, context.positions_BT)
            # On the queries, so that the kernel knows one scale for all positions.
            q_BTNH = (q_BTNH * factor_BT[:, :, None, None]).astype(x_BTD.dtype)
        q_BTNH = checkpoint_name(constrain(q_BTNH, "batch seq heads head_dim"), "query")
        sinks_N = None if self.sinks is None else self.sinks[...]
        if context.cache is not None:
            o_BTNH = self._attend_cached(q_BTNH, x_BTD, context, sinks_N)
        else:
            if cfg.share_kv is None:
                k_BSKH, v_BSKH = self.keys_values(x_BTD, context)
            else:
                # Keys and values of an earlier block, which this one has no weights for.
                k_BSKH, v_BSKH = context.kept[cfg.share_kv]
            o_BTNH = attention(
                q_BTNH,
                k_BSKH,
                v_BSKH,
                context.segments_BT,
                request(cfg),
                cfg.backend,
                sinks_N,
                context.positions_BT,
            )
        o_BTNH = checkpoint_name(constrain(o_BTNH, "batch seq heads head_dim"), "context")
        if self.gate is not None:
            o_BTNH = o_BTNH * jax.nn.sigmoid(_project_heads(x_BTD, self.gate, None, "heads"))
        return checkpoint_name(project(o_BTNH, self.out, self.out_bias), "mixer_out")

    def _attend_cached(
        self, q_BTNH: Array, x_BTD: Array, context: Context, sinks_N: Array | None
    ) -> Array:
        """Attention of rows [R, 1, ..] over their requests' pages."""
        assert context.cache is not None
        new_RCH = None
        if self.cfg.share_kv is None:
            # [R, 1, K, 2, H]: keys and values in turn, as pages hold them.
            both = jnp.stack(self.keys_values(x_BTD, context), axis=3)
            new_RCH = both.reshape(both.shape[0], -1, self.cfg.head_dim)
        o_RNH = context.cache.attend(q_BTNH[:, 0], new_RCH, request(self.cfg), sinks_N=sinks_N)
        return o_RNH[:, None]

    def keys_values(self, x_BTD: Array, context: Context) -> tuple[Array, Array]:
        """Normalised and rotated keys, and normalised values: each [B, S, K, H]."""
        assert self.key is not None, "a block with share_kv has no keys of its own"
        # Without a value projection the raw key is the value, before norm and rotation.
        raw_BSKH = v_BSKH = _project_heads(x_BTD, self.key, self.key_bias, "kv_heads")
        if self.value is not None:
            v_BSKH = _project_heads(x_BTD, self.value, self.value_bias, "kv_heads")
        if self.value_norm is not None:
            v_BSKH = self.value_norm(v_BSKH)
        axes = "batch seq kv_heads head_dim"
        k_BSKH = constrain(self._norm_and_rotate(raw_BSKH, self.key_norm, context), axes)
        return checkpoint_name(k_BSKH, "key"), checkpoint_name(constrain(v_BSKH, axes), "value")

    def _norm_and_rotate(self, x_BTNH: Array, norm: Norm | None, context: Context) -> Array:
        """Normalise and rotate queries or keys, in the order of the configuration."""
        cfg = self.cfg

        def normed(x_BTNH: Array) -> Array:
            if norm is None:
                return x_BTNH
            if cfg.qk_norm_over == "all":
                # One norm over all heads together, as OLMo 2 has it.
                return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)
            return norm(x_BTNH)

        if cfg.rope is None:
            return normed(x_BTNH)
        table = context.tables[cfg.rope, cfg.head_dim]
        if cfg.qk_norm_after_rope:
            return normed(rotate(x_BTNH, table, cfg.rope))
        return rotate(normed(x_BTNH), table, cfg.rope)


def request(cfg: AttentionConfig) -> Request:
    """Request of this layer to the attention kernel."""
    return Request(
        scale=cfg.scale or cfg.head_dim**-0.5,
        window=cfg.window,
        soft_cap=cfg.soft_cap,
        chunk=cfg.chunk,
        causal=cfg.causal,
    )


def temperature(cfg: TemperatureConfig, positions_BT: Array) -> Array:
    """The factor of the queries at each position, float32 [B, T] (Nakanishi 2025, arXiv:2501.19399,
    in steps as Llama 4 takes it)."""
    steps_BT = jnp.floor((positions_BT.astype(jnp.float32) + 1) / cfg.length)
    return 1 + cfg.scale * jnp.log1p(steps_BT)


def _project_heads(x_BTD: Array, w: nnx.Param, bias: nnx.Param | None, axis: str) -> Array:
    """Project to heads, pinned to the mesh before norm and rotation, which are float32: otherwise
    XLA may reshard them afterwards, in float32."""
    return constrain(project(x_BTD, w, bias), f"batch seq {axis} head_dim")
