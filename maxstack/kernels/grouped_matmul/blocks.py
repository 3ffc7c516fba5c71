"""A loop over the groups and, inside, over blocks of a group's rows; so are both gradients. Shapes
as in the package, and R rows of a block.

On a CPU XLA computes a ragged_dot as one dense matmul for every group.
"""

import jax
import jax.numpy as jnp

from maxstack.kernels.grouped_matmul.case import Case, grouped

LEAST_ROWS, MOST_ROWS = 8, 128


def supports(case: Case) -> str | None:
    """All shapes, in types that float32 holds."""
    return f"sums in float32, which cannot hold {case.dtype}" if case.dtype == "float64" else None


@jax.custom_vjp
def run(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[M, N]."""
    return _by_blocks(x_MK, w_EKN, sizes_E, False)


def _rows(m: int, groups: int) -> int:
    """Rows of a block: about those of a group, a power of two."""
    return min(MOST_ROWS, max(LEAST_ROWS, 1 << (m // groups).bit_length()))


def _by_blocks(
    x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, transposed: bool
) -> jax.Array:
    """x times each matrix, or times its transpose. A last block runs over into the next group,
    whose own blocks then overwrite it, or into rows of no group, which are cleared.

    In float32, which most CPUs multiply in any case: cast here, a matrix is cast once a group and
    not once a block.
    """
    rows = _rows(x_MK.shape[0], w_EKN.shape[0])
    padded = jnp.pad(x_MK.astype(jnp.float32), ((0, rows), (0, 0)))

    def group(out_MN, given):
        w_KN, start, size = given
        w_KN = w_KN.astype(jnp.float32)

        def block(i, out_MN):
            x_RK = jax.lax.dynamic_slice_in_dim(padded, start + i * rows, rows)
            y_RN = jnp.einsum("RK,NK->RN" if transposed else "RK,KN->RN", x_RK, w_KN)
            return jax.lax.dynamic_update_slice_in_dim(out_MN, y_RN, start + i * rows, 0)

        return jax.lax.fori_loop(0, -(-size // rows), block, out_MN), None

    out_MN = jnp.zeros((padded.shape[0], w_EKN.shape[1 if transposed else 2]), jnp.float32)
    out_MN = jax.lax.scan(group, out_MN, (w_EKN, jnp.cumsum(sizes_E) - sizes_E, sizes_E))[0][
        : x_MK.shape[0]
    ]
    return jnp.where(grouped(x_MK.shape[0], sizes_E), out_MN, 0).astype(x_MK.dtype)


def _outer_by_blocks(x_MK: jax.Array, y_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The sum over each group's rows of outer(x, y), float32 [E, K, N]."""
    rows = _rows(x_MK.shape[0], sizes_E.shape[0])
    padded, other = (jnp.pad(a.astype(jnp.float32), ((0, rows), (0, 0))) for a in (x_MK, y_MN))

    def group(_, given):
        start, size = given

        def block(i, sum_KN):
            mine_R1 = i * rows + jnp.arange(rows)[:, None] < size
            x_RK = jnp.where(
                mine_R1, jax.lax.dynamic_slice_in_dim(padded, start + i * rows, rows), 0
            )
            y_RN = jnp.where(
                mine_R1, jax.lax.dynamic_slice_in_dim(other, start + i * rows, rows), 0
            )
            return sum_KN + jnp.einsum("RK,RN->KN", x_RK, y_RN)

        return None, jax.lax.fori_loop(
            0, -(-size // rows), block, jnp.zeros((x_MK.shape[1], y_MN.shape[1]), jnp.float32)
        )

    return jax.lax.scan(group, None, (jnp.cumsum(sizes_E) - sizes_E, sizes_E))[1]


def _forward(x_MK, w_EKN, sizes_E):
    return _by_blocks(x_MK, w_EKN, sizes_E, False), (x_MK, w_EKN, sizes_E)


def _backward(saved, dy_MN):
    x_MK, w_EKN, sizes_E = saved
    return (
        _by_blocks(dy_MN, w_EKN, sizes_E, True),
        _outer_by_blocks(x_MK, dy_MN, sizes_E).astype(w_EKN.dtype),
        None,
    )


run.defvjp(_forward, _backward)
