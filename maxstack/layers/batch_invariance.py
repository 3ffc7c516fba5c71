"""Batch invariance: the bits of a row of inference do not depend on how many rows are computed
with it.

On a CPU XLA adds and multiplies in another order where rows are few, so inside `batch_invariant`
layers choose operations whose order is fixed: norms sum by a product with ones (norm.py), and what
has no such form computes a fixed number of rows at a time (`in_groups`).
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from maxstack.sharding import holding

_group: contextvars.ContextVar[int | None] = contextvars.ContextVar("group", default=None)
_adapters: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar(
    "adapters", default=None
)


@contextlib.contextmanager
def batch_invariant(group: int | None, adapters_R: jax.Array | None = None) -> Iterator[None]:
    """Keep a row's bits independent of the number of rows, in the layers inside. A layer that has
    no operation of fixed order computes `group` rows at a time (0: none needs to; None: compute as
    in training). `adapters_R`: numbers of the rows' adapters, 0: none."""
    with holding(_group, group), holding(_adapters, adapters_R):
        yield


def adapters() -> Any:
    """Numbers [R] of the adapters of the rows that are being computed; None: they have none."""
    return _adapters.get()


def active() -> bool:
    """True where layers keep the bits of a row."""
    return _group.get() is not None


def in_groups(f: Callable[..., Any], size: int | None = None) -> Callable[..., Any]:
    """Wrap `f`, a function of trees of arrays [R, ..], to compute `size` rows at a time; None: the
    group of `batch_invariant`."""
    size = _group.get() if size is None else size
    if not size:
        return f

    def run(*trees: Any) -> Any:
        rows = jax.tree.leaves(trees)[0].shape[0]

        def grouped(x: jax.Array) -> jax.Array:
            # The last group is filled up, since a smaller one would be computed in another way.
            x = jnp.pad(x, ((0, -rows % size), *((0, 0),) * (x.ndim - 1)))
            return x.reshape(-1, size, *x.shape[1:])

        def one(group: Any) -> Any:
            # Adapters belong to rows, so their numbers are grouped with them.
            own, adapters_R = group
            with holding(_adapters, adapters_R):
                return f(*own)

        # One group after the other; a vmap would make one product of all rows again.
        results = jax.lax.map(one, jax.tree.map(grouped, (trees, adapters())))
        return jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2)[:rows], results)

    return run
