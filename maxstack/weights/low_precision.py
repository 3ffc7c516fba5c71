"""Substitutes for a weight that a rule quantizes.

A TrainedWeight keeps floats that the optimizer updates and rounds them at each use (modes qt and
qat); a StoredWeight keeps frozen values in low precision and their scales (mode ptq). Both compute
on the weight as a matrix [contracted, outputs...], whatever its shape.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from qwix import QArray

from maxstack.layers.weight import Experts, Substitute, gathered_axes, weight
from maxstack.sharding import current
from maxstack.weights.arithmetic import (
    BITS,
    Operand,
    QuantSpec,
    dequantize,
    fake_quantize,
    product,
    quantize,
)
from maxstack.weights.experts import QuantizedExperts, RoundedExperts, codes
from maxstack.weights.spec import WeightSpec, stacked

HALF = {
    "nf4": jnp.uint4,
    "mxfp4": jnp.float4_e2m1fn,
    **{qtype: jnp.int4 for qtype, bits in BITS.items() if bits <= 4},
}
"""Types whose values are stored two to a byte of uint8 -> XLA's types. XLA's own 4-bit arrays
cannot be leaves of the state: a compiled step refuses its own arguments ("input layouts that
disagree"), and tensorstore knows no uint4."""
SCALES = "scale", "zero_point"
"""Leaves beside the values of a StoredWeight; only asymmetric ones have a zero point."""


class Quantized(Substitute):
    """Quantized replacement for a weight."""

    quant: QuantSpec

    def read(self, x: Array) -> Array:
        """Return x, rounded as the rule says of activations."""
        return fake_quantize(x, self.quant.act, -1) if self.quant.act else x


# A Param under the path of the original, so that optimizer, sharding and checkpoints treat it as
# the float weight that it is.
class TrainedWeight(Quantized, nnx.Param):
    """Floats that the optimizer updates; each use rounds them (Qwix's quantized training)."""

    @property
    def quant(self) -> QuantSpec:  # type: ignore[override]
        return self.get_metadata()["quant"]

    def project(self, x: Array) -> Array:
        """See weight.project."""
        spec = WeightSpec.of(self)
        return _project(self.quant, spec, x, self[...], lambda w: w.reshape(spec.matrix))

    def lookup(self, index: Array, dtype: Any) -> Array:
        """See weight.lookup; the rows are rounded after they are taken."""
        # Each row has scales of its own, so rounding the rows that are taken gives what rounding
        # the whole table would.
        return fake_quantize(self[...][index], self.quant.weight, -1).astype(dtype)

    def values(self, dtype: Any) -> Array:
        """See weight.values."""
        spec = WeightSpec.of(self)
        matrix = fake_quantize(self[...].reshape(spec.matrix), self.quant.weight, spec.contracted)
        return matrix.reshape(spec.shape).astype(dtype)

    def experts(self, dtype: Any) -> Experts:
        """See weight.experts."""
        quant = self.quant
        if not quant.low:
            return RoundedExperts(fake_quantize(self[...], quant.weight, 1).astype(dtype), quant)
        scale = jax.lax.stop_gradient(quantize(self[...], quant.weight, 1).scale)
        return QuantizedExperts(codes(self[...], quant.weight, dtype), scale, quant)


class StoredWeight(Quantized, nnx.Module):
    """A weight in low precision: its values, two in a byte where they have four bits, and their
    scales. It is not trained."""

    def __init__(self, param: nnx.Param, quant: QuantSpec):
        self.spec, self.quant = WeightSpec.of(param), quant
        dims = param.ndim - len(self.spec.shape)
        # Shapes alone: the arrays come from a checkpoint or from the original weights.
        leaves = jax.eval_shape(
            lambda w: quantize_weight(w, self.spec, quant),
            jax.ShapeDtypeStruct(param.shape, param.dtype),
        )
        for name, leaf in leaves.items():
            shape = leaf.shape[dims:]
            axes = [
                # One scale for a whole dimension cannot be split; several (tiles) are split like
                # their values.
                "norm" if size == 1 and name in SCALES else axis
                for size, axis in zip(shape, self.spec.matrix_axes, strict=True)
            ]
            made = weight(shape, " ".join(axes), dtype=leaf.dtype)
            setattr(self, name, stacked(made, leaf.shape[:dims], frozen=True))

    @property
    def leaves(self) -> dict[str, Array]:
        """Leaves as `quantize_weight` gives them."""
        # A symmetric type has no zero point.
        names = (self.quant.weight.qtype, *SCALES)
        return {name: getattr(self, name)[...] for name in names if hasattr(self, name)}

    def project(self, x: Array) -> Array:
        """See weight.project."""
        return _project(self.quant, self.spec, x, self.leaves, self._array)

    def lookup(self, index: Array, dtype: Any) -> Array:
        """See weight.lookup."""
        # A table is packed along its rows (WeightSpec.packed), so the bytes and scales of a row
        # suffice.
        rows = {name: leaf[index] for name, leaf in self.leaves.items()}
        return dequantize(self._array(rows), dtype)

    def values(self, dtype: Any) -> Array:
        """See weight.values."""
        return dequantize(self._array(self.leaves), dtype).reshape(self.spec.shape)

    def experts(self, dtype: Any) -> Experts:
        """See weight.experts."""
        if not self.quant.low:
            return RoundedExperts(self.values(dtype), self.quant)
        matrices = self._array(self.leaves)
        return QuantizedExperts(matrices.qvalue.astype(dtype), matrices.scale, self.quant)

    def _array(self, leaves: Mapping[str, Array]) -> QArray:
        return _array(leaves, self.spec, self.quant.weight)


def quantize_weight(w: Array, spec: WeightSpec, quant: QuantSpec) -> dict[str, Array]:
    """Return the leaves that a StoredWeight keeps of a float weight [..., shape], with any stack
    dimensions in front. The values are named by their type, so that a checkpoint says what its
    bytes mean."""
    lead, qtype = w.shape[: w.ndim - len(spec.shape)], quant.weight.qtype
    # A stack is quantized at once: with channelwise axes each layer has scales of its own.
    q = quantize(w.reshape(*lead, *spec.matrix), quant.weight, len(lead) + spec.contracted)
    values = _pack(q.qvalue, spec.packed) if qtype in HALF else q.qvalue
    leaves = {qtype: values, "scale": q.scale}
    # A zero point has the type of the values, which may be XLA's int4: see HALF.
    return leaves if q.zero_point is None else leaves | {"zero_point": q.zero_point.astype("int8")}


def dequantize_weight(
    leaves: Mapping[str, Array | np.ndarray], spec: WeightSpec, quant: QuantSpec
) -> Array:
    """Return the float32 weight [..., shape] that the leaves of a StoredWeight stand for."""
    matrix = dequantize(_array(leaves, spec, quant.weight), jnp.float32)
    return matrix.reshape(*matrix.shape[: matrix.ndim - len(spec.matrix)], *spec.shape)


def _array(leaves: Mapping[str, Array | np.ndarray], spec: WeightSpec, how: Operand) -> QArray:
    """Return leaves as an array of Qwix."""
    values, zero = leaves[how.qtype], leaves.get("zero_point")
    if how.qtype in HALF:
        values = _unpack(values, spec.packed, HALF[how.qtype])
    zero = None if zero is None else zero.astype(values.dtype)
    # The others are told by the dtype of the values.
    qtype = how.qtype if how.qtype in ("nf4", "mxfp8", "mxfp4") else None
    return QArray(values, leaves["scale"], zero, qtype)


def _pack(x: Array, dim: int) -> Array:
    """Return uint8 whose halves are neighbours along a dimension, which is counted from the end."""
    # The bits, not the value: a negative int4 would set the upper half of the byte.
    nibbles = jax.lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
    # Neighbours share a byte, so that a shard of the bytes holds the values of a shard.
    pairs = nibbles.reshape(*x.shape[:dim], x.shape[dim] // 2, 2, *x.shape[x.ndim + dim + 1 :])
    low, high = jnp.split(pairs, 2, axis=dim)
    return (low | (high << 4)).squeeze(dim)


def _unpack(x: Array | np.ndarray, dim: int, dtype: Any) -> Array:
    pairs = jnp.stack([x & 15, x >> 4], axis=x.ndim + dim + 1)
    nibbles = pairs.reshape(*x.shape[:dim], 2 * x.shape[dim], *x.shape[x.ndim + dim + 1 :])
    return jax.lax.bitcast_convert_type(nibbles.astype(jnp.uint4), dtype)


def _project(
    quant: QuantSpec, spec: WeightSpec, x: Array, kept: Any, matrix: Callable[[Any], Any]
) -> Array:
    """Multiply x by the weight that `matrix` makes of `kept`.

    On a mesh, and for a StoredWeight, the backward pass makes the weight again instead of keeping
    the gathered or unpacked matrix until then.
    """
    rows = x.shape[: x.ndim - spec.contract]
    # Rows keep their dimensions on a mesh, which may split them over different axes, and where
    # tiles of positions lie along a sequence; else they become one (see weight.project).
    apart = current() or (quant.weight_grad and quant.weight_grad.tile)
    x = x.reshape(*(rows if apart else (math.prod(rows),)), -1)
    axes = gathered_axes(spec.matrix_axes)

    def run(x: Array, kept: Any) -> Array:
        return product(quant, axes, x, matrix(kept))

    if current() is not None or isinstance(kept, dict):
        # Keeping what `matrix` makes would hold every layer's weight unpacked, or gathered, until
        # the backward pass.
        run = jax.checkpoint(run, prevent_cse=False)
    return run(x, kept).reshape(*rows, *spec.shape[spec.contract :])
