"""What a backend of the grouped matmul looks at to say whether it can serve, and which rows belong
to a group."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import Device


@dataclasses.dataclass(frozen=True)
class Case:
    """One call on one device: x [rows, contracted] times a matrix [contracted, columns] for each
    group."""

    rows: int
    groups: int
    contracted: int
    columns: int
    dtype: str
    """Of x and of the matrices: bfloat16 or float32."""
    device: Device

    @classmethod
    def of(cls, x_MK: jax.Array, w_EKN: jax.Array, device: Device) -> "Case":
        """Of the arguments, which may be shapes alone."""
        groups, contracted, columns = w_EKN.shape
        return cls(x_MK.shape[0], groups, contracted, columns, x_MK.dtype.name, device)

    @property
    def rows_of_a_group(self) -> int:
        """About as many as a group has if all have as many: a power of two, not below."""
        return power_of_two(-(-self.rows // self.groups))

    @property
    def shape_class(self) -> Mapping[str, int | str]:
        """What tuned sizes hang on."""
        return {
            "dtype": self.dtype,
            "contracted": self.contracted,
            "columns": self.columns,
            "rows_of_a_group": self.rows_of_a_group,
        }

    @property
    def unusual(self) -> str | None:
        """Why no kernel takes it; None: it has something to multiply, in a type that all of them
        know."""
        if self.dtype not in ("bfloat16", "float32"):
            return f"takes bfloat16 and float32, not {self.dtype}"
        empty = [
            name for name in ("rows", "groups", "contracted", "columns") if getattr(self, name) < 1
        ]
        return (
            f"{' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} 0, and a kernel "
            "needs at least 1"
            if empty
            else None
        )


def power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def grouped(rows: int, sizes_E: jax.Array) -> jax.Array:
    """True for the rows that belong to a group [rows, 1]."""
    return jnp.arange(rows)[:, None] < sizes_E.sum()
