"""Errors of quantization in each layer.

Every product is computed twice, by the float weight and by the weight that a recipe makes of it.
The float output goes on to the next layer, so that errors of layers do not add up, and the sums of
squares of the output and of the difference leave the program by a callback.
"""

import collections
import contextlib
import contextvars
import functools
import threading
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from maxstack.layers.weight import (
    Experts,
    Substitute,
    experts,
    lookup,
    multiply_each,
    project,
    values,
    weight,
)
from maxstack.schema.kernels import GroupedMatmul
from maxstack.sharding import holding
from maxstack.weights.arithmetic import QuantSpec
from maxstack.weights.low_precision import StoredWeight, quantize_weight
from maxstack.weights.spec import WeightSpec, stacked

_real: contextvars.ContextVar[Array | None] = contextvars.ContextVar("real", default=None)


def count_only(real_BT: Array) -> contextlib.AbstractContextManager[None]:
    """Context in which outputs at other positions are padding and are not counted."""
    return holding(_real, real_BT)


class Errors:
    """Sums of squares of each layer's outputs and of their errors."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        # Each device of a mesh calls back from a thread of its own, and += of a list's item is not
        # atomic.
        self._adding = threading.Lock()

    def add(self, path: str, layer: Any, output: Any, change: Any) -> None:
        """Add the sums of a product, or of one device's part of it; devices call it
        concurrently."""
        with self._adding:
            sums = self._sums[path, int(layer)]
            sums[0] += float(output)
            sums[1] += float(change)

    def relative(self) -> dict[tuple[str, int], float]:
        """Return the relative root mean square error by (path, number in its stack)."""
        # Callbacks run asynchronously: without the barrier the last products are missing.
        jax.effects_barrier()
        return {
            key: (change / output) ** 0.5 if output else 0.0
            for key, (output, change) in sorted(self._sums.items())
        }


class ObservedWeight(Substitute, nnx.Module):
    """A float weight that records the errors that a rule would make."""

    def __init__(
        self, param: nnx.Param, quant: QuantSpec, spec: WeightSpec, path: str, errors: Errors
    ):
        self.base, self.quant = param, quant
        self.spec = spec
        self.path, self.errors = path, errors
        lead = param.shape[: param.ndim - len(spec.shape)]
        # A scan traces the layers of a stack once, so their number has to be an array that the scan
        # slices.
        self.layer = stacked(weight((), "", dtype="int32"), lead, frozen=True)
        """Number of the layer in its stack."""

    def project(self, x: Array) -> Array:
        """See weight.project."""
        return self._compare(project(x, self.base), self._quantize().project(x))

    def lookup(self, index: Array, dtype: Any) -> Array:
        """See weight.lookup."""
        return self._compare(lookup(self.base, index, dtype), self._quantize().lookup(index, dtype))

    def values(self, dtype: Any) -> Array:
        """See weight.values; the error is that of the weight itself."""
        return self._compare(values(self.base, dtype), self._quantize().values(dtype))

    def experts(self, dtype: Any) -> "ObservedExperts":
        """See weight.experts."""
        pair = experts(self.base, dtype), self._quantize().experts(dtype)
        # Experts are arrays of three dimensions each (layers/weight.py).
        return ObservedExperts(*pair, self.layer[...].reshape(1, 1, 1), self.path, self.errors)

    def _quantize(self) -> StoredWeight:
        weight = StoredWeight(self.base, self.quant)
        for name, leaf in quantize_weight(self.base[...], self.spec, self.quant).items():
            getattr(weight, name).set_value(leaf)
        return weight

    def _compare(self, output: Array, changed: Array) -> Array:
        return _compare(self.errors, self.path, self.layer[...], output, changed)


@flax.struct.dataclass
class ObservedExperts(Experts):
    """The matrices of all experts beside their quantized ones."""

    base: Any
    changed: Any
    layer: Array
    path: str = flax.struct.field(pytree_node=False)
    errors: Errors = flax.struct.field(pytree_node=False)

    def multiply(self, x: Array, sizes: Array, backend: GroupedMatmul) -> Array:
        outputs = (multiply_each(x, w, sizes, backend) for w in (self.base, self.changed))
        return _compare(self.errors, self.path, self.layer.reshape(()), *outputs)


def _compare(errors: Errors, path: str, layer: Array, output: Array, changed: Array) -> Array:
    """Return the output, and add its squares and those of the error to `errors`."""
    exact, real_BT = output.astype(jnp.float32), _real.get()
    change = changed.astype(jnp.float32) - exact
    # Experts have no rows of padding, and weights themselves no positions.
    if real_BT is not None and exact.shape[:2] == real_BT.shape:
        real = real_BT.reshape(*real_BT.shape, *(1,) * (exact.ndim - 2))
        exact, change = jnp.where(real, exact, 0), jnp.where(real, change, 0)
    # A callback, since layers return activations alone and know nothing of quantization.
    jax.debug.callback(
        functools.partial(errors.add, path), layer, jnp.sum(exact * exact), jnp.sum(change * change)
    )
    return output
