"""What a layer may read besides its input, the same for all layers of a step. Shapes: B batch  T time."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from maxstack.layers.config import RopeConfig

Table = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Context:
    """Positions and documents of the tokens, and what follows from them."""

    positions_BT: jax.Array
    """int32 [B or 1, T]: places within the document, from 0; in the order of kernels/sequences.py, as all that follows."""
    segments_BT: jax.Array | None = None
    """int32 [B, T]: equal numbers belong to one document, 0 is padding; None: one document a row, padding after it."""
    tables: Mapping[tuple[RopeConfig, int], Table] = dataclasses.field(default_factory=dict)
    """Cosines and sines by RoPE and head size."""
    kept: Mapping[str, tuple[jax.Array, jax.Array]] = dataclasses.field(default_factory=dict)
    """Keys and values of earlier layers, by block, for layers that have none of their own."""
    real_BT: jax.Array | None = None
    """bool [B, T]: what is no padding; None: nothing depends on it, or all is real."""


def _flat(context: Context) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Tables by their order: jax would sort their keys, which have none."""
    return (context.positions_BT, context.segments_BT, tuple(context.tables.values()), context.kept, context.real_BT), tuple(context.tables)


def _whole(keys: tuple[Any, ...], parts: tuple[Any, ...]) -> Context:
    positions_BT, segments_BT, tables, kept, real_BT = parts
    return Context(positions_BT, segments_BT, dict(zip(keys, tables, strict=True)), kept, real_BT)


jax.tree_util.register_pytree_node(Context, _flat, _whole)
