"""The definition of the grouped matmul: every row times every matrix, and a mask. Shapes as in the
package."""

import jax
import jax.numpy as jnp


def run(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[M, N], summed in float32, or in float64 where x is; holds [M, E, N] in memory."""
    ends_E = jnp.cumsum(sizes_E)
    row_M1 = jnp.arange(x_MK.shape[0])[:, None]
    mine_ME = (row_M1 >= ends_E - sizes_E) & (row_M1 < ends_E)
    # Rows of no group may hold NaN, and 0 times NaN is NaN.
    x_MK = jnp.where(mine_ME.any(axis=1, keepdims=True), x_MK, 0)
    out_MEN = jnp.einsum(
        "MK,EKN->MEN",
        x_MK,
        w_EKN,
        preferred_element_type=jnp.promote_types(x_MK.dtype, jnp.float32),
    )
    return jnp.where(mine_ME[:, :, None], out_MEN, 0.0).sum(axis=1).astype(x_MK.dtype)
