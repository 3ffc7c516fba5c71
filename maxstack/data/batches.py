"""Shapes and shardings of batches on a run's mesh, rows put onto its devices, and metrics of
them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxstack import sharding
from maxstack.schema.data import DataConfig

if TYPE_CHECKING:
    from maxstack.schema.config import Config
    from maxstack.schema.objective import RowField as Field


class Batches:
    """Global batches of the fields that an objective declares: rows over the mesh axes of `batch`,
    positions over those of `seq`."""

    def __init__(self, cfg: "Config", mesh: Mesh, fields: Mapping[str, "Field"]):
        self._mesh = mesh
        self._rules = cfg.mesh.rules
        self._fields = fields
        self._sizes = {"batch": cfg.train.batch_size, "seq": cfg.data.seq_len}

    @property
    def of_rows(self) -> NamedSharding:
        """The sharding of an array with a value for each row."""
        return self._sharding("batch")

    def sharding(self, name: str) -> NamedSharding:
        """Return the sharding of an array of a batch; that of tokens if it is no field of the
        objective."""
        field = self._fields.get(name)
        return self._sharding(field.axes if field else "batch seq")

    def _sharding(self, axes: str) -> NamedSharding:
        return NamedSharding(self._mesh, sharding.spec(axes.split(), self._rules))

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and shardings of a training batch."""
        arrays = {}
        for name, field in self._fields.items():
            shape = [*(self._sizes[axis] for axis in field.axes.split()), *field.size]
            kind = jnp.dtype(field.dtype)
            arrays[name] = jax.ShapeDtypeStruct(shape, kind, sharding=self.sharding(name))
        return arrays

    def rows(self, batch_size: int) -> list[int]:
        """Return the rows of a global batch (its lanes) that this process's devices hold."""
        # Devices that differ along other axes of the mesh only give the same span several times.
        spans = self.of_rows.addressable_devices_indices_map((batch_size, 1)).values()
        return sorted(
            {row for span in spans if span for row in range(*span[0].indices(batch_size))}
        )

    def place(self, local: Mapping[str, np.ndarray], batch_size: int) -> dict[str, jax.Array]:
        """Put this process's rows, [len(rows(batch_size)), ...] each, into global arrays
        [batch_size, ...]; arrays that the step does not use are left out."""
        # Rows of text have no `real`: a position with a document is one.
        if "real" in self._fields and "segments" in local:
            local = {"real": local["segments"] > 0, **local}
        # What a step does not read would be sent to the devices for nothing.
        used = {*self._fields, "bytes"}
        return {
            name: self.put(rows, batch_size, self.sharding(name))
            for name, rows in local.items()
            if name in used
        }

    def put(self, local: np.ndarray, batch_size: int, placement: NamedSharding) -> jax.Array:
        """Put this process's rows, [len(rows(batch_size)), ...], into a global array
        [batch_size, ...]."""
        where = {row: i for i, row in enumerate(self.rows(batch_size))}

        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index
            # A device's rows are neighbours in the global batch, and local rows are sorted, so they
            # are neighbours here too.
            span = range(*index[0].indices(batch_size))
            return local[where[span[0]] : where[span[-1]] + 1][:, *index[1:]]

        return jax.make_array_from_callback((batch_size, *local.shape[1:]), placement, piece)


class BatchMetrics:
    """Metrics of what a batch holds, by the counts that lanes make (lanes.FED)."""

    def __init__(self, cfg: DataConfig, batches: Batches, fields: Mapping[str, "Field"]):
        self._batches = batches
        self._names = cfg.named
        ends = any(source.epochs for source in cfg.sources)
        # concat fills each row, so only the end of the data leaves padding.
        self._packed = (cfg.packing != "concat" or ends) and "image" not in fields
        everywhere = NamedSharding(batches.of_rows.mesh, PartitionSpec())
        # Summed on the devices over the rows of all processes, so that every process sees the same
        # numbers without an exchange between hosts.
        self._sum = jax.jit(self._metrics, static_argnums=1, out_shardings=everywhere)

    @property
    def varies(self) -> bool:
        """True if the metrics differ between batches."""
        return self._packed or len(self._names) > 1

    def __call__(self, counts: np.ndarray, rows: int, length: int) -> dict[str, jax.Array]:
        """Return `fed/NAME`, the tokens (of images, the images) of each source, and with packing
        the shares `padding` and `cut_documents`, as scalars on the devices. `counts`: int32 [this
        process's rows, sources + 2]; `rows` and `length` are those of the global batch."""
        placed = self._batches.put(counts, rows, self._batches.of_rows)
        return self._sum(placed, rows * length)

    def _metrics(self, counts: jax.Array, tokens: int) -> dict[str, jax.Array]:
        sums = counts.sum(0)
        metrics = {f"fed/{name}": sums[i] for i, name in enumerate(self._names)}
        if self._packed:
            metrics["padding"] = 1 - sums[:-2].sum() / tokens
            metrics["cut_documents"] = sums[-1] / jnp.maximum(sums[-2], 1)
        return metrics
