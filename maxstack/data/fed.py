"""Figures of what was fed: tokens by source, padding, documents that a row cut."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxstack.data.batches import Batches
from maxstack.schema.data import DataConfig

if TYPE_CHECKING:
    from maxstack.schema.objective import RowField as Field


class Fed:
    """Counts of a process's rows -> figures of the whole batch, as scalars on the devices."""

    def __init__(self, cfg: DataConfig, batches: Batches, fields: Mapping[str, "Field"]):
        self._batches, self._names = batches, cfg.named
        ends = any(source.epochs for source in cfg.sources)
        self._packed = (cfg.packing != "concat" or ends) and "image" not in fields
        everywhere = NamedSharding(batches.of_rows.mesh, PartitionSpec())
        self._figures = jax.jit(self._summed, static_argnums=1, out_shardings=everywhere)

    @property
    def varies(self) -> bool:
        """True where the figures are not the same in every batch."""
        return self._packed or len(self._names) > 1

    def __call__(self, counts: np.ndarray, rows: int, length: int) -> dict[str, jax.Array]:
        """`fed/NAME`: tokens (of images, images) of each source; with packing the shares of
        `padding` and of `cut_documents`. `counts`: int32 [this process's rows, sources + 2], as
        lanes.FED; `rows` and `length` are those of the batch."""
        placed = self._batches.put(counts, rows, self._batches.of_rows)
        return self._figures(placed, rows * length)

    def _summed(self, counts: jax.Array, tokens: int) -> dict[str, jax.Array]:
        sums = counts.sum(0)
        figures = {f"fed/{name}": sums[i] for i, name in enumerate(self._names)}
        if self._packed:
            figures["padding"] = 1 - sums[:-2].sum() / tokens
            figures["cut_documents"] = sums[-1] / jnp.maximum(sums[-2], 1)
        return figures
