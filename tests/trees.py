"""Trees of arrays, and programs, for tests."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params


def close(ours: Any, wanted: Any, **tolerance: float) -> None:
    """Every leaf is near that of the other tree, which has the same structure."""

    def check(path: Any, one: Any, other: Any) -> None:
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(one, other, err_msg=name, **tolerance)

    jax.tree_util.tree_map_with_path(check, ours, wanted)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a program, inside loops and calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
