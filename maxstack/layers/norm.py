"""Normalisation over the last dimension, in float32, with a gradient of its own. In inference, sums
have the same bits for any number of rows."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from maxstack.layers import batch_invariance
from maxstack.layers.layer import Layer
from maxstack.schema.mixers import NormConfig

COLUMNS = 64
"""Columns of the product that sums rows: with one column, XLA on a CPU takes another kernel."""


class Norm(Layer):
    """x / sqrt(mean(x^2) + eps) * scale + bias; kind layer takes the mean from x first. Scale and
    bias are there where the configuration has them."""

    cfg: NormConfig

    @jax.named_scope("norm")
    def __call__(self, x: Array) -> Array:
        """[..., size] -> the same shape and dtype."""
        scale = None
        if self.cfg.scale:
            # A zero-centred scale is stored less 1.
            scale = self.scale[...].astype(jnp.float32) + float(self.cfg.zero_centered)
        y = normalize(x, scale, self.cfg.kind == "layer", self.cfg.eps)
        if self.cfg.bias:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def normalize(x: Array, scale: Array | None, centered: bool, eps: float) -> Array:
    """Normalise -> float32 [..., size]. The backward pass keeps x and one number a row, not the
    normalised x in float32, which automatic differentiation would keep (with the same in
    `mlp.gate`: temporaries of the reference step 319 -> 285 MB, its time within noise)."""
    return _forward(x, scale, centered, eps)[0]


def _forward(x, scale, centered, eps):
    y = x.astype(jnp.float32)
    mean = _mean(y) if centered else None
    y = y if mean is None else y - mean
    inverse = jax.lax.rsqrt(_mean(y * y) + eps)
    y = y * inverse
    return y if scale is None else y * scale, (x, scale, mean, inverse)


def _mean(x: Array) -> Array:
    """Mean over the last axis, kept with size 1."""
    if not batch_invariance.active():
        return jnp.mean(x, axis=-1, keepdims=True)
    rows = x.reshape(-1, x.shape[-1])
    # XLA on a CPU has another kernel for a product of one row
    padded = jnp.pad(rows, ((0, max(0, 2 - len(rows))), (0, 0)))
    ones = jnp.ones((x.shape[-1], COLUMNS), x.dtype)
    # A product adds up each row in one order, whatever the number of rows; a sum does not.
    sums = jnp.matmul(padded, ones, precision=jax.lax.Precision.HIGHEST)
    return sums[: len(rows), :1].reshape(*x.shape[:-1], 1) / x.shape[-1]


def _backward(centered, eps, saved, dy):
    """Gradients of x and scale: with n = (x - mean) * inverse and g = dy * scale, dx = inverse *
    (g - mean(g) - n * mean(g * n)), mean(g) where the mean was taken from x."""
    x, scale, mean, inverse = saved
    # Recomputed from x and the inverse, which are all that was saved.
    n = (x.astype(jnp.float32) if mean is None else x.astype(jnp.float32) - mean) * inverse
    g = dy if scale is None else dy * scale
    dx = g - n * jnp.mean(g * n, axis=-1, keepdims=True)
    dx = dx if mean is None else dx - jnp.mean(g, axis=-1, keepdims=True)
    return (dx * inverse).astype(x.dtype), None if scale is None else (dy * n).sum(
        axis=tuple(range(n.ndim - 1))
    )


normalize.defvjp(_forward, _backward)
