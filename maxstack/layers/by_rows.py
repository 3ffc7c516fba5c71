"""Rows of inference, whose bits do not depend on how many rows are computed beside them: on a CPU
XLA adds and multiplies in another order where rows are few."""

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxstack.sharding import holding

_group: contextvars.ContextVar[int | None] = contextvars.ContextVar("by_rows", default=None)


def by_rows(group: int = 0) -> contextlib.AbstractContextManager[None]:
    """Context in which layers keep the bits of a row whatever the number of rows; those that can by
    no other means compute `group` rows at a time. 0: they need not."""
    return holding(_group, group)


def active() -> bool:
    """True in the context."""
    return _group.get() is not None


def in_groups(f: Callable[..., Any], size: int | None = None) -> Callable[..., Any]:
    """`f` of trees of arrays [R, ..], computed for `size` rows at a time, by default as the context
    says."""
    size = _group.get() if size is None else size
    if not size:
        return f

    def run(*trees: Any) -> Any:
        rows = jax.tree.leaves(trees)[0].shape[0]

        def grouped(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, -rows % size), *((0, 0),) * (x.ndim - 1)))
            return x.reshape(-1, size, *x.shape[1:])

        results = jax.lax.map(lambda group: f(*group), jax.tree.map(grouped, trees))
        return jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2)[:rows], results)

    return run
