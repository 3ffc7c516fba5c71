"""XLA's own ragged matmul. A TPU has a kernel for it; elsewhere it is one dense matmul for every
group. Shapes as in the package."""

import jax
import jax.numpy as jnp

from maxstack.kernels.grouped_matmul.case import Case, grouped


def supports(case: Case) -> str | None:
    """Everything."""
    return None


def run(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Rows of no group are masked on both sides: what the hardware's own ragged matmuls leave there
    is not said."""
    grouped_M1 = grouped(x_MK.shape[0], sizes_E)
    return jnp.where(
        grouped_M1, jax.lax.ragged_dot(jnp.where(grouped_M1, x_MK, 0), w_EKN, sizes_E), 0
    )
