"""Description of a weight: its use, its layout as a matrix, and patterns of its path. Imports no
Qwix, which only recipes need."""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from flax import nnx

from maxstack.config.spelling import nearest


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The use of a weight (`schema.parts.Use`), and its shape and axes without stack dimensions."""

    use: str
    contract: int
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @classmethod
    def of(cls, param: nnx.Param) -> "WeightSpec":
        meta = param.get_metadata()
        # A stack puts dimensions in front of the shape, and none into the axes.
        shape = tuple(param.shape[param.ndim - len(meta["axes"]) :])
        return cls(meta["use"], meta["contract"], shape, meta["axes"])

    @property
    def matrix(self) -> tuple[int, ...]:
        """The shape with all contracted dimensions of a matmul as one."""
        # Experts and tables are matrices already.
        if self.use != "matmul":
            return self.shape
        return (math.prod(self.shape[: self.contract]), *self.shape[self.contract :])

    @property
    def matrix_axes(self) -> tuple[str, ...]:
        return (self.axes[0], *self.axes[self.contract :]) if self.use == "matmul" else self.axes

    @property
    def contracted(self) -> int:
        """The contracted dimension of `matrix`; of a table the last, which a tied head
        contracts."""
        return {"matmul": 0, "experts": 1, "rows": len(self.shape) - 1, "head": 0}[self.use]

    @property
    def packed(self) -> int:
        """The dimension of `matrix`, counted from the end, along which two values share a byte: the
        longest one, but a table is not packed across its rows."""
        # A lookup takes single rows of a table, which must not share bytes; experts stay apart
        # likewise.
        first = self.contracted if self.use in ("rows", "experts") else 0
        return max(range(first, len(self.matrix)), key=lambda i: self.matrix[i]) - len(self.matrix)


def stacked(param: nnx.Param, lead: tuple[int, ...], **metadata: Any) -> nnx.Param:
    """Repeat a parameter along the leading dimensions of a stack."""
    value = jnp.broadcast_to(param.get_value(), (*lead, *param.shape))
    return nnx.Param(value, **param.get_metadata() | metadata)


def module_of(path: str) -> str:
    """Return the path of the module that holds a weight."""
    return path.rpartition("/")[0]


def matches(pattern: str, path: str) -> bool:
    """Return True where a regular expression matches the whole path of a weight or its module."""
    return any(re.fullmatch(pattern, name) for name in (path, module_of(path)) if name)


def near(pattern: str, paths: Iterable[str]) -> str:
    """List paths of weights and modules that resemble a pattern, or else some, in words."""
    names = {name for path in paths for name in (path, module_of(path)) if name}
    return ", ".join(nearest(pattern, names, 3) or sorted(names)[:6])
