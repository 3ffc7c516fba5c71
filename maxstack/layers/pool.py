"""One vector for all patches. Shapes: B batch  T time  D embed  N heads  H head dim."""

import jax
import jax.numpy as jnp
from jax import Array

from maxstack.layers.layer import Layer
from maxstack.layers.weight import project
from maxstack.schema.encoder import MapPool as MapPoolConfig


class MapPool(Layer):
    """Attention of a learned query over all positions, then an MLP with a residual (Zhai et al.
    2022, arXiv:2106.04560)."""

    cfg: MapPoolConfig

    def __call__(self, x_BTD: Array) -> Array:
        """[B, D]."""
        probe_11D = self.probe[...].astype(x_BTD.dtype)[None, None]
        # One query for all images, so it is projected once.
        query_NH = project(probe_11D, self.query, self.query_bias)[0, 0]
        key_BTNH = project(x_BTD, self.key, self.key_bias)
        value_BTNH = project(x_BTD, self.value, self.value_bias)
        scores_BNT = jnp.einsum(
            "NH,BTNH->BNT", query_NH, key_BTNH, preferred_element_type=jnp.float32
        )
        share_BNT = jax.nn.softmax(scores_BNT * query_NH.shape[-1] ** -0.5, axis=-1)
        o_B1NH = jnp.einsum("BNT,BTNH->BNH", share_BNT.astype(x_BTD.dtype), value_BTNH)[:, None]
        pooled_B1D = project(o_B1NH, self.out, self.out_bias)
        added_B1D, _ = self.mlp(self.norm(pooled_B1D), pooled_B1D, None)
        return (pooled_B1D + added_B1D)[:, 0]
