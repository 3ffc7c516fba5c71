"""How far a result is from the same in float64, for bench_gpu.py."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCES = {"bfloat16": (0.01, 0.02), "float32": (0.003, 0.003)}
"""Of results and of gradients, ||x - reference|| / ||reference||: a few times what rounding to the
dtype gives; a GPU multiplies float32 as tf32."""
WORST_ROW = 0.1
"""The same of any one row, against the larger of its own norm and the mean one: a single wrong row
is lost in the norm of all."""


def float64(
    function: Callable[..., Any], arguments: tuple[jax.Array, ...]
) -> dict[str, np.ndarray]:
    """What `function` gives in float64 for the same numbers; integers stay what they are."""
    with jax.enable_x64(True):
        raised = [
            np.asarray(x).astype(np.float64)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else np.asarray(x)
            for x in arguments
        ]
        return {name: np.asarray(value) for name, value in jax.jit(function)(*raised).items()}


def compare(
    found: Mapping[str, jax.Array], expected: Mapping[str, np.ndarray], dtype: str
) -> dict[str, Any]:
    """Errors of each output and whether all are small enough. Names of gradients begin with d."""
    errors, rows, wrong = {}, {}, []
    for name, reference in expected.items():
        own = np.asarray(found[name]).astype(np.float64)
        difference, width = (
            own - reference,
            reference.shape[-1] if reference.ndim > 1 else reference.size,
        )
        norm = float(np.linalg.norm(reference)) or 1.0
        lengths = np.linalg.norm(reference.reshape(-1, width), axis=-1)
        scale = np.maximum(lengths, np.sqrt(np.mean(lengths**2)) or 1.0)
        errors[name] = float(np.linalg.norm(difference)) / norm
        rows[name] = float(np.max(np.linalg.norm(difference.reshape(-1, width), axis=-1) / scale))
        if not (
            errors[name] <= TOLERANCES[dtype][name.startswith("d")] and rows[name] <= WORST_ROW
        ):  # also true of NaN
            wrong.append(f"{name} is off by {errors[name]:.2g}, its worst row by {rows[name]:.2g}")
    return {"status": "wrong" if wrong else "ok", "errors": errors, "worst_rows": rows} | (
        {"reason": "; ".join(wrong)} if wrong else {}
    )
