"""Grouped-query attention: projections, qk-norm and RoPE around the attention kernel.

Shapes: B batch  T query time  S key time  D embed  N heads  K kv heads  H head dim.
"""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxstack.kernels.attention import Request, attention
from maxstack.layers.config import AttentionConfig
from maxstack.layers.norm import RMSNorm
from maxstack.layers.rope import rotate
from maxstack.layers.weight import project, weight
from maxstack.sharding import constrain


class Attention(nnx.Module):
    """Causal self-attention (Vaswani 2017; grouped queries: Ainslie 2023, arXiv:2305.13245)."""

    def __init__(self, cfg: AttentionConfig, embed: int, *, std: float, out_std: float, dtype: str):
        self.cfg = cfg
        heads, kv, size = cfg.heads, cfg.kv, cfg.head_dim
        self.query = weight((embed, heads, size), "embed heads head_dim", std=std / embed**0.5, dtype=dtype)
        self.key = weight((embed, kv, size), "embed kv_heads head_dim", std=std / embed**0.5, dtype=dtype)
        self.value = weight((embed, kv, size), "embed kv_heads head_dim", std=std / embed**0.5, dtype=dtype)
        self.out = weight((heads, size, embed), "heads head_dim embed", std=out_std / (heads * size) ** 0.5, dtype=dtype)
        if cfg.qkv_bias:
            self.query_bias = weight((heads, size), "heads head_dim", dtype=dtype)
            self.key_bias = weight((kv, size), "kv_heads head_dim", dtype=dtype)
            self.value_bias = weight((kv, size), "kv_heads head_dim", dtype=dtype)
        if cfg.out_bias:
            self.out_bias = weight((embed,), "norm", dtype=dtype)
        if cfg.qk_norm:
            self.query_norm = RMSNorm(cfg.qk_norm, size, dtype=dtype)
            self.key_norm = RMSNorm(cfg.qk_norm, size, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, tables: dict, segments_BT: jax.Array | None) -> jax.Array:
        """`tables` holds the cosines and sines of each (rope, head_dim); `segments_BT` numbers the documents of a row, None: one a row."""
        cfg = self.cfg
        q_BTNH, k_BTKH, v_BTKH = project(x_BTD, self.query), project(x_BTD, self.key), project(x_BTD, self.value)
        if cfg.qkv_bias:
            q_BTNH = q_BTNH + self.query_bias.astype(x_BTD.dtype)
            k_BTKH = k_BTKH + self.key_bias.astype(x_BTD.dtype)
            v_BTKH = v_BTKH + self.value_bias.astype(x_BTD.dtype)
        if cfg.qk_norm:
            q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
        if cfg.rope:
            table = tables[cfg.rope, cfg.head_dim]
            q_BTNH, k_BTKH = rotate(q_BTNH, table), rotate(k_BTKH, table)
        q_BTNH = checkpoint_name(constrain(q_BTNH, "batch seq heads head_dim"), "query")
        k_BTKH = checkpoint_name(constrain(k_BTKH, "batch seq kv_heads head_dim"), "key")
        v_BTKH = checkpoint_name(constrain(v_BTKH, "batch seq kv_heads head_dim"), "value")
        o_BTNH = attention(q_BTNH, k_BTKH, v_BTKH, segments_BT, request(cfg), cfg.backend)
        o_BTNH = checkpoint_name(constrain(o_BTNH, "batch seq heads head_dim"), "context")
        out_BTD = project(o_BTNH, self.out, contract=2)
        if cfg.out_bias:
            out_BTD = out_BTD + self.out_bias.astype(x_BTD.dtype)
        return checkpoint_name(out_BTD, "mixer_out")


def request(cfg: AttentionConfig) -> Request:
    """What this layer asks of the attention kernel."""
    return Request(scale=cfg.scale or cfg.head_dim**-0.5, window=cfg.window, soft_cap=cfg.soft_cap)
