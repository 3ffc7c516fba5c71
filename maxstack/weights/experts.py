"""Experts whose rows and matrices are multiplied in low precision.

Rows arrive sorted by expert, and one grouped product multiplies each group by its expert's matrix.
The matrices are rounded before they get there, so their gradient has to pass through the numbers:
integers have none, so the quantized numbers travel as floats of the compute dtype (`codes`), which
hold each of them exactly. The backward products run in the compute dtype, on gradients that a rule
may round. Shapes: E experts  S rows sorted by expert  K contracted  N columns.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import qwix
from jax import Array
from qwix import QArray

from maxstack.kernels.grouped_matmul import grouped_matmul
from maxstack.kernels.grouped_matmul.case import group_mask
from maxstack.layers.weight import Experts
from maxstack.schema.kernels import GroupedMatmul
from maxstack.weights.arithmetic import (
    Operand,
    QuantSpec,
    clip_gradient,
    expand_scale,
    fake_quantize,
    in_range,
    quantize,
)


@flax.struct.dataclass
class QuantizedExperts(Experts):
    """Matrices in low precision, as numbers of the compute dtype, where `quant.low`."""

    codes_EKN: Array
    """Numbers to multiply before scaling."""
    scale_EKN: Array
    """float32; [E, K or its tiles or 1, N]."""
    quant: QuantSpec = flax.struct.field(pytree_node=False)

    def multiply(self, x_SK: Array, sizes_E: Array, backend: GroupedMatmul) -> Array:
        return _multiply(
            self.quant,
            backend,
            x_SK,
            self.codes_EKN,
            # Straight through: the scale is a constant of the gradient.
            jax.lax.stop_gradient(self.scale_EKN),
            sizes_E,
        )


@flax.struct.dataclass
class RoundedExperts(Experts):
    """Matrices rounded to low precision and multiplied in the compute dtype; a rule may round the
    rows too."""

    values_EKN: Array
    quant: QuantSpec = flax.struct.field(pytree_node=False)

    def multiply(self, x_SK: Array, sizes_E: Array, backend: GroupedMatmul) -> Array:
        # Not quant.low: nf4, zero points and rules of weights alone multiply rounded floats.
        rows_SK = fake_quantize(x_SK, self.quant.act, -1) if self.quant.act else x_SK
        return _in_compute_dtype(self.quant, backend, rows_SK, self.values_EKN, sizes_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_compute_dtype(
    quant: QuantSpec, backend: GroupedMatmul, x_SK: Array, w_EKN: Array, sizes_E: Array
) -> Array:
    return grouped_matmul(x_SK, w_EKN, sizes_E, backend)


def _rounded_gradients(
    quant: QuantSpec,
    backend: GroupedMatmul,
    saved: tuple[Array, Array, Array],
    g_SN: Array,
) -> tuple[Any, ...]:
    """Return gradients in the compute dtype, from incoming ones that a rule may round."""
    x_SK, w_EKN, sizes_E = saved
    pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes_E, backend), x_SK, w_EKN)[1]
    # Two pulls, because the two products contract different dimensions of g, so each rounds g by
    # scales of its own. XLA drops the half of each that is not used.
    dx_SK = pull(fake_quantize(g_SN, quant.grad, -1) if quant.grad else g_SN)[0]
    dw_EKN = pull(fake_quantize(g_SN, quant.weight_grad, 0) if quant.weight_grad else g_SN)[1]
    return dx_SK, dw_EKN, None


_in_compute_dtype.defvjp(
    lambda quant, backend, x, w, sizes: (grouped_matmul(x, w, sizes, backend), (x, w, sizes)),
    _rounded_gradients,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def codes(w_EKN: Array, how: Operand, dtype: Any) -> Array:
    """Return the quantized numbers of float32 matrices; the gradient passes straight through the
    rounding, divided by the scale."""
    return quantize(w_EKN, how, 1).qvalue.astype(dtype)


def _codes_forward(w_EKN: Array, how: Operand, dtype: Any) -> tuple[Array, Any]:
    q = quantize(w_EKN, how, 1)
    return q.qvalue.astype(dtype), (q.scale, in_range(w_EKN, q, how) if how.clips else None)


def _codes_backward(how: Operand, dtype: Any, saved: Any, g_EKN: Array) -> tuple[Array]:
    scale_EKN, within = saved
    # Undo the factor of `_backward`: the gradient of a code is that of the weight times its scale.
    g_EKN = g_EKN.astype(jnp.float32) / expand_scale(scale_EKN, g_EKN.shape)
    return (g_EKN if within is None else jnp.where(within, g_EKN, 0),)


codes.defvjp(_codes_forward, _codes_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(quant: QuantSpec, backend: GroupedMatmul, *operands: Array) -> Array:
    """Multiply rows [S, K] by codes [E, K, N] with their scale, in groups of sizes [E]: [S, N];
    rows of no group give zeros."""
    return _forward(quant, backend, *operands)[0]


def _forward(
    quant: QuantSpec, backend: GroupedMatmul, x_SK: Array, *rest: Array
) -> tuple[Array, Any]:
    codes_EKN, scale_EKN, sizes_E = rest
    assert quant.act
    grouped_S1 = group_mask(x_SK.shape[0], sizes_E)
    # Rows of no group may hold anything, and must not widen a scale that all rows share.
    x_SK = jnp.where(grouped_S1, x_SK, 0)
    qtype = quant.weight.qtype
    # Back to the stored dtype, exactly: only that is multiplied in low precision.
    w = QArray(codes_EKN.astype(_stored_dtype(qtype)), scale_EKN, None, qtype)
    out_SN = qwix.ragged_dot(quantize(x_SK, quant.act, -1), w, sizes_E)
    return jnp.where(grouped_S1, out_SN, 0).astype(x_SK.dtype), (x_SK, *rest)


def _backward(quant: QuantSpec, backend: GroupedMatmul, saved: Any, g_SN: Array) -> tuple[Any, ...]:
    """Return gradients as `_rounded_gradients` does."""
    x_SK, codes_EKN, scale_EKN, sizes_E = saved
    scales_EKN = expand_scale(scale_EKN, codes_EKN.shape)
    # The backward products run in the compute dtype, so the codes become values again.
    w_EKN = (codes_EKN.astype(jnp.float32) * scales_EKN).astype(x_SK.dtype)
    dx_SK, dw_EKN, _ = _rounded_gradients(quant, backend, (x_SK, w_EKN, sizes_E), g_SN)
    dcodes_EKN = (dw_EKN * scales_EKN).astype(codes_EKN.dtype)
    return clip_gradient(dx_SK, x_SK, quant.act, -1), dcodes_EKN, None, None


_multiply.defvjp(_forward, _backward)


def _stored_dtype(qtype: str) -> Any:
    """Return the dtype in which Qwix keeps values of a type."""
    return quantize(jnp.zeros((32, 1)), Operand(qtype, 32), 0).qvalue.dtype
