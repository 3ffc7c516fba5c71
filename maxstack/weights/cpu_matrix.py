"""Matrices as inference on a CPU keeps them.

Each row of a product must have the same bits however many rows there are, and a few rows should
cost little more than one. XLA's product of a float32 matrix [in, out] gives other bits for 1, 2 to
8, and 12 and more rows; [out, in] gives equal bits but takes twice the time of [in, out] for one
row. Panels of 64 columns, multiplied as one batched product, give equal bits and cost 1.1, 0.8 and
1.4 ms for 1, 4 and 8 rows where [in, out] costs 1.0, 1.8 and 2.1 (EXPERIMENTS.md, "Few rows on a
CPU"). Shapes: M rows  I inputs  O outputs  P panels  C columns of a panel.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from maxstack.layers.weight import Substitute
from maxstack.weights.spec import WeightSpec

# Measured on x [M, 896] times [896, 4864] (EXPERIMENTS.md, "Few rows on a CPU").
COLUMNS = 64
NARROW = 768
AT_ONCE, AT_ONCE_NARROW = 32, 64
"""Largest number of rows for which the panels are one batched product: of matrices with at least
NARROW inputs, and of narrower ones. For more rows one product over all columns is faster, because
it runs on all threads; for few rows of a narrow matrix it rounds differently. With 32 in place of
16, a step of 32 requests went from 115 to 125 ms on jax 0.10.2, and from 121 to 71 on 0.12.0.1."""


class CpuMatrix(Substitute, nnx.Module):
    """A matrix, or a table that is also the head: float32 in panels of columns [P, I, C], the last
    one padded with zeros; bfloat16 transposed [O, I]."""

    def __init__(self, param: nnx.Param):
        """Make a placeholder; its arrays come from `convert`."""
        self.spec = WeightSpec.of(param)
        self.kept = nnx.Param(jax.ShapeDtypeStruct(param.shape, param.dtype))

    def convert(self, array: Any) -> Any:
        """Return what is kept of a weight without stack dimensions, of numpy (a view where
        possible) or jax."""
        rows, columns = self._matrix
        transposed = array if self.spec.use == "rows" else array.reshape(rows, columns).T
        # XLA multiplies bfloat16 [O, I] natively, with equal bits from 2 rows on, if sums in
        # float32 are asked for (see _times): 0.35 ms for 4 rows of [768, 3072] where float32 panels
        # take 0.4.
        if array.dtype == jnp.bfloat16:
            return transposed
        if missing := -columns % COLUMNS:
            pad = array.__array_namespace__().pad
            transposed = pad(transposed, ((0, missing), (0, 0)))
        return transposed.reshape(-1, COLUMNS, rows).swapaxes(1, 2)

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
        # A table has one row of the vocabulary in each column of its panels.
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
        """Number of inputs and outputs."""
        if self.spec.use == "rows":
            columns, rows = self.spec.shape
            return rows, columns
        split = self.spec.contract
        return math.prod(self.spec.shape[:split]), math.prod(self.spec.shape[split:])

    def _times(self, x_MI: Array) -> Array:
        """Return [M, O] in x's dtype, summed in float32. A single row is multiplied as two, since
        XLA has another kernel for one, which rounds differently."""
        kept, rows = self.kept[...], x_MI.shape[0]
        x = jnp.pad(x_MI.astype(kept.dtype), ((0, max(0, 2 - rows)), (0, 0)))

        def product(x: Array, *dims: Any) -> Array:
            # Without sums in float32 asked for, XLA's product in bfloat16 takes 2.4 to 26 ms for 1
            # to 256 rows of [896, 4864], more than in float32.
            return jax.lax.dot_general(x, kept, dims, preferred_element_type=jnp.float32)

        if kept.ndim == 2:
            y = product(x, ((1,), (1,)), ((), ()))
        # One contraction over the panels as they lie: putting them together first took 4 to 8 times
        # as long, and a loop over them runs on one thread and copies each.
        elif rows > (AT_ONCE if x.shape[1] >= NARROW else AT_ONCE_NARROW):
            y = product(x, ((1,), (1,)), ((), ()))
        else:
            # A batched product wants the rows once for each panel. It runs on all threads on jax
            # 0.12.0.1, on one on 0.10.2.
            many = jnp.broadcast_to(x, (kept.shape[0], *x.shape))
            y = product(many, ((2,), (1,)), ((0,), (0,))).swapaxes(0, 1)
        return y.reshape(x.shape[0], -1)[:rows, : self._matrix[1]].astype(x_MI.dtype)


def with_cpu_matrices(graph: Any, state: nnx.State) -> tuple[Any, dict[str, CpuMatrix]]:
    """Return the graph of a model whose matrices are CpuMatrix, and these by path."""
    model, matrices = nnx.merge(graph, state), dict[str, CpuMatrix]()
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
            matrices[path] = CpuMatrix(param)
            setattr(module, name, matrices[path])
    return nnx.split(model)[0], matrices
