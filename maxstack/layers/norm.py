"""Normalisation over the last dimension, in float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from maxstack.layers.config import NormConfig
from maxstack.layers.weight import weight


class Norm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale + bias; kind layer takes the mean from x first. Scale and bias are there where the configuration has them."""

    def __init__(self, cfg: NormConfig, size: int, *, dtype: str):
        self.cfg = cfg
        if cfg.scale:
            self.scale = weight((size,), "norm", dtype=dtype, fill=0.0 if cfg.zero_centered else 1.0)
        if cfg.bias:
            self.bias = weight((size,), "norm", dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> the same shape and dtype."""
        y = x.astype(jnp.float32)
        if self.cfg.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.cfg.eps)
        if self.cfg.scale:
            y = y * (self.scale[...].astype(jnp.float32) + float(self.cfg.zero_centered))
        if self.cfg.bias:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)
