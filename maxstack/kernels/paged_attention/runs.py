"""Tiles of rows of one request, which backends compute together."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """Tiles of rows at consecutive positions of one request; R rows, as many tiles at most."""

    starts_R: jax.Array
    """The first row of each tile, in order; R beyond the last."""
    counts_R: jax.Array
    """Rows of each tile; 0 beyond the last."""
    tile_R: jax.Array
    """The tile of each row; of a row that is nobody's, any."""
    number: jax.Array
    """Number of tiles."""


def tiles(tables_RW: jax.Array, positions_R: jax.Array, size: int) -> Tiles:
    """Tiles of up to `size` rows; none has rows that are nobody's (position -1)."""
    rows = positions_R.shape[0]
    index_R = jnp.arange(rows)
    before_R = jnp.roll(positions_R, 1)
    same_R = (positions_R == before_R + 1) & (tables_RW == jnp.roll(tables_RW, 1, axis=0)).all(1)
    begin_R = jax.lax.cummax(jnp.where(same_R & (index_R > 0) & (positions_R > 0), 0, index_R))
    real_R = positions_R >= 0
    first_R = ((index_R - begin_R) % size == 0) & real_R
    tile_R = jnp.maximum(jnp.cumsum(first_R) - 1, 0)
    counts_R = jnp.zeros(rows, jnp.int32).at[tile_R].add(real_R)
    return Tiles(jnp.sort(jnp.where(first_R, index_R, rows)), counts_R, tile_R, first_R.sum())
