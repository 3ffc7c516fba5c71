"""The grouped matmul and its gradients as a loop over groups and, inside, over blocks of a group's
rows: on CPUs and GPUs XLA multiplies every row by every group's matrix in a ragged_dot (8,192 rows,
32 groups, 256 x 512 on a CPU: 925 ms forward and 1,283 backward, here 25 and 50). Shapes as in the
package, and R rows of a block."""

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import Device, product_dtype
from maxstack.kernels.grouped_matmul.case import GroupedMatmulCase, differentiable, group_mask

# On a CPU blocks of 64 and 128 rows are equally fast, 256 slightly slower and 32 clearly.
LEAST_ROWS, MOST_ROWS = 8, {"cpu": 128, "gpu": 1024}


def supports(case: GroupedMatmulCase) -> str | None:
    """Why the loop cannot serve `case`; None if it can."""
    return f"sums in float32, which cannot hold {case.dtype}" if case.dtype == "float64" else None


def _rows(m: int, groups: int) -> tuple[int, str]:
    """Rows of a block: about those of a group, as a power of two; and the name of a scope that
    tells `plan` the number of blocks of a group under an even load."""
    rows = min(MOST_ROWS[Device.here().platform], max(LEAST_ROWS, 1 << (m // groups).bit_length()))
    return rows, f"turns_{-(-m // (groups * rows))}"


def _multiply_blocks(
    x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, transposed: bool
) -> jax.Array:
    """`case.Rows`. The last block of a group runs over into the next group, whose own blocks then
    overwrite it, or into rows of no group, which are cleared.

    On a CPU a matrix is cast to float32 once a group instead of once a block.
    """
    rows, expected = _rows(x_MK.shape[0], w_EKN.shape[0])
    dtype = product_dtype(x_MK.dtype)
    # The last block of a group may end past all rows; dynamic_slice would move it back into them.
    padded = jnp.pad(x_MK.astype(dtype), ((0, rows), (0, 0)))
    equation = "RK,NK->RN" if transposed else "RK,KN->RN"

    def group(out_MN, inputs):
        w_KN, start, size = inputs
        # Inside the loop over groups, so that one matrix at a time exists in float32.
        w_KN = w_KN.astype(dtype)

        def block(i, out_MN):
            x_RK = jax.lax.dynamic_slice_in_dim(padded, start + i * rows, rows)
            y_RN = jnp.einsum(equation, x_RK, w_KN)
            # Groups must come in order: each overwrites
            # the rows by which the one before it ran over.
            return jax.lax.dynamic_update_slice_in_dim(out_MN, y_RN, start + i * rows, 0)

        with jax.named_scope(expected):
            return jax.lax.fori_loop(0, -(-size // rows), block, out_MN), None

    out_MN = jnp.zeros((padded.shape[0], w_EKN.shape[1 if transposed else 2]), dtype)
    # A scan, since groups are many and all alike: unrolled, each would be compiled.
    out_MN, _ = jax.lax.scan(group, out_MN, (w_EKN, jnp.cumsum(sizes_E) - sizes_E, sizes_E))
    m = x_MK.shape[0]
    return jnp.where(group_mask(m, sizes_E), out_MN[:m], 0).astype(x_MK.dtype)


def _sum_outer_products(x_MK: jax.Array, y_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The sum over each group's rows of outer(x, y), float32 [E, K, N]."""
    rows, expected = _rows(x_MK.shape[0], sizes_E.shape[0])
    dtype = product_dtype(x_MK.dtype)
    padded = [jnp.pad(a.astype(dtype), ((0, rows), (0, 0))) for a in (x_MK, y_MN)]

    def group(_, inputs):
        start, size = inputs

        def block(i, sum_KN):
            # A sum cannot be overwritten by the next group,
            # as rows can, so its rows are masked here.
            inside_R1 = i * rows + jnp.arange(rows)[:, None] < size
            x_RK, y_RN = (
                jnp.where(inside_R1, jax.lax.dynamic_slice_in_dim(a, start + i * rows, rows), 0)
                for a in padded
            )
            product_KN = jnp.einsum("RK,RN->KN", x_RK, y_RN, preferred_element_type=jnp.float32)
            return sum_KN + product_KN

        zero_KN = jnp.zeros((x_MK.shape[1], y_MN.shape[1]), jnp.float32)
        with jax.named_scope(expected):
            return None, jax.lax.fori_loop(0, -(-size // rows), block, zero_KN)

    return jax.lax.scan(group, None, (jnp.cumsum(sizes_E) - sizes_E, sizes_E))[1]


run = differentiable(_multiply_blocks, _sum_outer_products)
