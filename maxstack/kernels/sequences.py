"""Sequences that are split over devices: their mesh axes, the order of their parts, and collectives
that gather whole sequences and split them again.

With `mesh.context_kind: ulysses` parts are in natural order, and all-to-alls give each device whole
sequences of some heads. With `ring`, a sequence is cut into 2C chunks for C devices, and device i
holds chunks i and 2C-1-i, so that all devices have equally many pairs of a query and an earlier
key. That order is made once a step, for tokens and all that follows from them (`arrange`), and
undone where natural order counts (`natural`), by two sends a device.

Shapes: B batch  T time  N heads  K kv heads  S time of keys  H head dim. `axes` are the mesh axes
that split sequences; functions that take them run on one device's part, inside
`sharding.per_device`, and their shapes are that part's.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.schema.mesh import Axes as RuleAxes
from maxstack.schema.mesh import names

Axes = tuple[str, ...]


def sequence_axes() -> Axes:
    """The mesh axes that split sequences; none on one device."""
    return sharding.split(sharding.here("batch seq")[1]) if sharding.current() else ()


def context_kind() -> str | None:
    """ring or ulysses where sequences are split, else None."""
    current = sharding.current()
    return current[1].context_kind if current and sequence_axes() else None


def spec_of(x: jax.Array) -> PartitionSpec:
    """The sharding of per-position numbers [B or 1, T, ..]; a single row is replicated."""
    batch, seq = sharding.here("batch seq")
    # One row stands for all of the batch, so every device needs it.
    return PartitionSpec(batch if x.shape[0] > 1 else None, seq)


def arrange(x: Any) -> Any:
    """Move arrays [B or 1, T, ..] from natural order into the order of the devices, which differs
    only in a ring. None stays None."""
    return jax.tree.map(lambda x_BT: _reorder(x_BT, back=False), x)


def natural(x: Any) -> Any:
    """The inverse of `arrange`."""
    return jax.tree.map(lambda x_BT: _reorder(x_BT, back=True), x)


def zigzag(parts: int) -> tuple[int, ...]:
    """The 2 * parts chunks of a sequence in the order in which the devices of a ring hold them."""
    return tuple(chunk for part in range(parts) for chunk in (part, 2 * parts - 1 - part))


def _reorder(x_BT: jax.Array, back: bool) -> jax.Array:
    """Send each device's even chunk to one device and its odd chunk to another."""
    axes = sequence_axes()
    if context_kind() != "ring":
        return x_BT
    parts = sharding.size_of(*axes)
    # i and 2C-1-i differ in parity: every device holds one even and one odd chunk, so two
    # permutations move them all.
    holder = {chunk: i // 2 for i, chunk in enumerate(zigzag(parts))}
    even = [(part, holder[2 * part]) for part in range(parts)]
    odd = [(part, holder[2 * part + 1]) for part in range(parts)]
    # The way back is the inverse of both permutations.
    if back:
        even = [(target, source) for source, target in even]
        odd = [(target, source) for source, target in odd]

    def local(x_BT: jax.Array) -> jax.Array:
        first, second = jnp.split(x_BT, 2, axis=1)
        # A device's earlier chunk is number i, so the even one comes first where i is even.
        swap = jax.lax.axis_index(axes) % 2 == 1

        def in_order(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.where(swap, second, first), jnp.where(swap, first, second)

        # Even and odd chunks are what is sent: told apart before they leave, or put in order after.
        if back:
            first, second = in_order(first, second)
        first = jax.lax.ppermute(first, axes, even)
        second = jax.lax.ppermute(second, axes, odd)
        return jnp.concatenate((first, second) if back else in_order(first, second), axis=1)

    return sharding.per_device(local, spec_of(x_BT), spec_of(x_BT))(x_BT)


def to_heads(x_BTNH: jax.Array, axes: Axes) -> jax.Array:
    """[B, T, N, ..] -> [B, parts T, N / parts, ..]: whole sequences of this device's share of the
    heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509)."""
    # An all-to-all moves each part once; gathering whole sequences would send it to every device.
    return jax.lax.all_to_all(x_BTNH, axes, split_axis=2, concat_axis=1, tiled=True)


def to_parts(x_BTNH: jax.Array, axes: Axes) -> jax.Array:
    """The inverse of `to_heads`: [B, parts T, N / parts, ..] -> [B, T, N, ..]."""
    return jax.lax.all_to_all(x_BTNH, axes, split_axis=1, concat_axis=2, tiled=True)


def repeat_kv_heads(x_BSKH: jax.Array, axes: Axes, axis: int = 2) -> jax.Array:
    """Repeat kv heads along `axis`, until `to_heads` and `slice_heads` give each device those of
    its queries."""
    kv = x_BSKH.shape[axis]
    # The least number of heads that kv heads and devices both divide.
    return jnp.repeat(x_BSKH, math.lcm(kv, jax.lax.axis_size(axes)) // kv, axis=axis)


def slice_heads(x_N: jax.Array, axes: Axes, axis: int = 0) -> jax.Array:
    """The part of an array with heads along `axis` that belongs to this device after `to_heads`."""
    size = x_N.shape[axis] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x_N, jax.lax.axis_index(axes) * size, size, axis)


def gather_sequences(x_BT: jax.Array, axes: Axes) -> jax.Array:
    """[B, T, ..] -> [B, parts T, ..]: all parts of each sequence, in the order of the devices."""
    return jax.lax.all_gather(x_BT, axes, axis=1, tiled=True)


def head_axes(heads: int, kv: int) -> tuple[RuleAxes, RuleAxes, Axes]:
    """(mesh axes that split query heads, those that split kv heads, those that split query heads
    alone, for `kv_heads_of_queries`)."""
    of_heads, of_kv = sharding.here("batch seq heads")[2], sharding.here("batch seq kv_heads")[2]
    if heads == kv:
        of_kv = of_heads
    outer = names(of_kv)
    # A device's kv heads are those of its query heads only if their axes begin alike.
    if names(of_heads)[: len(outer)] != outer:
        of_kv, outer = None, ()
    return of_heads, of_kv, sharding.split(names(of_heads)[len(outer) :])


def kv_heads_of_queries(
    x_BSKH: jax.Array, queries: int, groups: int, axes: Axes, axis: int = 2
) -> jax.Array:
    """The kv heads, along `axis`, of the `queries` query heads of this device, where `axes` split
    query heads alone and `groups` of them share a kv head."""
    if not axes:
        return x_BSKH
    numbers = kv_head_numbers(queries, groups, axes)
    # A device's query heads begin in the middle of a
    # group: no slice holds their kv heads, one each.
    if queries % groups and groups % queries:
        return jnp.take(x_BSKH, numbers, axis=axis)
    return jax.lax.dynamic_slice_in_dim(x_BSKH, numbers[0], numbers.size, axis=axis)


def kv_head_numbers(queries: int, groups: int, axes: Axes) -> jax.Array:
    """Numbers of these kv heads: consecutive ones, each once, where a device's query heads divide
    evenly among them, else one for each query head."""
    first = jax.lax.axis_index(axes) * queries
    if queries % groups and groups % queries:
        return (first + jnp.arange(queries)) // groups
    return first // groups + jnp.arange(max(1, queries // groups))
