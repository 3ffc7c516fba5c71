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
from maxstack.layers import batch_invariance
from maxstack.layers.context import Context
from maxstack.layers.layer import Layer
from maxstack.layers.rope import rotate, yarn_mscale
from maxstack.layers.weight import product, project
from maxstack.schema.mixers import MLAConfig, YarnScaling
from maxstack.sharding import constrain

HEADS = "batch seq heads head_dim"


class MLA(Layer):
    """Self-attention whose keys and values are projections of one normalised latent, except for a
    rotated part of the key that all heads share (DeepSeek-V2 2024, arXiv:2405.04434, section 2.1).
    Training makes keys and values in full; inference attends in the space of the latents."""

    cfg: MLAConfig

    def __call__(self, x_BTD: Array, context: Context) -> Array:
        """Attention of each position over the positions of its document that it sees: [B, T, D]."""
        q_BTNH, ask = self._queries(x_BTD, context), request(self.cfg)
        if context.cache is not None:
            o_BTNV = self._attend_cached(q_BTNH, x_BTD, context, ask)
        else:
            k_BSNH, v_BSNV = self._keys_values(x_BTD, context)
            o_BTNV = attention(q_BTNH, k_BSNH, v_BSNV, context.segments_BT, ask, self.cfg.backend)
        o_BTNV = checkpoint_name(constrain(o_BTNV, HEADS), "context")
        return checkpoint_name(project(o_BTNV, self.out, self.out_bias), "mixer_out")

    def _attend_cached(self, q_BTNH: Array, x_BTD: Array, context: Context, ask: Request) -> Array:
        """Attention of rows [R, 1, ..] in the space of latents, which are all that is cached: keys'
        projection goes into the queries, values' comes after (arXiv:2405.04434, section 2.1.2)."""
        assert context.cache is not None
        latent_R1L, shared_R1R = self._latents(x_BTD, context)
        # The cache holds a latent and a rotated key for each token, whatever the number of heads.
        new_RCH = jnp.concatenate([latent_R1L, shared_R1R], axis=-1)
        nope, rope = q_BTNH[..., : self.cfg.nope_dim], q_BTNH[..., self.cfg.nope_dim :]
        # Einsums of few rows round otherwise on a CPU, so they take rows in groups of a fixed size.
        keyed = batch_invariance.in_groups(lambda x: product("RTNH,LNH->RTNL", x, self.key_up))
        inner_RTNL = constrain(keyed(nope), HEADS)
        q_RTNL = jnp.concatenate([inner_RTNL, rope], axis=-1)
        # The first `kv_lora` numbers of a cached key are the value too.
        o_RNL = context.cache.attend(q_RTNL[:, 0], new_RCH, ask, value_dim=self.cfg.kv_lora)
        valued = batch_invariance.in_groups(lambda x: product("RNL,LNV->RNV", x, self.value_up))
        return valued(o_RNL)[:, None]

    def _queries(self, x_BTD: Array, context: Context) -> Array:
        if self.cfg.q_lora:
            latent_BTL = self.query_norm(project(x_BTD, self.query_down, self.query_down_bias))
            q_BTNH = project(constrain(latent_BTL, "batch seq latent"), self.query_up)
        else:
            q_BTNH = project(x_BTD, self.query)
        q_BTNH = constrain(q_BTNH, HEADS)
        nope, rope = q_BTNH[..., : self.cfg.nope_dim], q_BTNH[..., self.cfg.nope_dim :]
        q_BTNH = jnp.concatenate([nope, self._rotate(rope, context)], axis=-1)
        return checkpoint_name(constrain(q_BTNH, HEADS), "query")

    def _latents(self, x_BTD: Array, context: Context) -> tuple[Array, Array]:
        """The normed latent [B, S, L], and the rotated key that all heads share [B, S, R]."""
        latent_BSL = self.kv_norm(project(x_BTD, self.kv_down, self.kv_down_bias))
        shared_BSR = project(x_BTD, self.key_rope, self.key_rope_bias)
        shared_BSR = constrain(shared_BSR, "batch seq head_dim")
        # As one head, since all heads share it.
        shared_BSR = self._rotate(shared_BSR[:, :, None], context)[:, :, 0]
        return constrain(latent_BSL, "batch seq latent"), shared_BSR

    def _keys_values(self, x_BTD: Array, context: Context) -> tuple[Array, Array]:
        latent_BSL, shared_BSR = self._latents(x_BTD, context)
        own_BSNH = constrain(project(latent_BSL, self.key_up), HEADS)
        shared_BSNR = jnp.broadcast_to(
            shared_BSR[:, :, None], (*own_BSNH.shape[:3], self.cfg.rope_dim)
        )
        # The order of the queries: without positions first.
        k_BSNH = constrain(jnp.concatenate([own_BSNH, shared_BSNR], axis=-1), HEADS)
        v_BSNV = constrain(project(latent_BSL, self.value_up), HEADS)
        return checkpoint_name(k_BSNH, "key"), checkpoint_name(v_BSNV, "value")

    def _rotate(self, x_BTNR: Array, context: Context) -> Array:
        return rotate(x_BTNR, context.tables[self.cfg.rope, self.cfg.rope_dim], self.cfg.rope)


def request(cfg: MLAConfig) -> Request:
    """Request of this layer to the attention kernel: scores over sqrt(H), times the square of
    YaRN's factor for all dimensions, where it is given.

    The part without positions is sharpened too, which cosines and sines cannot do (the released
    code of DeepSeek-V2 and V3 says so; no paper does).
    """
    # Both parts of a key add to one product.
    scale = (cfg.nope_dim + cfg.rope_dim) ** -0.5
    scaling = cfg.rope.scaling
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return Request(scale=scale, causal=cfg.causal)
