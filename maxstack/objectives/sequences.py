"""Sums over the sequences of packed rows, within the rows. Shapes: B batch  T time.

Every array is in natural order; values of a sequence, or of a pair of them, are at its last
position.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Pair(NamedTuple):
    """Sums over the two answers of each pair, at the pair's last position [B, T]."""

    chosen: Array
    rejected: Array

    def where(self, counts_BT: Array, otherwise: float) -> "Pair":
        """The sums where `counts_BT` is true, `otherwise` elsewhere."""
        chosen = jnp.where(counts_BT, self.chosen, otherwise)
        return Pair(chosen, jnp.where(counts_BT, self.rejected, otherwise))


def pairs_of(segments_BT: Array) -> Array:
    """The number of the pair of each position, in rows of pairs alone: segments 1 and 2 are pair 1;
    0 in padding."""
    return (segments_BT + 1) // 2


def count_pairs(segments_BT: Array) -> Array:
    """Number of pairs of all rows, float32."""
    return is_last(pairs_of(segments_BT)).sum().astype(jnp.float32)


def is_rejected(segments_BT: Array) -> Array:
    """True in the second sequence of each pair, the rejected answer."""
    return (segments_BT > 0) & (segments_BT % 2 == 0)


def is_last(groups_BT: Array) -> Array:
    """True at the last position of each group of equal numbers that are not 0."""
    # 0 after the end, so that a sequence ends with its row.
    after_BT = jnp.pad(groups_BT[:, 1:], ((0, 0), (0, 1)))
    return (groups_BT > 0) & (groups_BT != after_BT)


def running_sums(x_BT: Array, groups_BT: Array) -> Array:
    """Sum of x over a group up to each position, that included; at its last position, over all of
    it. Added up as a tree, in the same order on every device."""
    # -1 is no group, so the first position begins one.
    before_BT = jnp.pad(groups_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)

    def add(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        (left_begins, left_sum), (right_begins, right_sum) = left, right
        total = jnp.where(right_begins, right_sum, left_sum + right_sum)
        return left_begins | right_begins, total

    # Not a difference of sums from the start of the row: that rounds by what stands before.
    return jax.lax.associative_scan(add, (groups_BT != before_BT, x_BT), axis=1)[1]


def broadcast_last(x_BT: Array, groups_BT: Array) -> Array:
    """At every position, the value at the last position of its group."""
    at_last_BT = jnp.where(is_last(groups_BT), x_BT, 0)
    # Backwards, the last position comes first, and the sum carries its value to the others.
    return jnp.flip(running_sums(jnp.flip(at_last_BT, 1), jnp.flip(groups_BT, 1)), 1)


def pair_sums(x_BT: Array, segments_BT: Array) -> Pair:
    """Sums of x over both answers of each pair, the chosen one first."""
    pairs_BT, rejected_BT = pairs_of(segments_BT), is_rejected(segments_BT)
    return Pair(
        running_sums(jnp.where(rejected_BT, 0, x_BT), pairs_BT),
        running_sums(jnp.where(rejected_BT, x_BT, 0), pairs_BT),
    )
