"""Errors of results against float64, for bench_gpu.py."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCES = {"bfloat16": (0.01, 0.02), "float32": (0.003, 0.003)}
"""Largest ||x - reference|| / ||reference|| of results and of gradients: a few times the rounding
error of the dtype; a GPU multiplies float32 as tf32."""
WORST_ROW = 0.1
"""Largest error of a row, relative to its own norm or the mean norm, whichever is larger: a single
wrong row is lost in the norm of all."""


def float64(
    function: Callable[..., Any], arguments: tuple[jax.Array, ...]
) -> dict[str, np.ndarray]:
    """The results of `function` in float64 for the same numbers; integers keep their type."""

    def wide(x: jax.Array) -> np.ndarray:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return np.asarray(x).astype(np.float64 if floating else x.dtype)

    with jax.enable_x64(True):
        results = jax.jit(function)(*map(wide, arguments))
        return {name: np.asarray(value) for name, value in results.items()}


def compare(
    outputs: Mapping[str, jax.Array], expected: Mapping[str, np.ndarray], dtype: str
) -> dict[str, Any]:
    """Errors of each output, and a status: wrong where one is too large. Names of gradients begin
    with d."""
    errors, rows, wrong = {}, {}, []
    for name, reference in expected.items():
        difference = np.asarray(outputs[name]).astype(np.float64) - reference
        width = reference.shape[-1] if reference.ndim > 1 else reference.size
        norm = float(np.linalg.norm(reference)) or 1.0
        lengths = np.linalg.norm(reference.reshape(-1, width), axis=-1)
        scale = np.maximum(lengths, np.sqrt(np.mean(lengths**2)) or 1.0)
        errors[name] = float(np.linalg.norm(difference)) / norm
        rows[name] = float(np.max(np.linalg.norm(difference.reshape(-1, width), axis=-1) / scale))
        most = TOLERANCES[dtype][name.startswith("d")]
        if not (errors[name] <= most and rows[name] <= WORST_ROW):  # also true of NaN
            wrong.append(f"{name} is off by {errors[name]:.2g}, its worst row by {rows[name]:.2g}")
    figures = {"errors": errors, "worst_rows": rows}
    if wrong:
        return {"status": "wrong", **figures, "reason": "; ".join(wrong)}
    return {"status": "ok", **figures}
