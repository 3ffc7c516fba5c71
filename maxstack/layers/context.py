"""Inputs that all layers of a step share besides the residual stream.

Random numbers depend on the item that they are drawn for, never on a device: dropout's depend on
seed, step, row of the global batch, position in natural order, layer and weight. A row's key comes
with the batch, and positions and repetitions are folded into it here, so that microbatches, stages
and the order of a ring change nothing. Shapes: B batch  T time."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from maxstack.layers.cache import LayerCache
from maxstack.schema.mixers import RopeConfig
from maxstack.sharding import holding

Table = tuple[Array, Array]
_keys: contextvars.ContextVar[Array | None] = contextvars.ContextVar("keys", default=None)


@dataclasses.dataclass(frozen=True)
class Context:
    """Positions and documents of the tokens, and tables and keys made from them."""

    positions_BT: Array
    """int32 [B or 1, T]: positions within the document, from 0. Like all arrays here, in the order
    of kernels/sequences.py."""
    segments_BT: Array | None = None
    """int32 [B, T]: numbers of documents, 0 for padding; None: one document a row, then padding."""
    tables: Mapping[tuple[RopeConfig, int], Table] = dataclasses.field(default_factory=dict)
    """Cosines and sines by RoPE and head size."""
    kept: Mapping[str, tuple[Array, Array]] = dataclasses.field(default_factory=dict)
    """Keys and values of earlier layers, by block, for layers that have none of their own."""
    real_BT: Array | None = None
    """bool [B, T]: False for padding; None: nothing depends on it, or there is none."""
    cache: LayerCache | None = None
    """The KV cache of the layer that is being computed; None in training."""
    keys_BT2: Array | None = None
    """uint32 [B, T, 2]: random keys of row and position, with the repetition of the pattern folded
    in; None: nothing is drawn."""

    condition_BD: Array | None = None
    """The condition that adaptive norms read; None: there are none, or each block makes its own
    from a time and a class."""
    time_B1: Array | None = None
    """float32: times from 0 to 1000."""
    label_B1: Array | None = None
    """int32: classes."""

    def draw_with_keys(self) -> contextlib.AbstractContextManager[None]:
        """Draw random numbers with these keys inside."""
        return holding(_keys, self.keys_BT2)

    def in_repetition(self, index: Array) -> "Context":
        """The context in repetition `index` of the pattern."""
        if self.keys_BT2 is None:
            return self
        return dataclasses.replace(self, keys_BT2=_fold_in(self.keys_BT2, index))


def position_keys() -> Array | None:
    """The keys [B, T, 2] of the positions that are being computed; None where nothing is drawn."""
    return _keys.get()


def position_keys_of(rows_B2: Array, length: int) -> Array:
    """Random keys of rows -> random keys of their positions [B, T, 2], in natural order."""
    return _fold_in(rows_B2[:, None], jnp.arange(length))


def _fold_in(keys: Array, number: Array) -> Array:
    """Raw keys [..., 2], each with a number folded in; both are broadcast."""

    def folded(key: Array, number: Array) -> Array:
        # Raw keys travel, since they are arrays that can
        # be split over a mesh and reordered in a ring.
        whole = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(whole, number))

    # Keys of rows [B, 1] with positions [T] give [B, T]; with one repetition they keep their shape.
    return jnp.vectorize(folded, signature="(k),()->(k)")(keys, number)


def _flatten(context: Context) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Flatten tables by position: jax would sort their keys, which have no order."""
    tables = context.tables
    return (
        context.positions_BT,
        context.segments_BT,
        tuple(tables.values()),
        context.kept,
        context.real_BT,
        context.keys_BT2,
        context.condition_BD,
        context.time_B1,
        context.label_B1,
    ), tuple(tables)


def _unflatten(keys: tuple[Any, ...], parts: tuple[Any, ...]) -> Context:
    positions_BT, segments_BT, tables, kept, real_BT, *others = parts
    named = dict(zip(keys, tables, strict=True))
    # The cache is left out: layers of inference are unrolled, so no scan or checkpoint sees it.
    return Context(positions_BT, segments_BT, named, kept, real_BT, None, *others)


jax.tree_util.register_pytree_node(Context, _flatten, _unflatten)
