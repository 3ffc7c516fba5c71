"""Tiles that rows of queries, or of keys, visit, by the positions alone."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from maxstack.kernels.attention.request import Request

Index = Any
"""An int, or a traced one."""


class Bounds(NamedTuple):
    """Tiles from `first` to before `last` are visited; those from `whole` to before `broken` need
    no mask."""

    first: Index
    whole: Index
    broken: Index
    last: Index


def keys_of(request: Request, start: Index, rows: int, keys: int, block: int) -> Bounds:
    """The tiles of `block` of so many keys that queries start..start + rows - 1 visit."""
    low, high = request.nearest, request.furthest
    return _bounds(start + request.offset, rows, low, high, keys, block)


def queries_of(request: Request, start: Index, rows: int, queries: int, block: int) -> Bounds:
    """The tiles of `block` of so many queries that visit keys start..start + rows - 1."""
    low, high = (None if limit is None else -limit for limit in (request.furthest, request.nearest))
    return _bounds(start - request.offset, rows, low, high, queries, block)


def _bounds(
    first: Index, rows: int, low: int | None, high: int | None, columns: int, block: int
) -> Bounds:
    """Row r sees column c where low <= r - c <= high; None: no limit."""
    last = first + rows - 1
    lo: Index = 0
    whole: Index = 0
    cut, end = columns // block, -(-columns // block)
    if low is not None:
        cut = least(cut, _over(first - low + 1, block))
        end = least(end, _over(last - low + block, block))
    if high is not None:
        lo, whole = _over(first - high, block), _over(last - high + block - 1, block)
    return ordered(lo, whole, cut, end)


def ordered(first: Index, whole: Index, broken: Index, last: Index) -> Bounds:
    """Bounds of which none is below the one before it."""
    last = most(first, last)
    whole = least(most(whole, first), last)
    return Bounds(first, whole, least(most(broken, whole), last), last)


def least(x: Index, y: Index) -> Index:
    """The smaller one, of numbers or traced numbers."""
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.minimum(x, y)


def most(x: Index, y: Index) -> Index:
    """The larger one, of numbers or traced numbers."""
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.maximum(x, y)


def _over(x: Index, block: int) -> Index:
    """x // block, and 0 for negative x."""
    x = most(x, 0)
    return x // block if isinstance(x, int) else lax.div(x, jnp.int32(block))
