"""A weight says its shape, logical axes and initial scale once; `project` multiplies by it."""

import math

import jax
import jax.numpy as jnp
from flax import nnx


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: str, *, std: float, dtype: str) -> nnx.Param:
    """A parameter of `shape` with one logical axis name a dimension, drawn from a normal of `std` cut at three of it; std=0 gives zeros."""
    assert len(shape) == len(axes.split()), (shape, axes)
    if std:
        value = std * jax.random.truncated_normal(rngs.params(), -3.0, 3.0, shape, jnp.dtype(dtype))
    else:
        value = jnp.zeros(shape, jnp.dtype(dtype))
    return nnx.Param(value, axes=tuple(axes.split()))


def project(x: jax.Array, w: nnx.Param | jax.Array, contract: int = 1) -> jax.Array:
    """Contract the last `contract` dimensions of x with the first ones of w, in x's dtype: [..., in] x [in, out] -> [..., out].

    Rows are flattened to one dimension: on a CPU, XLA transposes the whole operand of a weight gradient that contracts two.
    """
    rows, out = x.shape[: x.ndim - contract], w.shape[contract:]
    matrix = w[...].astype(x.dtype).reshape(-1, math.prod(out))
    return (x.reshape(-1, matrix.shape[0]) @ matrix).reshape(*rows, *out)
