"""Matrices as inference on a CPU reads them: in panels of 64 columns, each multiplied by itself.

A row of the product has the same bits however many rows there are, and a few rows cost little more
than one (EXPERIMENTS.md, "Few rows on a CPU"). Shapes: M rows  I input  P panels  C columns of one.
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
AT_ONCE, AT_ONCE_NARROW, NARROW = 16, 64, 768
"""Rows up to which the panels are one batched product, of matrices with so many inputs and of
narrower ones; with more, one product over all columns is faster, although the panels are laid side
by side for it. It rounds otherwise where a narrow matrix has few rows."""


class Panels(Substitute, nnx.Module):
    """A matrix, or a table that is the head too, in panels of columns [P, I, C], the last filled
    with zeros. bfloat16 is kept as uint16 and multiplied in float32, which is exact for each
    product and on most CPUs faster."""

    def __init__(self, param: nnx.Param):
        """In place of a placeholder; one of a stack keeps its leading dimensions."""
        self.spec = WeightSpec.of(param)
        lead = param.shape[: param.ndim - len(self.spec.shape)]
        rows, columns = self._matrix
        shape = *lead, -(-columns // COLUMNS), rows, COLUMNS
        self.panels = nnx.Param(jax.ShapeDtypeStruct(shape, _stored(param.dtype)))

    def made(self, array: Array) -> Array:
        """The panels of the weight itself, without the dimensions of a stack."""
        rows, columns = self._matrix
        matrix = array.T if self.spec.use == "rows" else array.reshape(rows, columns)
        matrix = jnp.pad(matrix, ((0, 0), (0, -columns % COLUMNS)))
        panels = matrix.reshape(rows, -1, COLUMNS).swapaxes(0, 1)
        stored = _stored(panels.dtype)
        if stored == panels.dtype:
            return panels
        return jax.lax.bitcast_convert_type(panels, stored)

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
        return _floats(self.panels[...][index // COLUMNS, :, index % COLUMNS]).astype(dtype)

    def values(self, dtype: Any) -> Array:
        """See weight.values."""
        rows, columns = self._matrix
        matrix = _floats(self.panels[...]).swapaxes(0, 1).reshape(rows, -1)[:, :columns]
        matrix = matrix.T if self.spec.use == "rows" else matrix
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
        """[M, columns] in x's dtype. A single row is multiplied as two: XLA has another kernel for
        one, which rounds otherwise."""
        rows, panels_PIC = x_MI.shape[0], self.panels[...]
        x = jnp.pad(x_MI.astype(jnp.float32), ((0, max(0, 2 - rows)), (0, 0)))
        if rows > (AT_ONCE if x.shape[1] >= NARROW else AT_ONCE_NARROW):
            y_MPC = jax.lax.dot_general(x, _floats(panels_PIC), (((1,), (1,)), ((), ())))
        elif panels_PIC.dtype == jnp.float32:
            many = jnp.broadcast_to(x, (panels_PIC.shape[0], *x.shape))
            y_PMC = jax.lax.dot_general(many, panels_PIC, (((2,), (1,)), ((0,), (0,))))
            y_MPC = y_PMC.swapaxes(0, 1)
        else:
            y_MPC = jax.lax.map(lambda panel: x @ _floats(panel), panels_PIC).swapaxes(0, 1)
        y = y_MPC.reshape(x.shape[0], -1)
        return y[:rows, : self._matrix[1]].astype(x_MI.dtype)


def in_panels(graph: Any, state: nnx.State) -> tuple[Any, dict[str, Panels]]:
    """The graph of a model with panels for all matrices that rows are multiplied by, and these by
    the paths of the weights."""
    model, made = nnx.merge(graph, state), dict[str, Panels]()
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
            made[path] = Panels(param)
            setattr(module, name, made[path])
    return nnx.split(model)[0], made


def _stored(dtype: Any) -> Any:
    return jnp.uint16 if dtype == jnp.bfloat16 else dtype


def _floats(panels: Array) -> Array:
    """float32 of what is kept."""
    if panels.dtype == jnp.uint16:
        bits = panels.astype(jnp.uint32) << 16
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    return panels.astype(jnp.float32)
