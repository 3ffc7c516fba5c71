"""Matrices as inference on a CPU keeps them: a row of a product has the same bits however many rows
there are, and a few rows cost little more than one (EXPERIMENTS.md, "Few rows on a CPU"). Shapes: M
rows  I inputs  O outputs  P panels  C columns of one.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from maxstack.layers.weight import Substitute
from maxstack.weights.spec import WeightSpec

COLUMNS = 64
AT_ONCE, AT_ONCE_NARROW, NARROW = 32, 64, 768
"""Rows up to which the panels are one batched product, of matrices with so many inputs and of
narrower ones; with more, one product over all columns is faster, although the panels are laid side
by side for it. It rounds otherwise where a narrow matrix has few rows."""


class CpuMatrix(Substitute, nnx.Module):
    """A matrix, or a table that is the head too: float32 in panels of columns [P, I, C], the last
    filled with zeros, which a few rows read fastest; bfloat16 transposed [O, I]."""

    def __init__(self, param: nnx.Param):
        """In place of a placeholder; its arrays come from `made`."""
        self.spec = WeightSpec.of(param)
        self.kept = nnx.Param(jax.ShapeDtypeStruct(param.shape, param.dtype))

    def made(self, array: Array) -> Array:
        """What is kept of the weight itself, without the dimensions of a stack."""
        rows, columns = self._matrix
        transposed = array if self.spec.use == "rows" else array.reshape(rows, columns).T
        if array.dtype == jnp.bfloat16:
            return transposed
        padded = jnp.pad(transposed, ((0, -columns % COLUMNS), (0, 0)))
        return padded.reshape(-1, COLUMNS, rows).swapaxes(1, 2)

    def project(self, x: Array) -> Array:
        """See weight.project."""
        lead = x.shape[: x.ndim - self.spec.contract]
        product = self._times(x.reshape(math.prod(lead), -1))
        return product.reshape(*lead, *self.spec.shape[self.spec.contract :])

    def scores(self, x: Array, tied: bool, dtype: Any) -> Array:
        """See Substitute.scores."""
        return self._times(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

    def lookup(self, index: Array, dtype: Any) -> Array:
        """See weight.lookup."""
        kept = self.kept[...]
        rows = kept[index] if kept.ndim == 2 else kept[index // COLUMNS, :, index % COLUMNS]
        return rows.astype(dtype)

    def values(self, dtype: Any) -> Array:
        """See weight.values."""
        kept, (rows, columns) = self.kept[...], self._matrix
        if kept.ndim == 3:
            kept = kept.swapaxes(1, 2).reshape(-1, rows)[:columns]
        matrix = kept if self.spec.use == "rows" else kept.T
        return matrix.reshape(self.spec.shape).astype(dtype)

    @property
    def _matrix(self) -> tuple[int, int]:
        """Input and output size."""
        if self.spec.use == "rows":
            columns, rows = self.spec.shape
            return rows, columns
        split = self.spec.contract
        return math.prod(self.spec.shape[:split]), math.prod(self.spec.shape[split:])

    def _times(self, x_MI: Array) -> Array:
        """[M, O] in x's dtype, summed in float32. A single row is multiplied as two: XLA has
        another kernel for one, which rounds otherwise."""
        kept, rows = self.kept[...], x_MI.shape[0]
        x = jnp.pad(x_MI.astype(kept.dtype), ((0, max(0, 2 - rows)), (0, 0)))

        def product(x: Array, *dims: Any) -> Array:
            return jax.lax.dot_general(x, kept, dims, preferred_element_type=jnp.float32)

        if kept.ndim == 2:
            y = product(x, ((1,), (1,)), ((), ()))
        elif rows > (AT_ONCE if x.shape[1] >= NARROW else AT_ONCE_NARROW):
            y = product(x, ((1,), (1,)), ((), ()))
        else:
            many = jnp.broadcast_to(x, (kept.shape[0], *x.shape))
            y = product(many, ((2,), (1,)), ((0,), (0,))).swapaxes(0, 1)
        return y.reshape(x.shape[0], -1)[:rows, : self._matrix[1]].astype(x_MI.dtype)


def with_cpu_matrices(graph: Any, state: nnx.State) -> tuple[Any, dict[str, CpuMatrix]]:
    """The graph of a model in which all matrices that rows are multiplied by are kept so, and these
    by the paths of the weights."""
    model, made = nnx.merge(graph, state), dict[str, CpuMatrix]()
    tied = model.cfg.head.tied
    owners = [
        ("/".join(map(str, (*path, name))), module, name)
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if type(value) is nnx.Param  # others are substitutes already
    ]
    for path, module, name in owners:
        param = getattr(module, name)
        use = param.get_metadata().get("use")
        if use in ("matmul", "head") or (use == "rows" and tied and path == "embed"):
            made[path] = CpuMatrix(param)
            setattr(module, name, made[path])
    return nnx.split(model)[0], made
