"""What quantization changes in each layer: a weight multiplies as before, and is told of beside it
as a recipe would have it."""

import collections
import contextlib
import contextvars
import threading
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from maxstack.layers.weight import (
    Experts,
    Substitute,
    experts,
    lookup,
    multiply_each,
    project,
    values,
)
from maxstack.schema.kernels import GroupedMatmul
from maxstack.sharding import holding
from maxstack.weights.arithmetic import QuantSpec
from maxstack.weights.quantized import Stored, frozen, stored
from maxstack.weights.spec import WeightSpec

_real: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("real", default=None)


def counting(real_BT: jax.Array) -> contextlib.AbstractContextManager[None]:
    """Inside, what is given at other positions than these is padding, and not told of."""
    return holding(_real, real_BT)


class Errors:
    """Sums of squares of what each layer gives, and of what it would give otherwise less that."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        self._adding = threading.Lock()

    def add(self, path: str, layer: Any, given: Any, change: Any) -> None:
        """Of one product, or a device's part of one; devices may add at once."""
        key, squares = (path, int(layer)), (float(given), float(change))
        with self._adding:
            self._sums[key] = [
                have + more for have, more in zip(self._sums[key], squares, strict=True)
            ]

    def relative(self) -> dict[tuple[str, int], float]:
        """(path, number in its stack) -> root mean square of the change over that of what is
        given."""
        jax.effects_barrier()
        return {
            key: (change / given) ** 0.5 if given else 0.0
            for key, (given, change) in sorted(self._sums.items())
        }


class Observed(Substitute, nnx.Module):
    """A float weight that a rule would take."""

    def __init__(
        self, param: nnx.Param, how: QuantSpec, place: WeightSpec, path: str, errors: Errors
    ):
        self.base, self.quant, self.spec, self.path, self.errors = param, how, place, path, errors
        self.layer = frozen(param.shape[: param.ndim - len(place.shape)], jnp.int32)
        """The layer's number in its stack."""

    def project(self, x: jax.Array) -> jax.Array:
        """See weight.project."""
        return self._told(project(x, self.base), self._changed().project(x))

    def lookup(self, index: jax.Array, dtype: Any) -> jax.Array:
        """See weight.lookup."""
        return self._told(lookup(self.base, index, dtype), self._changed().lookup(index, dtype))

    def values(self, dtype: Any) -> jax.Array:
        """See weight.values; the change is that of the weight itself."""
        return self._told(values(self.base, dtype), self._changed().values(dtype))

    def experts(self, dtype: Any) -> "ObservedExperts":
        """See weight.experts."""
        return ObservedExperts(
            experts(self.base, dtype),
            self._changed().experts(dtype),
            self.layer[...].reshape(1, 1, 1),
            self.path,
            self.errors,
        )

    def _changed(self) -> Stored:
        found = Stored(self.base, self.quant)
        for name, leaf in stored(self.base[...], self.spec, self.quant).items():
            getattr(found, name).set_value(leaf)
        return found

    def _told(self, given: jax.Array, changed: jax.Array) -> jax.Array:
        _tell(self.errors, self.path, self.layer[...], given, changed)
        return given


@flax.struct.dataclass
class ObservedExperts(Experts):
    """The matrices of all experts, and as a rule would have them."""

    given: Any
    changed: Any
    layer: jax.Array
    path: str = flax.struct.field(pytree_node=False)
    errors: Errors = flax.struct.field(pytree_node=False)

    def multiply(self, x: jax.Array, sizes: jax.Array, backend: GroupedMatmul) -> jax.Array:
        given, changed = (multiply_each(x, w, sizes, backend) for w in (self.given, self.changed))
        _tell(self.errors, self.path, self.layer.reshape(()), given, changed)
        return given


def _tell(
    errors: Errors, path: str, layer: jax.Array, given: jax.Array, changed: jax.Array
) -> None:
    given, changed, real_BT = given.astype(jnp.float32), changed.astype(jnp.float32), _real.get()
    if (
        real_BT is not None and given.shape[:2] == real_BT.shape
    ):  # not experts, which have no rows of padding, nor weights themselves
        given, changed = (
            jnp.where(real_BT.reshape(*real_BT.shape, *(1,) * (given.ndim - 2)), x, 0)
            for x in (given, changed)
        )
    jax.debug.callback(
        lambda *numbers: errors.add(path, *numbers),
        layer,
        jnp.sum(given * given),
        jnp.sum(jnp.square(changed - given)),
    )
