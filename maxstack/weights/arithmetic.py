"""Matmuls of quantized operands on Qwix's arrays, and their gradients; what a rule says of each
operand is an `Operand`.

Shapes: K contracted, all of it in one dimension.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from qwix import QArray

from maxstack.layers.weight import multiply
from maxstack.sharding import constrain, current

Array = Any
BITS = {"int2": 2, "int3": 3, "int4": 4, "int5": 5, "int6": 6, "int7": 7, "int8": 8}


@dataclasses.dataclass(frozen=True)
class Operand:
    """QuantSpec one operand of a matmul is quantized."""

    qtype: str
    tile: int | float | None = None
    """Values along the contracted axis that share a scale, or the share of the axis; None: all."""
    method: str = "absmax"
    channelwise: bool = True
    """Each row (of activations and gradients) or column (of weights) has scales of its own."""

    @property
    def symmetric(self) -> bool:
        """Zero stands for zero, so the values can be multiplied before they are scaled."""
        method, *args = self.method.split(",")
        return method != "minmax" and not (
            method == "fixed" and len(args) == 2 and float(args[0]) + float(args[1])
        )

    @property
    def multiplies(self) -> bool:
        """The values can be multiplied before they are scaled; if not, they are scaled first."""
        return self.symmetric and self.qtype != "nf4"

    @property
    def clips(self) -> bool:
        """Values beyond the range have no gradient."""
        method, *args = self.method.split(",")
        return method not in ("absmax", "minmax") or bool(args and float(args[0]) < 1)


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """How a matmul is quantized: the operands of the forward pass, and the incoming gradient of the
    backward pass."""

    weight: Operand
    act: Operand | None = None
    grad: Operand | None = None
    """For the gradient of the activations."""
    weight_grad: Operand | None = None
    """For the gradient of the weights."""

    @property
    def low(self) -> bool:
        """The matmul itself runs in low precision."""
        return self.act is not None and self.act.multiplies and self.weight.multiplies


def quantize(x: jax.Array, how: Operand, *axes: int) -> QArray:
    """x in low precision, its scales float32; `axes` are contracted, tiles lie along the last of
    them. Calibration and rounding are done in float32, whatever x is."""
    contracted = [axis % x.ndim for axis in axes]
    others = tuple(i for i in range(x.ndim) if i not in contracted) if how.channelwise else ()
    tiles = {contracted[-1]: how.tile} if how.tile else {}
    return qwix.quantize(
        x.astype(jnp.float32),
        how.qtype,
        channelwise_axes=others,
        tiled_axes=tiles,
        calibration_method=how.method,
    )


def dequantize(x: Array, dtype: Any) -> jax.Array:
    """The values that a QArray stands for; other arrays as they are."""
    return (qwix.dequantize(x) if isinstance(x, QArray) else x).astype(dtype)


def inside(x: jax.Array, q: QArray, how: Operand) -> jax.Array:
    """Where x lies in the range that `q`, quantized from it, can tell apart."""
    low, high = _bounds(how)
    zero = 0.0 if q.zero_point is None else spread(q.zero_point.astype(jnp.float32), x.shape)
    scale = spread(q.scale, x.shape)
    return (x >= (low - zero) * scale) & (x <= (high - zero) * scale)


def _bounds(how: Operand) -> tuple[float, float]:
    if how.qtype == "nf4":
        return -1.0, 1.0
    if how.qtype in BITS:
        half = 2.0 ** (BITS[how.qtype] - 1)
        return (-half + 0.5, half - 0.5) if how.symmetric else (-half, half - 1)
    largest = float(
        jnp.finfo(
            {"mxfp8": "float8_e4m3fn", "mxfp4": "float4_e2m1fn"}.get(how.qtype, how.qtype)
        ).max
    )
    return -largest, largest


def spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The scale of each value of an array of `shape`."""
    for i, size in enumerate(shape):
        scale = (
            jnp.repeat(scale, size // scale.shape[i], axis=i) if scale.shape[i] != size else scale
        )
    return scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def faked(x: jax.Array, how: Operand, axis: int) -> jax.Array:
    """The values that x in low precision stands for, in x's dtype; the gradient passes straight
    through where x is in range."""
    return dequantize(quantize(x, how, axis), x.dtype)


def _faked_forward(x: jax.Array, how: Operand, axis: int) -> tuple[jax.Array, jax.Array | None]:
    q = quantize(x, how, axis)
    return dequantize(q, x.dtype), inside(x, q, how) if how.clips else None


def _faked_backward(
    how: Operand, axis: int, kept: jax.Array | None, g: jax.Array
) -> tuple[jax.Array]:
    return (g if kept is None else jnp.where(kept, g, 0),)


faked.defvjp(_faked_forward, _faked_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(how: QuantSpec, axes: str, x: jax.Array, w: Array) -> jax.Array:
    """x [..., K] times w [K, ...], an array in float32 or one that is quantized already -> [...,
    ...] in x's dtype.

    On a mesh the quantized weight, not the float one, is gathered along `embed`; `axes` are what is
    left. Gradients pass straight through the rounding. As in Qwix they are those of the float
    operands where the backward pass is not quantized, and of the quantized ones where it is.
    """
    return _forward(how, axes, x, w)[0]


def _forward(how: QuantSpec, axes: str, x: jax.Array, w: Array) -> tuple[jax.Array, Any]:
    qw = _gathered(w if isinstance(w, QArray) else quantize(w, how.weight, 0), axes)
    qx = quantize(x, how.act, -1) if how.act else None
    if how.low:
        out = qwix.dot_general(qx, qw, (((x.ndim - 1,), (0,)), ((), ()))).astype(x.dtype)
    else:
        out = multiply(x if qx is None else dequantize(qx, x.dtype), dequantize(qw, x.dtype))
    return out, (x, w, *((qx, qw) if how.grad else (None, None)))


def _backward(how: QuantSpec, axes: str, kept: Any, g: jax.Array) -> tuple[jax.Array, Any]:
    x, w, qx, qw = kept
    rows, columns = tuple(range(x.ndim - 1)), tuple(range(x.ndim - 1, g.ndim))
    stored = isinstance(w, QArray)
    y = (
        qw
        if how.grad and _whole(qw, how.weight, 0)
        else _gathered(w if stored else w.astype(x.dtype), axes)
    )
    dx = _times(g, y, (columns, tuple(range(1, w.ndim))), how.grad, x.dtype)
    if how.act and how.act.clips:
        dx = jnp.where(inside(x, quantize(x, how.act, -1), how.act), dx, 0)
    if stored:
        return dx, None
    y = qx if how.grad and how.act and _whole(qx, how.act, -1) else x
    dw = _times(g, y, (rows, rows), how.weight_grad, x.dtype)
    dw = jnp.moveaxis(dw, -1, 0).astype(w.dtype)
    if how.weight.clips:
        dw = jnp.where(inside(w, quantize(w, how.weight, 0), how.weight), dw, 0)
    return dx, dw


product.defvjp(_forward, _backward)


def _times(
    g: jax.Array,
    y: Array,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    how: Operand | None,
    dtype: Any,
) -> jax.Array:
    """The gradient times the other operand of the forward pass. Scales of a quantized one go into
    the gradient before it is quantized itself, because they lie along the contracted axes."""
    if how is None:
        return jax.lax.dot_general(g, dequantize(y, g.dtype), (contracted, ((), ())))
    if isinstance(y, QArray):
        place = dict(zip(*contracted, strict=True))
        scale = y.scale.transpose(
            *contracted[1], *(i for i in range(y.ndim) if i not in contracted[1])
        )
        scale = scale.reshape(
            [scale.shape[contracted[0].index(i)] if i in place else 1 for i in range(g.ndim)]
        )
        g, y = (
            g.astype(jnp.float32) * scale,
            QArray(y.qvalue, jnp.ones((1,) * y.ndim, jnp.float32), None, y.qtype),
        )
    q = quantize(g, how, *contracted[0])
    if not isinstance(y, QArray):
        return jax.lax.dot_general(dequantize(q, dtype), y.astype(dtype), (contracted, ((), ())))
    return qwix.dot_general(q, y, (contracted, ((), ()))).astype(dtype)


def _whole(q: QArray, how: Operand, axis: int) -> bool:
    """Whether the values along an axis share one scale, and can be multiplied before it."""
    return how.multiplies and q.scale.shape[axis] == 1


def _gathered(w: Array, axes: str) -> Array:
    """A weight where `axes` say; a dimension along which scales are fewer than values is whole on
    every device."""
    if current() is None:
        return w
    parts = axes.split()

    def place(leaf: jax.Array) -> jax.Array:
        return constrain(
            leaf,
            " ".join(
                axis if leaf.shape[i] == w.shape[i] else "norm" for i, axis in enumerate(parts)
            ),
        )

    return jax.tree.map(place, w)
