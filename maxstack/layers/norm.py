"""Normalisation over the last dimension, in float32."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from maxstack.layers.layer import Layer
from maxstack.schema.mixers import NormConfig


class Norm(Layer):
    """x / sqrt(mean(x^2) + eps) * scale + bias; kind layer takes the mean from x first. Scale and
    bias are there where the configuration has them."""

    cfg: NormConfig

    def __call__(self, x: Array) -> Array:
        """[..., size] -> the same shape and dtype."""
        scale = None
        if self.cfg.scale:
            scale = self.scale[...].astype(jnp.float32) + float(self.cfg.zero_centered)
        y = normed(x, scale, self.cfg.kind == "layer", self.cfg.eps)
        if self.cfg.bias:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def normed(x: Array, scale: Array | None, centered: bool, eps: float) -> Array:
    """float32 [..., size]. Its backward pass keeps x and one number a row, not the normed x in
    float32 that automatic differentiation keeps."""
    return _forward(x, scale, centered, eps)[0]


def _forward(x, scale, centered, eps):
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, axis=-1, keepdims=True) if centered else None
    y = y if mean is None else y - mean
    inverse = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    y = y * inverse
    return y if scale is None else y * scale, (x, scale, mean, inverse)


def _backward(centered, eps, saved, dy):
    """Gradients of x and scale: with n = (x - mean) * inverse and g = dy * scale, dx = inverse *
    (g - mean(g) - n * mean(g * n)), mean(g) where the mean was taken from x."""
    x, scale, mean, inverse = saved
    n = (x.astype(jnp.float32) if mean is None else x.astype(jnp.float32) - mean) * inverse
    g = dy if scale is None else dy * scale
    dx = g - n * jnp.mean(g * n, axis=-1, keepdims=True)
    dx = dx if mean is None else dx - jnp.mean(g, axis=-1, keepdims=True)
    return (dx * inverse).astype(x.dtype), None if scale is None else (dy * n).sum(
        axis=tuple(range(n.ndim - 1))
    )


normed.defvjp(_forward, _backward)
