"""Matmul of rows that are sorted by group, each group with a matrix of its own; the matmul of a mixture of experts.

Shapes: M rows  E groups  K contracted  N columns  R rows of a block.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

Backend = Literal["auto", "reference", "ragged_dot", "blocks"]
LEAST_ROWS, MOST_ROWS = 8, 128


def grouped_matmul(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, backend: Backend = "auto", platform: str | None = None) -> jax.Array:
    """The first sizes[0] rows of x times w[0], the next sizes[1] times w[1], ... -> [M, N] in x's dtype, which w shares.

    `sizes_E` are integers that add up to M at most; zeros are fine. Rows past their sum belong to no group: whatever numbers they hold, they give
    zeros and have no gradient. `platform` is where the program will run; None: jax's default backend.
    """
    return BACKENDS[choose(backend, platform or jax.default_backend())](x_MK, w_EKN, sizes_E)


def choose(backend: Backend, platform: str) -> str:
    """The backend that `auto` stands for. On a CPU, XLA computes a ragged_dot as one dense matmul for every group."""
    if backend != "auto":
        return backend
    return "blocks" if platform == "cpu" else "ragged_dot"


def reference(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The definition: every row times every matrix, and a mask."""
    ends_E = jnp.cumsum(sizes_E)
    row_M1 = jnp.arange(x_MK.shape[0])[:, None]
    mine_ME = (row_M1 >= ends_E - sizes_E) & (row_M1 < ends_E)
    out_MEN = jnp.einsum("MK,EKN->MEN", x_MK, w_EKN, preferred_element_type=jnp.float32)
    return jnp.where(mine_ME[:, :, None], out_MEN, 0.0).sum(axis=1).astype(x_MK.dtype)


def _ragged_dot(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Rows of no group are masked on both sides: what the hardware's own ragged matmuls leave there is not said."""
    grouped_M1 = _grouped(x_MK.shape[0], sizes_E)
    return jnp.where(grouped_M1, jax.lax.ragged_dot(jnp.where(grouped_M1, x_MK, 0), w_EKN, sizes_E.astype(jnp.int32)), 0)


def _grouped(rows: int, sizes_E: jax.Array) -> jax.Array:
    """True for the rows that belong to a group [rows, 1]."""
    return jnp.arange(rows)[:, None] < sizes_E.sum()


@jax.custom_vjp
def blocks(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """A loop over the groups and, inside, over blocks of a group's rows; so are both gradients."""
    return _by_blocks(x_MK, w_EKN, sizes_E, False)


def _rows(m: int, groups: int) -> int:
    """Rows of a block: about those of a group, a power of two."""
    return min(MOST_ROWS, max(LEAST_ROWS, 1 << (m // groups).bit_length()))


def _by_blocks(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, transposed: bool) -> jax.Array:
    """x times each matrix, or times its transpose. A last block runs over into the next group, whose own blocks then overwrite it, or
    into rows of no group, which are cleared.

    In float32, which most CPUs multiply in any case: cast here, a matrix is cast once a group and not once a block.
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
    out_MN = jax.lax.scan(group, out_MN, (w_EKN, jnp.cumsum(sizes_E) - sizes_E, sizes_E))[0][: x_MK.shape[0]]
    return jnp.where(_grouped(x_MK.shape[0], sizes_E), out_MN, 0).astype(x_MK.dtype)


def _outer_by_blocks(x_MK: jax.Array, y_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The sum over each group's rows of outer(x, y), float32 [E, K, N]."""
    rows = _rows(x_MK.shape[0], sizes_E.shape[0])
    padded, other = (jnp.pad(a.astype(jnp.float32), ((0, rows), (0, 0))) for a in (x_MK, y_MN))

    def group(_, given):
        start, size = given

        def block(i, sum_KN):
            mine_R1 = i * rows + jnp.arange(rows)[:, None] < size
            x_RK = jnp.where(mine_R1, jax.lax.dynamic_slice_in_dim(padded, start + i * rows, rows), 0)
            y_RN = jnp.where(mine_R1, jax.lax.dynamic_slice_in_dim(other, start + i * rows, rows), 0)
            return sum_KN + jnp.einsum("RK,RN->KN", x_RK, y_RN)

        return None, jax.lax.fori_loop(0, -(-size // rows), block, jnp.zeros((x_MK.shape[1], y_MN.shape[1]), jnp.float32))

    return jax.lax.scan(group, None, (jnp.cumsum(sizes_E) - sizes_E, sizes_E))[1]


def _forward(x_MK, w_EKN, sizes_E):
    return _by_blocks(x_MK, w_EKN, sizes_E, False), (x_MK, w_EKN, sizes_E)


def _backward(saved, dy_MN):
    x_MK, w_EKN, sizes_E = saved
    return _by_blocks(dy_MN, w_EKN, sizes_E, True), _outer_by_blocks(x_MK, dy_MN, sizes_E).astype(w_EKN.dtype), None


blocks.defvjp(_forward, _backward)
BACKENDS: dict[str, Callable[..., jax.Array]] = {"reference": reference, "ragged_dot": _ragged_dot, "blocks": blocks}
