"""Shapes and shardings of batches on a run's mesh, and rows put onto its devices."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxstack import sharding

if TYPE_CHECKING:
    from maxstack.schema.config import Config
    from maxstack.schema.objective import RowField as Field


class Batches:
    """Global batches of the fields that an objective declares: rows over the mesh axes of `batch`,
    positions over those of `seq`."""

    def __init__(self, cfg: "Config", mesh: Mesh, fields: Mapping[str, "Field"]):
        self._mesh, self._rules, self._fields = mesh, cfg.mesh.rules, fields
        self._sizes = {"batch": cfg.train.batch_size, "seq": cfg.data.seq_len}

    @property
    def of_rows(self) -> NamedSharding:
        """Sharding of what belongs to a row as a whole."""
        return self._sharding("batch")

    def sharding(self, name: str) -> NamedSharding:
        """Sharding of an array of a batch; one that is no field of the objective lies as tokens
        do."""
        field = self._fields.get(name)
        return self._sharding(field.axes if field else "batch seq")

    def _sharding(self, axes: str) -> NamedSharding:
        return NamedSharding(self._mesh, sharding.spec(axes.split(), self._rules))

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and shardings of a training batch."""
        return {
            name: jax.ShapeDtypeStruct(
                [*(self._sizes[axis] for axis in field.axes.split()), *field.size],
                jnp.dtype(field.dtype),
                sharding=self.sharding(name),
            )
            for name, field in self._fields.items()
        }

    def rows(self, batch_size: int) -> list[int]:
        """The rows of a global batch (its lanes) that this process's devices hold, in order."""
        spans = self.of_rows.addressable_devices_indices_map((batch_size, 1)).values()
        return sorted(
            {row for span in spans if span for row in range(*span[0].indices(batch_size))}
        )

    def place(self, local: Mapping[str, np.ndarray], batch_size: int) -> dict[str, jax.Array]:
        """This process's rows, [len(rows(batch_size)), ...] each -> global arrays [batch_size,
        ...], of whatever the step has use for."""
        if "real" in self._fields and "segments" in local:
            local = {"real": local["segments"] > 0, **local}
        used = {*self._fields, "bytes"}
        return {
            name: self.put(rows, batch_size, self.sharding(name))
            for name, rows in local.items()
            if name in used
        }

    def put(self, local: np.ndarray, batch_size: int, placement: NamedSharding) -> jax.Array:
        """This process's rows, [len(rows(batch_size)), ...] -> a global array [batch_size, ...]."""
        where = {row: i for i, row in enumerate(self.rows(batch_size))}

        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index
            span = range(*index[0].indices(batch_size))
            return local[where[span[0]] : where[span[-1]] + 1][:, *index[1:]]

        return jax.make_array_from_callback((batch_size, *local.shape[1:]), placement, piece)
