"""What a weight is used for and how it lies as a matrix; without Qwix, which only recipes need."""

import dataclasses
import math

from flax import nnx


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """What is known of a weight: what multiplies by it, its shape without a stack's, and its
    axes."""

    use: str
    contract: int
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @classmethod
    def of(cls, param: nnx.Param) -> "WeightSpec":
        meta = param.get_metadata()
        dims = len(meta["axes"])
        return cls(
            meta["use"], meta["contract"], tuple(param.shape[param.ndim - dims :]), meta["axes"]
        )

    @property
    def matrix(self) -> tuple[int, ...]:
        """The shape with all that a matmul contracts as one dimension."""
        return (
            (math.prod(self.shape[: self.contract]), *self.shape[self.contract :])
            if self.use == "matmul"
            else self.shape
        )

    @property
    def matrix_axes(self) -> tuple[str, ...]:
        return (self.axes[0], *self.axes[self.contract :]) if self.use == "matmul" else self.axes

    @property
    def contracted(self) -> int:
        """The dimension of `matrix` that is contracted; a table's is its last, as it is where the
        head is tied to it."""
        return {"matmul": 0, "experts": 1, "rows": len(self.shape) - 1, "head": 0}[self.use]

    @property
    def packed(self) -> int:
        """The dimension of `matrix` along which two values share a byte: the longest, but no table
        is packed across its rows; from the end."""
        first = {"rows": len(self.shape) - 1, "experts": 1}.get(self.use, 0)
        return max(range(first, len(self.matrix)), key=lambda i: self.matrix[i]) - len(self.matrix)
