"""Tiles: rows at consecutive positions of one request, which backends compute together."""

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
    """The tile of each row; of a row in no tile, any."""
    number: jax.Array
    """Number of tiles."""


def tiles(tables_RW: jax.Array, positions_R: jax.Array, size: int) -> Tiles:
    """Tiles of up to `size` rows; none has unused rows (position -1)."""
    inside_R, _ = _runs(tables_RW, positions_R)
    return _tiles(inside_R % size == 0, positions_R >= 0)


def long_and_short_tiles(
    tables_RW: jax.Array, positions_R: jax.Array, long: int, short: int
) -> tuple[Tiles, Tiles]:
    """(tiles of more than `short` and up to `long` rows, tiles of up to `short` for the other
    rows)."""
    # A run's rest that is no longer than a short tile is
    # computed as one, not as a long one with few rows.
    inside_R, left_R = _runs(tables_RW, positions_R)
    begun_R = inside_R % long
    long_R, real_R = begun_R + left_R > short, positions_R >= 0
    return (
        _tiles(begun_R == 0, real_R & long_R),
        _tiles(begun_R % short == 0, real_R & ~long_R),
    )


def _runs(tables_RW: jax.Array, positions_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The number of rows in a row's run (same request, consecutive positions) before it, and from
    it on."""
    rows = positions_R.shape[0]
    index_R = jnp.arange(rows)
    same_R = positions_R == jnp.roll(positions_R, 1) + 1
    same_R &= (tables_RW == jnp.roll(tables_RW, 1, axis=0)).all(1)
    # `roll` makes the first row follow the last; and a request's first token, at 0, is no successor
    # of an unused row, at -1.
    same_R &= (index_R > 0) & (positions_R > 0)
    begin_R = jax.lax.cummax(jnp.where(same_R, 0, index_R))
    next_R = jnp.append(jnp.where(same_R, rows, index_R)[1:], rows)
    return index_R - begin_R, jax.lax.cummin(next_R, reverse=True) - index_R


def _tiles(first_R: jax.Array, own_R: jax.Array) -> Tiles:
    rows = own_R.shape[0]
    first_R &= own_R
    tile_R = jnp.maximum(jnp.cumsum(first_R) - 1, 0)
    # Sizes are those of all rows, whatever the number of tiles: programs have fixed shapes.
    counts_R = jnp.zeros(rows, jnp.int32).at[tile_R].add(own_R)
    starts_R = jnp.sort(jnp.where(first_R, jnp.arange(rows), rows))
    return Tiles(starts_R, counts_R, tile_R, first_R.sum())
