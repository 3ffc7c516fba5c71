"""Weights: a layer declares shape, logical axes, use and initial values once.

`draw` makes the initial values from a hash of (seed, path), so that they depend on neither the mesh
nor on what else the model holds. Layers multiply by a weight only through `project`, `lookup`,
`product` and `experts`, and a `Substitute` (a quantized weight, or one with an adapter) answers
these calls in its own way. Intercepting `dot_general` from outside, as Qwix does, took 2 to 4 times
as long to trace, finds weights by the shape of tracers, and reaches neither experts nor the head.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from maxstack.kernels.backends import Device
from maxstack.kernels.grouped_matmul import grouped_matmul
from maxstack.schema.kernels import GroupedMatmul
from maxstack.schema.parts import Use
from maxstack.sharding import constrain, current


def weight(
    shape: tuple[int, ...],
    axes: str,
    *,
    dtype: str,
    std: float = 0.0,
    fill: float = 0.0,
    carried: bool = False,
    use: Use | None = None,
    contract: int = 1,
    beside_adapters: bool = False,
) -> nnx.Param:
    """A parameter of `shape` with one logical axis name a dimension. `draw` fills it from a normal
    of `std` cut at three of it, or with `fill`.

    The step updates a `carried` weight by a rule of its own, not the optimizer. `use` names the
    operation that multiplies by the weight, where it may be quantized; a matmul contracts its first
    `contract` dimensions. A weight that is trained `beside_adapters` gets no adapter, and is not
    frozen where other weights have them.
    """
    # Not split(): the axis without a name is "".
    names = tuple(axes.split(" ")) if shape else ()
    assert len(shape) == len(names), (shape, axes)
    return nnx.Param(
        jnp.full(shape, fill, jnp.dtype(dtype)),
        axes=names,
        std=std,
        fill=fill,
        carried=carried,
        use=use,
        contract=contract,
        beside_adapters=beside_adapters,
        frozen=False,
    )


class Substitute:
    """Replacement for a weight that is stored or multiplied in a way of its own. A layer need not
    know that it holds one."""

    def project(self, x: Array) -> Array:
        """See `project`."""
        raise NotImplementedError

    def product(self, equation: str, x: Array) -> Array:
        """See `product`."""
        return jnp.einsum(equation, x, self.values(x.dtype))

    def lookup(self, index: Array, dtype: Any) -> Array:
        """See `lookup`."""
        raise NotImplementedError

    def values(self, dtype: Any) -> Array:
        """The whole weight as an array, for products in full precision."""
        raise NotImplementedError

    def experts(self, dtype: Any) -> Any:
        """See `experts`."""
        raise NotImplementedError

    def read(self, x: Array) -> Array:
        """Prepare rows for a product with `values`."""
        return x

    def scores(self, x: Array, tied: bool, dtype: Any) -> Array:
        """x [.., D] times the head [D, V], of which a `tied` one is kept transposed: [.., V]."""
        table = self.values(dtype)
        return multiply(self.read(x), table.T if tied else table)


class Experts:
    """Replacement for the matrices of all experts [E, in, out]: a pytree of arrays of as many
    dimensions, which may be one long."""

    ndim = 3

    def multiply(self, x: Array, sizes: Array, backend: GroupedMatmul) -> Array:
        """See grouped_matmul."""
        raise NotImplementedError


Weight = nnx.Param | Substitute


def draw(param: nnx.Param, path: Sequence[object], seed: int) -> Array:
    """Initial values for `param`: they depend on the seed, the path and the shape alone, so neither
    the mesh nor other weights change them."""
    std, shape = param.get_metadata()["std"], param.get_value().shape
    if not std:
        return jnp.full(shape, param.get_metadata()["fill"], param.get_value().dtype)
    # A hash, since Python's own differs between processes and a counter would depend on the order.
    name = "/".join(map(str, (seed, *path)))
    words = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), "<u4")
    # The generator is named, so that jax's default, which can be set, changes no initial value.
    key = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
    # Cut at three deviations, beyond which a normal has 0.3 % of its values.
    return std * jax.random.truncated_normal(key, -3.0, 3.0, shape, param.get_value().dtype)


def values(w: Weight, dtype: Any) -> Array:
    """The whole weight."""
    return w.values(dtype) if isinstance(w, Substitute) else w[...].astype(dtype)


def product(equation: str, x: Array, w: Weight) -> Array:
    """The einsum of x and a weight, in x's dtype; the first dimension of x and of what comes out
    are rows."""
    if isinstance(w, Substitute):
        return w.product(equation, x)
    return jnp.einsum(equation, x, values(w, x.dtype))


def lookup(w: Weight, index: Array, dtype: Any) -> Array:
    """The rows of a table [rows, ...] at `index` [...]: [..., ...]."""
    return w.lookup(index, dtype) if isinstance(w, Substitute) else w[...].astype(dtype)[index]


def experts(w: Weight, dtype: Any) -> Array | Experts:
    """The matrices of all experts [E, in, out], for `multiply_each`."""
    return w.experts(dtype) if isinstance(w, Substitute) else w[...].astype(dtype)


def multiply_each(x: Array, w: Array | Experts, sizes: Array, backend: GroupedMatmul) -> Array:
    """The rows of each expert [rows, in], sorted, by its matrix: [rows, out]; see
    grouped_matmul."""
    return (
        w.multiply(x, sizes, backend)
        if isinstance(w, Experts)
        else grouped_matmul(x, w, sizes, backend)
    )


def project(x: Array, w: Weight, bias: nnx.Param | None = None) -> Array:
    """Contract the last dimensions of x with the first ones of w, in x's dtype, and add the bias:
    [..., in] x [in, out] + [out] -> [..., out].

    On one device rows are flattened to one dimension: on a CPU, XLA transposes the whole operand of
    a weight gradient that contracts two. On a mesh they keep their dimensions, which may be split
    over different axes, and the weight is gathered along `embed`, for the backward pass once more:
    left to itself, XLA may split activations like the shards of a weight's gradient, or copy them
    whole to every device.
    """
    product = w.project(x) if isinstance(w, Substitute) else _product(x, w)
    return product if bias is None else product + bias[...].astype(x.dtype)


def _product(x: Array, w: nnx.Param) -> Array:
    contract = w.get_metadata()["contract"]
    rows, out = x.shape[: x.ndim - contract], w.shape[contract:]
    if current():
        # Whole along `embed` alone: the other axes are split as the activations are.
        axes = gathered_axes(axes_of(w))

        def product(x: Array, w: Array) -> Array:
            used = constrain(w.astype(x.dtype), axes)
            return jax.lax.dot_general(
                x, used, ((tuple(range(len(rows), x.ndim)), tuple(range(contract))), ((), ()))
            )

        # Gathered again for the backward pass: kept, a scan stacked every layer's gathered weights
        # (1B on 8 H100: 14.0 GB of temporaries, not 12.3).
        return jax.checkpoint(product, prevent_cse=False)(x, w[...])
    return multiply(x.reshape(*rows, -1), w[...].reshape(-1, *out))


def multiply(x: Array, w: Array) -> Array:
    """[..., in] x [in, ...] -> [..., ...], in x's dtype."""
    if current():
        return jax.lax.dot_general(x, w.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())))
    # Two dimensions, since XLA on a CPU copies a transposed [F, B, T] for a gradient that contracts
    # two of them (an MLP's gradient: 144 -> 65 ms).
    rows, matrix = x.reshape(-1, x.shape[-1]), w.astype(x.dtype).reshape(w.shape[0], -1)
    product = _multiply_here if Device.here().platform == "cpu" else jnp.matmul
    return product(rows, matrix).reshape(*x.shape[:-1], *w.shape[1:])


@jax.custom_vjp
def _multiply_here(x: Array, matrix: Array) -> Array:
    """[rows, in] x [in, out] on a CPU, where the speed of the gradient of a matrix depends on how
    XLA is asked for it (measured in EXPERIMENTS.md)."""
    return x @ matrix


def _gradients(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, matrix = operands
    size, columns = matrix.shape
    if columns % 4096 == 0:
        # Rows of a multiple of 16 KB compete for the same lines of the processor's cache: 1,024 x
        # 4,096 runs at 132 GFLOP/s, in pieces at 162.
        pieces = jnp.split(gradient, columns // 2048, 1)
        of_matrix = jnp.concatenate([x.T @ piece for piece in pieces], 1)
    elif size > columns and size % 4096:
        # 1,024 x 256 turned runs at 172 GFLOP/s and not
        # 121; the barrier keeps it a product of its own.
        of_matrix = jax.lax.optimization_barrier(gradient.T @ x).T
    else:
        of_matrix = x.T @ gradient
    return gradient @ matrix.T, of_matrix


_multiply_here.defvjp(lambda x, matrix: (x @ matrix, (x, matrix)), _gradients)


def axes_of(w: nnx.Param) -> tuple[str, ...]:
    """Logical axes of a weight, without that of a stack."""
    axes = w.get_metadata()["axes"]
    return axes[-w.ndim :] if w.ndim else ()


def gathered_axes(axes: Sequence[str]) -> str:
    """Axes of a weight that is gathered along `embed`."""
    return " ".join("norm" if axis == "embed" else axis for axis in axes)
