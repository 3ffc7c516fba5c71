"""XLA's own ragged matmul. A TPU has a kernel for it; elsewhere it is one dense matmul for every
group. Shapes as in the package."""

import jax
import jax.numpy as jnp

from maxstack.kernels.grouped_matmul.case import group_mask


def run(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[M, N]. Rows of no group are masked on both sides: the hardware's own ragged matmuls do not
    define them."""
    grouped_M1 = group_mask(x_MK.shape[0], sizes_E)
    out_MN = jax.lax.ragged_dot(jnp.where(grouped_M1, x_MK, 0), w_EKN, sizes_E)
    return jnp.where(grouped_M1, out_MN, 0)
