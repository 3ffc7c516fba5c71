"""Weights with several adapters (LoRA, DoRA), of which each row of a step of inference has its own.
Shapes: R rows  T 1  A adapters  Z rank."""

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from maxstack.layers.weight import Substitute, Weight, product, project
from maxstack.sharding import holding

_numbers: contextvars.ContextVar[Array] = contextvars.ContextVar("numbers")
INPUTS, OUTPUTS = "IJK", "OPQ"
"""Dimensions of a weight in an einsum."""


def choosing(numbers_R: Array) -> contextlib.AbstractContextManager[None]:
    """Context in which rows are computed with the adapters of these numbers; 0: none."""
    return holding(_numbers, numbers_R)


def install(model: nnx.Module, adapters: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the weights of a model, by path, by such with adapters, whose leaves are given."""
    for path, leaves in adapters.items():
        *owners, name = path.split("/")
        module = functools.reduce(getattr, owners, model)
        setattr(module, name, AdaptedRows(getattr(module, name), leaves))


class AdaptedRows(Substitute, nnx.Module):
    """W x + B A x with the A and B of the row's adapter, and with DoRA that times a factor of each
    column; W x, bit for bit, for rows without. W may be kept in any way.

    Rows are multiplied by the A of all adapters, and what is not their own's is dropped: for as
    many adapters as rows at most that reads less than the A and B of each row.
    """

    def __init__(self, base: Weight, leaves: Mapping[str, Any]):
        """`leaves`: a [in..., A, Z]; b [A, Z, out...], which holds the scale; where an adapter is
        DoRA, `factor` [1 + A, out...], the first for rows without."""
        self.base = base
        self.a, self.b = nnx.Param(leaves["a"]), nnx.Param(leaves["b"])
        self.factor = nnx.Param(leaves["factor"]) if "factor" in leaves else None

    def project(self, x: Array) -> Array:
        """See weight.project; x is [R, T, in...]."""
        inputs, outputs = INPUTS[: self.a.ndim - 2], OUTPUTS[: self.b.ndim - 2]
        equation = f"RT{inputs},{inputs}{outputs}->RT{outputs}"
        return self._adapted(equation, x, lambda x: project(x, self.base))

    def product(self, equation: str, x: Array) -> Array:
        """See weight.product."""
        return self._adapted(equation, x, lambda x: product(equation, x, self.base))

    def _adapted(self, equation: str, x: Array, base: Callable[[Array], Array]) -> Array:
        read, w, written = re.split(",|->", equation)
        inputs, outputs = w[: self.a.ndim - 2], w[self.a.ndim - 2 :]
        numbers_R, dtype = _numbers.get(), x.dtype

        def lengthened(x: Array, dims: str) -> Array:
            if self.factor is None or not {*outputs} <= {*dims}:
                return x
            own = self.factor[...][numbers_R].astype(dtype)
            return jnp.einsum(f"{dims},R{outputs}->{dims}", x, own)

        x = lengthened(x, read)
        y = base(x)
        (first, m), (second, n) = (f"{inputs}AZ", self.a), (f"AZ{outputs}", self.b)
        if not {*inputs} <= {*read}:
            (first, m), (second, n) = (second, n), (first, m)
        kept = "".join(dim for dim in read if dim in written or dim not in first)
        h = jnp.einsum(f"{read},{first}->{kept}AZ", x, m[...].astype(dtype))
        own = _beside(numbers_R, h) == jnp.arange(1, h.shape[-2] + 1)[:, None]
        h = jnp.where(own, h, 0)
        y_adapted = y + jnp.einsum(f"{kept}AZ,{second}->{written}", h, n[...].astype(dtype))
        return jnp.where(_beside(numbers_R, y) > 0, lengthened(y_adapted, written), y)


def _beside(numbers_R: Array, x: Array) -> Array:
    """[R, 1, ..] of as many dimensions as x."""
    return numbers_R.reshape(-1, *(1,) * (x.ndim - 1))
