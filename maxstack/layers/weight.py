"""A weight says its shape, logical axes and initial values once; `draw` makes the values, `project` multiplies by them."""

import hashlib
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxstack.kernels.backends import Device
from maxstack.sharding import constrain, current


def weight(shape: tuple[int, ...], axes: str, *, dtype: str, std: float = 0.0, fill: float = 0.0, carried: bool = False) -> nnx.Param:
    """A parameter of `shape` with one logical axis name a dimension. `draw` fills it from a normal of `std` cut at three of it, or with `fill`.

    A `carried` one is not the optimizer's: the step updates it by a rule of its own.
    """
    assert len(shape) == len(axes.split()), (shape, axes)
    return nnx.Param(jnp.full(shape, fill, jnp.dtype(dtype)), axes=tuple(axes.split()), std=std, fill=fill, carried=carried)


def draw(param: nnx.Param, path: Sequence[object], seed: int) -> jax.Array:
    """Initial values for `param`: they depend on the seed, the path and the shape alone, so neither the mesh nor other weights change them."""
    std, shape = param.get_metadata()["std"], param.get_value().shape
    if not std:
        return jnp.full(shape, param.get_metadata()["fill"], param.get_value().dtype)
    name = "/".join(map(str, (seed, *path)))
    words = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), "<u4")
    key = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
    return std * jax.random.truncated_normal(key, -3.0, 3.0, shape, param.get_value().dtype)


def project(x: jax.Array, w: nnx.Param | jax.Array, contract: int = 1) -> jax.Array:
    """Contract the last `contract` dimensions of x with the first ones of w, in x's dtype: [..., in] x [in, out] -> [..., out].

    On one device rows are flattened to one dimension: on a CPU, XLA transposes the whole operand of a weight gradient that contracts two. On a
    mesh they keep their dimensions, which may be split over different axes, and the weight is gathered along `embed`, for the backward pass once
    more: left to itself, XLA may split activations like the shards of a weight's gradient, or copy them whole to every device.
    """
    rows, out = x.shape[: x.ndim - contract], w.shape[contract:]
    if current():
        axes = " ".join("norm" if axis == "embed" else axis for axis in _axes(w))

        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            used = constrain(w.astype(x.dtype), axes) if axes else w.astype(x.dtype)
            return jax.lax.dot_general(x, used, ((tuple(range(len(rows), x.ndim)), tuple(range(contract))), ((), ())))

        return jax.checkpoint(product, prevent_cse=False)(x, w[...])
    matrix = w[...].astype(x.dtype).reshape(-1, math.prod(out))
    if isinstance(matrix, jax.Array) and matrix.shape[0] > matrix.shape[1] and Device.here().platform == "cpu":
        matrix = _with_turned_gradient(matrix)
    return jax.lax.dot_general(x.reshape(-1, matrix.shape[0]), matrix, (((1,), (0,)), ((), ()))).reshape(*rows, *out)


def _axes(w: nnx.Param | jax.Array) -> tuple[str, ...]:
    """Of the weight itself, without those of a stack; none where they are not known."""
    return w.get_metadata()["axes"][-w.ndim:] if isinstance(w, nnx.Param) else ()


@jax.custom_vjp
def _with_turned_gradient(matrix: jax.Array) -> jax.Array:
    """The matrix [in, out], whose gradient is multiplied as [out, in] and then turned: on a CPU, XLA takes 1.5 x as long for it where in > out."""
    return matrix


_with_turned_gradient.defvjp(lambda matrix: (matrix, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient.T).T,))
