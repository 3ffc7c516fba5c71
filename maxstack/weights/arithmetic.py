"""Matmuls of quantized operands on Qwix's arrays, and their gradients.

`product` is the one matmul. Forward, it rounds both operands and multiplies them in low precision
where both allow it, else in the compute dtype. Backward, it rounds the incoming gradient by the
rule's own types; gradients pass straight through the rounding, and are zero where it clips.
Qwix's interception of dot_general would do the same from outside, but it takes two to four times as
long to trace, finds weights by the shapes of tracers, reaches neither experts nor the head, and its
tiles depend on how a mesh splits a contraction. Shapes: K contracted, all of it in one dimension.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from jax import Array
from qwix import QArray

from maxstack.layers.weight import multiply
from maxstack.sharding import constrain, current

MaybeQuantized = Any
"""An array or a QArray."""
BITS = {f"int{bits}": bits for bits in range(2, 9)}
FLOATS = {"mxfp8": "float8_e4m3fn", "mxfp4": "float4_e2m1fn"}


@dataclasses.dataclass(frozen=True)
class Operand:
    """Quantization of one operand of a matmul."""

    qtype: str
    tile: int | float | None = None
    """Number of values along the contracted axis that share a scale, or that share of the axis;
    None: all of them."""
    method: str = "absmax"
    channelwise: bool = True
    """Each row of activations and gradients, or column of weights, has its own scales."""

    @property
    def symmetric(self) -> bool:
        """True where zero stands for zero, so no zero point is needed."""
        method, *args = self.method.split(",")
        # "fixed,LOW,HIGH" is symmetric only where the bounds cancel.
        if method == "fixed" and len(args) == 2:
            return float(args[0]) + float(args[1]) == 0
        return method != "minmax"

    @property
    def multiplies(self) -> bool:
        """True where values can be multiplied before they are scaled."""
        # Numbers of nf4 are indices into a table of 16 unevenly spaced values (arXiv:2305.14314).
        return self.symmetric and self.qtype != "nf4"

    @property
    def clips(self) -> bool:
        """True where values can lie beyond the range; these have no gradient."""
        method, *args = self.method.split(",")
        # absmax and minmax reach the largest value, unless a factor below 1 narrows their range.
        return method not in ("absmax", "minmax") or bool(args and float(args[0]) < 1)


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """Quantization of a matmul: of its operands, and of the incoming gradient in the backward
    pass."""

    weight: Operand
    act: Operand | None = None
    grad: Operand | None = None
    """The incoming gradient, for the gradient of the activations."""
    weight_grad: Operand | None = None
    """The incoming gradient, for the gradient of the weights."""

    @property
    def low(self) -> bool:
        """True where the matmul itself runs in low precision."""
        return self.act is not None and self.act.multiplies and self.weight.multiplies


def quantize(x: Array, how: Operand, *axes: int) -> QArray:
    """Quantize x, with scales in float32; `axes` are contracted, and tiles lie along the last of
    them. Calibration and rounding run in float32, whatever the dtype of x."""
    contracted = [axis % x.ndim for axis in axes]
    others = tuple(i for i in range(x.ndim) if i not in contracted)
    return qwix.quantize(
        # Qwix gives scales the dtype of x, and a scale rounded to bfloat16 moves every value that
        # it scales.
        x.astype(jnp.float32),
        how.qtype,
        channelwise_axes=others if how.channelwise else (),
        tiled_axes={contracted[-1]: how.tile} if how.tile else {},
        calibration_method=how.method,
    )


def dequantize(x: MaybeQuantized, dtype: Any) -> Array:
    """Return the values that a QArray stands for, or another array, in `dtype`."""
    return (qwix.dequantize(x) if isinstance(x, QArray) else x).astype(dtype)


def in_range(x: Array, q: QArray, how: Operand) -> Array:
    """Return True where x lies in the range of `q`, its quantized values."""
    low, high = _bounds(how)
    zero = 0.0 if q.zero_point is None else expand_scale(q.zero_point.astype(jnp.float32), x.shape)
    scale = expand_scale(q.scale, x.shape)
    return (x >= (low - zero) * scale) & (x <= (high - zero) * scale)


def clip_gradient(gradient: Array, x: Array, how: Operand | None, axis: int) -> Array:
    """Return the gradient of x, zero where quantizing clips x."""
    if how is None or not how.clips:
        return gradient
    return jnp.where(in_range(x, quantize(x, how, axis), how), gradient, 0)


def _bounds(how: Operand) -> tuple[float, float]:
    if how.qtype == "nf4":
        return -1.0, 1.0
    if how.qtype in BITS:
        half = 2.0 ** (BITS[how.qtype] - 1)
        # Qwix maps the largest value of a symmetric type half a step beyond the largest integer
        # (127.5 for int8), so that the last bucket is as wide as the others.
        return (-half + 0.5, half - 0.5) if how.symmetric else (-half, half - 1)
    largest = float(jnp.finfo(FLOATS.get(how.qtype, how.qtype)).max)
    return -largest, largest


def expand_scale(scale: Array, shape: tuple[int, ...]) -> Array:
    """Return the scale of each value of an array of `shape`."""
    for i, size in enumerate(shape):
        if scale.shape[i] != size:
            scale = jnp.repeat(scale, size // scale.shape[i], axis=i)
    return scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def fake_quantize(x: Array, how: Operand, axis: int) -> Array:
    """Round x to low precision and back, in x's dtype; the gradient passes straight through where x
    is in range."""
    return dequantize(quantize(x, how, axis), x.dtype)


def _fake_forward(x: Array, how: Operand, axis: int) -> tuple[Array, Array | None]:
    q = quantize(x, how, axis)
    # Without clipping all values are in range, and no mask is kept for the backward pass.
    return dequantize(q, x.dtype), in_range(x, q, how) if how.clips else None


def _fake_backward(how: Operand, axis: int, within: Array | None, g: Array) -> tuple[Array]:
    return (g if within is None else jnp.where(within, g, 0),)


fake_quantize.defvjp(_fake_forward, _fake_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(quant: QuantSpec, axes: str, x: Array, w: MaybeQuantized) -> Array:
    """Multiply x [..., K] by w [K, ...], a float32 array or a QArray: [..., ...] in x's dtype.

    On a mesh the quantized weight, not the float one, is gathered along `embed`; `axes` are the
    logical axes of the gathered weight. Gradients pass straight through the rounding. As in Qwix
    they are those of the float operands where the backward pass is not quantized, and of the
    quantized ones where it is.
    """
    return _forward(quant, axes, x, w)[0]


def _forward(quant: QuantSpec, axes: str, x: Array, w: MaybeQuantized) -> tuple[Array, Any]:
    qw = _gather(w if isinstance(w, QArray) else quantize(w, quant.weight, 0), axes)
    qx = quantize(x, quant.act, -1) if quant.act else None
    # The numbers are multiplied first and scaled afterwards, so the matmul itself is in low
    # precision.
    if quant.low:
        out = qwix.dot_general(qx, qw, (((x.ndim - 1,), (0,)), ((), ()))).astype(x.dtype)
    else:
        # Rules of weights alone, zero points and nf4: rounded values are multiplied in the compute
        # dtype.
        out = multiply(x if qx is None else dequantize(qx, x.dtype), dequantize(qw, x.dtype))
    # Rounded operands are kept only for a rounded backward pass; a float one differentiates by the
    # float operands, as Qwix does.
    return out, (x, w, *((qx, qw) if quant.grad else (None, None)))


def _backward(quant: QuantSpec, axes: str, saved: Any, g: Array) -> tuple[Array, Any]:
    x, w, qx, qw = saved
    # g has the leading dimensions of x, then the output dimensions of w.
    rows, columns = tuple(range(x.ndim - 1)), tuple(range(x.ndim - 1, g.ndim))
    stored = isinstance(w, QArray)
    # Tiles along K give a column several scales, which cannot all move into g (see _times); the
    # float weight is multiplied then.
    if quant.grad and _one_scale(qw, quant.weight, 0):
        y = qw
    else:
        y = _gather(w if stored else w.astype(x.dtype), axes)
    dx = _times(g, y, (columns, tuple(range(1, w.ndim))), quant.grad, x.dtype)
    dx = clip_gradient(dx, x, quant.act, -1)
    # A stored weight is frozen, and its integers have no gradient.
    if stored:
        return dx, None
    # Not x: with the float activations here, the weight's gradient was not Qwix's (EXPERIMENTS.md,
    # "Quantized training").
    y = qx if quant.grad and quant.act and _one_scale(qx, quant.act, -1) else x
    dw = _times(g, y, (rows, rows), quant.weight_grad, x.dtype)
    # dot_general puts the free dimensions of g first and K last; w has K first.
    return dx, clip_gradient(jnp.moveaxis(dw, -1, 0).astype(w.dtype), w, quant.weight, 0)


product.defvjp(_forward, _backward)


def _times(
    g: Array,
    y: MaybeQuantized,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    how: Operand | None,
    dtype: Any,
) -> Array:
    """Multiply the gradient by the other operand of the forward pass. Scales of a quantized operand
    go into the gradient before that is quantized, because they lie along the contracted axes."""
    dims = (contracted, ((), ()))
    if how is None:
        return jax.lax.dot_general(g, dequantize(y, g.dtype), dims)
    if not isinstance(y, QArray):
        q = dequantize(quantize(g, how, *contracted[0]), dtype)
        return jax.lax.dot_general(q, y.astype(dtype), dims)
    # Lay the scales along the dimensions of g, with 1 where g is not contracted.
    sizes = dict(zip(contracted[0], (y.scale.shape[i] for i in contracted[1]), strict=True))
    others = (i for i in range(y.ndim) if i not in contracted[1])
    scale = y.scale.transpose(*contracted[1], *others)
    scale = scale.reshape([sizes.get(i, 1) for i in range(g.ndim)])
    q = quantize(g.astype(jnp.float32) * scale, how, *contracted[0])
    # The scales are in q already; with them here, each would count twice.
    unscaled = QArray(y.qvalue, jnp.ones((1,) * y.ndim, jnp.float32), None, y.qtype)
    return qwix.dot_general(q, unscaled, dims).astype(dtype)


def _one_scale(q: QArray, how: Operand, axis: int) -> bool:
    """Return True where values along an axis share one scale and can be multiplied before it."""
    return how.multiplies and q.scale.shape[axis] == 1


def _gather(w: MaybeQuantized, axes: str) -> MaybeQuantized:
    """Constrain a weight to the sharding of `axes`. A dimension with fewer scales than values is
    whole on every device."""
    # One device holds the whole weight.
    if current() is None:
        return w

    def pin(leaf: Array) -> Array:
        sizes = zip(axes.split(), leaf.shape, w.shape, strict=True)
        own = [axis if size == whole else "norm" for axis, size, whole in sizes]
        return constrain(leaf, " ".join(own))

    return jax.tree.map(pin, w)
