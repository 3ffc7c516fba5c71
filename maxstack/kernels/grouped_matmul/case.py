"""The case that backends of the grouped matmul accept or refuse, and the parts that several of them
share. Shapes as in the package."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import Device


@dataclasses.dataclass(frozen=True)
class GroupedMatmulCase:
    """One call on one device: x [rows, contracted] times a matrix [contracted, columns] for each
    group."""

    rows: int
    groups: int
    contracted: int
    columns: int
    dtype: str
    """The dtype of x and of the matrices: bfloat16 or float32."""
    device: Device

    @classmethod
    def of(cls, x_MK: jax.Array, w_EKN: jax.Array, device: Device) -> "GroupedMatmulCase":
        """The case of arguments, which can be shapes."""
        groups, contracted, columns = w_EKN.shape
        return cls(x_MK.shape[0], groups, contracted, columns, x_MK.dtype.name, device)

    @property
    def rows_of_a_group(self) -> int:
        """Average rows of a group, rounded up to a power of two."""
        return power_of_two(-(-self.rows // self.groups))

    @property
    def shape_class(self) -> Mapping[str, int | str]:
        """The key of tuned block sizes."""
        return {
            "dtype": self.dtype,
            "contracted": self.contracted,
            "columns": self.columns,
            # Sizes depend on the rows that share a matrix, not on how many groups there are.
            "rows_of_a_group": self.rows_of_a_group,
        }

    @property
    def unsupported(self) -> str | None:
        """Why no kernel takes it; None if it has something to multiply, in a supported dtype."""
        if self.dtype not in ("bfloat16", "float32"):
            return f"takes bfloat16 and float32, not {self.dtype}"
        sizes = ("rows", "groups", "contracted", "columns")
        empty = [name for name in sizes if getattr(self, name) < 1]
        if not empty:
            return None
        verb = "is" if len(empty) == 1 else "are"
        return f"{' and '.join(empty)} {verb} 0, and a kernel needs at least 1"


Rows = Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]
"""(x, w, sizes, transposed) -> rows times their group's matrix, or times its transpose (then x is
[M, N] and the result [M, K]), in x's dtype."""
Matrices = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(x, dy, sizes) -> the sum over each group's rows of outer(x, dy) [E, K, N], in the dtype of the
matrices."""


def differentiable(rows: Rows, matrices: Matrices) -> Callable[..., jax.Array]:
    """The grouped matmul (x, w, sizes) -> [M, N], with the gradients of both factors."""

    @jax.custom_vjp
    def op(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
        return rows(x_MK, w_EKN, sizes_E, False)

    def forward(x_MK, w_EKN, sizes_E):
        return rows(x_MK, w_EKN, sizes_E, False), (x_MK, w_EKN, sizes_E)

    def backward(saved, dy_MN):
        x_MK, w_EKN, sizes_E = saved
        # Both gradients are grouped matmuls again; jax
        # would differentiate a backend's loop instead.
        dx_MK = rows(dy_MN, w_EKN, sizes_E, True)
        return dx_MK, matrices(x_MK, dy_MN, sizes_E).astype(w_EKN.dtype), None

    op.defvjp(forward, backward)
    return op


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def group_mask(rows: int, sizes_E: jax.Array) -> jax.Array:
    """True for the rows that belong to a group [rows, 1]."""
    return jnp.arange(rows)[:, None] < sizes_E.sum()
