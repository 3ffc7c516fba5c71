"""The loop over blocks of rows, shared by all backends but the reference: logits exist for one
block at a time, and the gradient of the head is summed over blocks. Shapes: M rows  R rows of a
block  D embed  V vocab."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import Device
from maxstack.kernels.cross_entropy.request import Call, CrossEntropyCase, Gradients, Inputs
from maxstack.kernels.cross_entropy.softmax import multiply

BYTES = {"cpu": 8 << 20, "gpu": 1 << 30, "tpu": 512 << 20}
"""Size of a block's float32 logits: on a CPU, what its cache holds (with 16 or 32 MiB, head and
loss take 91 and not 94 ms of a step of 520); elsewhere, enough to make reading and writing the
head's gradient once a block cheap."""
LEAST, MOST = {"cpu": 256, "gpu": 1024, "tpu": 1024}, 8192


def rows_of(vocab: int, platform: str) -> int:
    """Default rows of a block, a power of two."""
    fit = BYTES[platform] // (4 * vocab)
    return min(MOST, max(LEAST[platform], 1 << max(0, fit.bit_length() - 1)))


def sizes(case: CrossEntropyCase) -> list[int]:
    """Rows of a block to measure, the default first."""
    default = rows_of(case.vocab, case.device.platform)
    # A block larger than all rows equals the block of all rows.
    others = (default // 2, default * 2)
    return [default, *(rows for rows in others if 64 <= rows < 2 * case.rows)]


def map_rows(step: Callable[..., Any], inputs: Inputs, call: Call) -> Any:
    """Apply `step` to each block of x and targets -> its results for all rows."""
    return _loop(
        lambda _, block: (None, step(*block)), None, (inputs.x_MD, inputs.targets_M), inputs, call
    )[1]


def map_rows_with_gradients(
    step: Callable[..., Any], inputs: Inputs, call: Call, per_row: tuple[jax.Array, ...]
) -> tuple[Any, Gradients]:
    """`step` maps a block of x and of `per_row` arrays [M] to (results, gradient of the logits
    [R, V]) -> (results of all rows, gradients). Gradients of logits are multiplied in x's dtype.
    """
    biased = inputs.bias_V is not None

    def block(sums: tuple[Any, Any], block: tuple[jax.Array, ...]) -> Any:
        d_head, d_bias = sums
        x_RD, x_DR, *rows = block
        results, d_RV = step(x_RD, *rows)
        # Multiplied in x's dtype, as gradients of other
        # weights are; the sum over blocks stays float32.
        d_RV = d_RV.astype(x_RD.dtype)
        if biased:
            d_bias = d_bias + d_RV.astype(d_bias.dtype).sum(axis=0)
        d_x = multiply(d_RV, inputs.head_DV, (1, 1)).astype(x_RD.dtype)
        return (d_head + multiply(x_DR, d_RV), d_bias), (results, d_x)

    dtype = jnp.promote_types(inputs.x_MD.dtype, jnp.float32)
    shape = inputs.head_DV.shape
    # The head's gradient is one array for all blocks, read and written once a block.
    zero = jnp.zeros(shape, dtype), jnp.zeros(shape[1:], dtype) if biased else None
    (d_head, d_bias), (results, d_x) = _loop(
        block, zero, (inputs.x_MD, *per_row), inputs, call, columns=True
    )
    return results, Gradients(d_x, d_head, d_bias)


def _loop(
    block: Callable[..., Any],
    sums: Any,
    arrays: tuple[jax.Array, ...],
    inputs: Inputs,
    call: Call,
    columns: bool = False,
) -> tuple[Any, Any]:
    """A scan over blocks of equal size, the last filled up with zeros, which weigh nothing. With
    `columns` a block of the first array comes as [D, R] too: on a CPU XLA's products are faster
    where they sum over the last dimension of their first operand."""
    most = call.blocks.get("rows") or rows_of(inputs.head_DV.shape[1], Device.here().platform)
    rows = arrays[0].shape[0]
    count = -(-rows // most)
    # Blocks of equal size need less padding than full blocks and a remainder.
    size = -(-rows // count)
    size += -size % 8

    def cut(a: jax.Array) -> jax.Array:
        padded = jnp.pad(a, ((0, count * size - rows), *((0, 0),) * (a.ndim - 1)))
        return padded.reshape(count, size, *a.shape[1:])

    blocks = arrays if count == 1 else tuple(map(cut, arrays))
    if columns:
        blocks = blocks[0], blocks[0].swapaxes(-2, -1), *blocks[1:]
    if count == 1:
        return block(sums, blocks)
    sums, results = jax.lax.scan(block, sums, blocks)
    return sums, jax.tree.map(lambda a: a.reshape(count * size, *a.shape[2:])[:rows], results)
