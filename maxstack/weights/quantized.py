"""The two ways to keep a weight that a rule takes: as floats that training rounds, or in low
precision and frozen."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from qwix import QArray

from maxstack.layers.weight import Experts, Substitute, whole
from maxstack.sharding import current
from maxstack.weights.arithmetic import (
    BITS,
    Operand,
    QuantSpec,
    dequantize,
    faked,
    product,
    quantize,
)
from maxstack.weights.experts import QuantizedExperts, RoundedExperts, codes
from maxstack.weights.spec import WeightSpec

HALF = {
    "nf4": jnp.uint4,
    "mxfp4": jnp.float4_e2m1fn,
    **{qtype: jnp.int4 for qtype, bits in BITS.items() if bits <= 4},
}
"""The types of which two values lie in a byte, and what XLA calls them."""


class Quantized(Substitute):
    """What both have in common."""

    quant: QuantSpec

    def read(self, x: jax.Array) -> jax.Array:
        """Rounded as the rule says of activations."""
        return faked(x, self.quant.act, -1) if self.quant.act else x


class Trained(Quantized, nnx.Param):
    """Floats that the optimizer updates; what multiplies by them rounds them on the way (Qwix's
    quantized training)."""

    @property
    def quant(self) -> QuantSpec:  # type: ignore[override]
        return self.get_metadata()["quant"]

    def project(self, x: jax.Array) -> jax.Array:
        """See weight.project."""
        place = WeightSpec.of(self)
        return _projected(self.quant, place, x, self[...], lambda w: w.reshape(place.matrix))

    def lookup(self, index: jax.Array, dtype: Any) -> jax.Array:
        """See weight.lookup; the rows are rounded after they are taken."""
        return faked(self[...][index], self.quant.weight, -1).astype(dtype)

    def values(self, dtype: Any) -> jax.Array:
        """See weight.values."""
        place = WeightSpec.of(self)
        return (
            faked(self[...].reshape(place.matrix), self.quant.weight, place.contracted)
            .reshape(place.shape)
            .astype(dtype)
        )

    def experts(self, dtype: Any) -> Experts:
        """See weight.experts."""
        how = self.quant
        if not how.low:
            return RoundedExperts(faked(self[...], how.weight, 1).astype(dtype), how)
        scale = jax.lax.stop_gradient(quantize(self[...], how.weight, 1).scale)
        return QuantizedExperts(codes(self[...], how.weight, dtype), scale, how)


class Stored(Quantized, nnx.Module):
    """A weight in low precision: its values, two in a byte where they have four bits, and their
    scales. It is not trained."""

    def __init__(self, param: nnx.Param, how: QuantSpec):
        place = WeightSpec.of(param)
        lead = param.ndim - len(place.shape)
        found = jax.eval_shape(
            lambda w: stored(w, place, how), jax.ShapeDtypeStruct(param.shape, param.dtype)
        )
        self.spec, self.quant = place, how
        for name, leaf in found.items():
            axes = tuple(
                "norm" if size == 1 and name in SCALES else axis
                for size, axis in zip(leaf.shape[lead:], place.matrix_axes, strict=True)
            )
            setattr(self, name, frozen(leaf.shape, leaf.dtype, axes))

    @property
    def leaves(self) -> dict[str, jax.Array]:
        """What `stored` gives, as it is kept."""
        return {
            name: getattr(self, name)[...]
            for name in (self.quant.weight.qtype, *SCALES)
            if hasattr(self, name)
        }

    @property
    def array(self) -> QArray:
        """As Qwix has it, [matrix]."""
        return _read(self.leaves, self.spec, self.quant.weight)

    def project(self, x: jax.Array) -> jax.Array:
        """See weight.project."""
        return _projected(
            self.quant,
            self.spec,
            x,
            self.leaves,
            lambda leaves: _read(leaves, self.spec, self.quant.weight),
        )

    def lookup(self, index: jax.Array, dtype: Any) -> jax.Array:
        """See weight.lookup."""
        rows = {name: leaf[index] for name, leaf in self.leaves.items()}
        return dequantize(_read(rows, self.spec, self.quant.weight), dtype)

    def values(self, dtype: Any) -> jax.Array:
        """See weight.values."""
        return dequantize(self.array, dtype).reshape(self.spec.shape)

    def experts(self, dtype: Any) -> Experts:
        """See weight.experts."""
        if self.quant.low:
            whole = self.array
            return QuantizedExperts(whole.qvalue.astype(dtype), whole.scale, self.quant)
        return RoundedExperts(self.values(dtype), self.quant)


SCALES = "scale", "zero_point"
"""What lies beside the values of a Stored weight; only asymmetric ones have a zero point."""


def frozen(shape: tuple[int, ...], dtype: Any, axes: tuple[str, ...] = ()) -> nnx.Param:
    """A parameter that nothing trains or draws; `axes` without those of a stack."""
    return nnx.Param(
        jnp.zeros(shape, dtype),
        axes=axes,
        std=0.0,
        fill=0.0,
        carried=False,
        use=None,
        contract=1,
        frozen=True,
    )


def stored(w: jax.Array, place: WeightSpec, how: QuantSpec) -> dict[str, jax.Array]:
    """What a Stored weight keeps of a float one [..., shape], whatever dimensions a stack puts
    before it. The values are called by their type, so that a checkpoint says what its bytes
    mean."""
    lead = w.shape[: w.ndim - len(place.shape)]
    q = quantize(w.reshape(*lead, *place.matrix), how.weight, len(lead) + place.contracted)
    found = {
        how.weight.qtype: _packed(q.qvalue, place.packed) if how.weight.qtype in HALF else q.qvalue,
        "scale": q.scale,
    }
    return found if q.zero_point is None else found | {"zero_point": q.zero_point.astype(jnp.int8)}


def floats(
    leaves: Mapping[str, jax.Array | np.ndarray], place: WeightSpec, how: QuantSpec
) -> jax.Array:
    """The float32 weight [..., shape] that what is kept stands for."""
    found = dequantize(_read(leaves, place, how.weight), jnp.float32)
    return found.reshape(*found.shape[: found.ndim - len(place.matrix)], *place.shape)


def _read(leaves: Mapping[str, jax.Array | np.ndarray], place: WeightSpec, how: Operand) -> QArray:
    values, zero = leaves[how.qtype], leaves.get("zero_point")
    if how.qtype in HALF:
        values = _unpacked(values, place.packed, HALF[how.qtype])
    qtype = how.qtype if how.qtype in ("nf4", "mxfp8", "mxfp4") else None
    return QArray(
        values, leaves["scale"], None if zero is None else zero.astype(values.dtype), qtype
    )


def _packed(x: jax.Array, dim: int) -> jax.Array:
    """Neighbours along a dimension, counted from the end, as the halves of a byte: uint8."""
    nibbles = jax.lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
    pairs = nibbles.reshape(*x.shape[:dim], x.shape[dim] // 2, 2, *x.shape[x.ndim + dim + 1 :])
    low, high = jnp.split(pairs, 2, axis=dim)
    return (low | (high << 4)).squeeze(dim)


def _unpacked(x: jax.Array | np.ndarray, dim: int, dtype: Any) -> jax.Array:
    pairs = jnp.stack([x & 15, x >> 4], axis=x.ndim + dim + 1)
    nibbles = pairs.reshape(*x.shape[:dim], 2 * x.shape[dim], *x.shape[x.ndim + dim + 1 :]).astype(
        jnp.uint4
    )
    return jax.lax.bitcast_convert_type(nibbles, dtype)


def _projected(
    how: QuantSpec, place: WeightSpec, x: jax.Array, kept: Any, matrix: Any
) -> jax.Array:
    """x times the weight that `matrix` makes of what is kept. It is made once more for the backward
    pass where it would else be kept for that."""
    rows = x.shape[: x.ndim - place.contract]
    apart = current() or (
        how.weight_grad and how.weight_grad.tile
    )  # tiles of positions lie along a sequence
    x = x.reshape(*(rows if apart else (math.prod(rows),)), -1)
    axes = whole(place.matrix_axes)

    def run(x: jax.Array, kept: Any) -> jax.Array:
        return product(how, axes, x, matrix(kept))

    again = current() is not None or isinstance(kept, dict)
    out = (jax.checkpoint(run, prevent_cse=False) if again else run)(x, kept)
    return out.reshape(*rows, *place.shape[place.contract :])
