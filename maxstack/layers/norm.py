"""Root-mean-square normalisation in float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from maxstack.layers.config import NormConfig
from maxstack.layers.weight import weight


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, cfg: NormConfig, size: int, *, dtype: str):
        self.cfg = cfg
        self.scale = weight((size,), "norm", dtype=dtype, fill=0.0 if cfg.zero_centered else 1.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        scale = self.scale[...].astype(jnp.float32) + float(self.cfg.zero_centered)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.cfg.eps) * scale).astype(x.dtype)
