"""Root-mean-square normalisation in float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from maxstack.layers.config import NormConfig


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, cfg: NormConfig, size: int, *, dtype: str):
        self.cfg = cfg
        start = jnp.zeros if cfg.zero_centered else jnp.ones
        self.scale = nnx.Param(start(size, jnp.dtype(dtype)), axes=("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        scale = self.scale[...].astype(jnp.float32) + float(self.cfg.zero_centered)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.cfg.eps) * scale).astype(x.dtype)
