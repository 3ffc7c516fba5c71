"""A block of rows at a time: what every backend but the reference does around its logits.

The loss is linear in known weights, so a block's gradients can be made while its logits are there
(Hsu et al. 2024, arXiv:2410.10989): no logits are kept or made twice. Shapes: M rows  R rows of a
block  D embed  V vocab.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import Device
from maxstack.kernels.cross_entropy.request import Case, Gradients
from maxstack.kernels.cross_entropy.softmax import multiply

BYTES = {"cpu": 8 << 20, "gpu": 1 << 30, "tpu": 512 << 20}
"""Of a block's float32 logits: on a CPU what its cache holds; elsewhere so much that reading and
writing the head's gradient for each is little."""
LEAST, MOST = {"cpu": 256, "gpu": 1024, "tpu": 1024}, 8192


def rows_of(vocab: int, platform: str) -> int:
    """How many rows a block has by default, a power of two."""
    fit = BYTES[platform] // (4 * vocab)
    return min(MOST, max(LEAST[platform], 1 << max(0, fit.bit_length() - 1)))


def sizes(case: Case) -> list[int]:
    """Rows of a block worth measuring, the default first."""
    usual = rows_of(case.vocab, case.device.platform)
    return [usual, *(rows for rows in (usual // 2, usual * 2) if 64 <= rows < 2 * case.rows)]


def scores_by_rows(
    step: Callable[..., Any], given: tuple[jax.Array, ...], vocab: int, rows: int | None
) -> Any:
    """What `step` gives for a block of `given` [M, ...], for all rows."""
    return _loop(
        lambda _, block: (None, step(*block)),
        None,
        given,
        rows or rows_of(vocab, Device.here().platform),
    )[1]


def graded_by_rows(
    step: Callable[..., Any],
    x_MD: jax.Array,
    head_DV: jax.Array,
    given: tuple[jax.Array, ...],
    bias: bool,
    rows: int | None,
) -> tuple[Any, Gradients]:
    """`step` maps a block of x and of `given` [M, ...] to (results, gradient of the logits [R, V])
    -> (results of all rows, gradients).

    The head comes in x's dtype, in which gradients of logits are multiplied.
    """

    def block(sums: tuple[Any, Any], block: tuple[jax.Array, ...]) -> Any:
        (head, of_bias), (x_RD, *more) = sums, block
        found, d_RV = step(x_RD, *more)
        d_RV = d_RV.astype(x_RD.dtype)
        of_bias = of_bias + d_RV.astype(of_bias.dtype).sum(axis=0) if bias else None
        return (head + multiply(x_RD, d_RV, (0, 0)), of_bias), (
            found,
            multiply(d_RV, head_DV, (1, 1)).astype(x_RD.dtype),
        )

    number = jnp.promote_types(x_MD.dtype, jnp.float32)
    zero = jnp.zeros(head_DV.shape, number), jnp.zeros(head_DV.shape[1:], number) if bias else None
    (head, of_bias), (found, x) = _loop(
        block, zero, (x_MD, *given), rows or rows_of(head_DV.shape[1], Device.here().platform)
    )
    return found, Gradients(x, head, of_bias)


def _loop(
    block: Callable[..., Any], sums: Any, given: tuple[jax.Array, ...], most: int
) -> tuple[Any, Any]:
    """A scan over blocks of equal size, the last filled up with zeros, which weigh nothing."""
    count = given[0].shape[0]
    number = -(-count // most)
    if number == 1:
        return block(sums, given)
    size = -(-count // number)
    size += -size % 8

    def cut(a: jax.Array) -> jax.Array:
        return jnp.pad(a, ((0, number * size - count), *((0, 0),) * (a.ndim - 1))).reshape(
            number, size, *a.shape[1:]
        )

    sums, found = jax.lax.scan(block, sums, jax.tree.map(cut, given))
    return sums, jax.tree.map(lambda a: a.reshape(number * size, *a.shape[2:])[:count], found)
