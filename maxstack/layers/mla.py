"""Multi-head latent attention: queries, keys and values out of small latents, around the attention
kernel.

Shapes: B batch  T query time  S key time  D embed  N heads  H key head dim, without and with
positions  R its part with positions  V value head dim L latent.
"""

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from maxstack.kernels.attention import attention
from maxstack.kernels.attention.request import Request
from maxstack.layers.context import Context
from maxstack.layers.layer import Layer
from maxstack.layers.rope import rotate, yarn_mscale
from maxstack.layers.weight import project
from maxstack.schema.mixers import MLAConfig, YarnScaling
from maxstack.sharding import constrain

HEADS = "batch seq heads head_dim"


class MLA(Layer):
    """Self-attention whose keys and values are projections of one normed latent, but for a
    rotated part of the key that all heads share (DeepSeek-V2 2024, arXiv:2405.04434, section 2.1).
    Keys and values are made in full, as training wants them."""

    cfg: MLAConfig

    def __call__(self, x_BTD: Array, context: Context) -> Array:
        """Attention of each position over the positions of its document that it sees: [B, T, D]."""
        k_BSNH, v_BSNV = self._keys_values(x_BTD, context)
        q_BTNH, ask = self._queries(x_BTD, context), request(self.cfg)
        o_BTNV = attention(q_BTNH, k_BSNH, v_BSNV, context.segments_BT, ask, self.cfg.backend)
        o_BTNV = checkpoint_name(constrain(o_BTNV, HEADS), "context")
        return checkpoint_name(project(o_BTNV, self.out, self.out_bias), "mixer_out")

    def _queries(self, x_BTD: Array, context: Context) -> Array:
        if self.cfg.q_lora:
            latent_BTL = self.query_norm(project(x_BTD, self.query_down, self.query_down_bias))
            q_BTNH = project(constrain(latent_BTL, "batch seq latent"), self.query_up)
        else:
            q_BTNH = project(x_BTD, self.query)
        q_BTNH = constrain(q_BTNH, HEADS)
        nope, rope = q_BTNH[..., : self.cfg.nope_dim], q_BTNH[..., self.cfg.nope_dim :]
        q_BTNH = jnp.concatenate([nope, self._rotated(rope, context)], axis=-1)
        return checkpoint_name(constrain(q_BTNH, HEADS), "query")

    def _keys_values(self, x_BTD: Array, context: Context) -> tuple[Array, Array]:
        latent_BSL = self.kv_norm(project(x_BTD, self.kv_down, self.kv_down_bias))
        latent_BSL = constrain(latent_BSL, "batch seq latent")
        shared_BSR = project(x_BTD, self.key_rope, self.key_rope_bias)
        shared_BSR = constrain(shared_BSR, "batch seq head_dim")
        own_BSNH = constrain(project(latent_BSL, self.key_up), HEADS)
        shared_BSNR = jnp.broadcast_to(
            self._rotated(shared_BSR[:, :, None], context), (*own_BSNH.shape[:3], self.cfg.rope_dim)
        )
        k_BSNH = constrain(jnp.concatenate([own_BSNH, shared_BSNR], axis=-1), HEADS)
        v_BSNV = constrain(project(latent_BSL, self.value_up), HEADS)
        return checkpoint_name(k_BSNH, "key"), checkpoint_name(v_BSNV, "value")

    def _rotated(self, x_BTNR: Array, context: Context) -> Array:
        return rotate(x_BTNR, context.tables[self.cfg.rope, self.cfg.rope_dim], self.cfg.rope)


def request(cfg: MLAConfig) -> Request:
    """Request of this layer to the attention kernel: scores over sqrt(H), times the square of
    YaRN's factor for all dimensions, where it is given.

    The part without positions is sharpened too, which cosines and sines cannot do (the released
    code of DeepSeek-V2 and V3 says so; no paper does).
    """
    scale, scaling = (cfg.nope_dim + cfg.rope_dim) ** -0.5, cfg.rope.scaling
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return Request(scale=scale, causal=cfg.causal)
