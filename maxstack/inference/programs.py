"""Compiled programs of inference. Shapes: R rows and O outputs of all replicas  S slots  W pages of
a request at most  V vocab."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maxstack.hardware.compiling import in_order
from maxstack.inference.layout import Layout
from maxstack.inference.scheduler import Copy, Limits
from maxstack.layers.cache import Cache, Rows
from maxstack.models.model import weights_of
from maxstack.schema.mesh import parts
from maxstack.sharding import spec
from maxstack.state import flat, tree
from maxstack.weights.adapted_rows import choosing, install

if TYPE_CHECKING:
    from maxstack.run import Run
    from maxstack.schema.config import Config


def serving(cfg: "Config") -> "Config":
    """The configuration with what inference does otherwise than training: rows are split where
    batches are, no token is dropped by a capacity, and each layer's arrays stand alone."""
    rules = {**cfg.mesh.rules, "seq": (), "residual": ()}
    blocks = {
        name: block.model_copy(update={"mlp": block.mlp.dropless()})
        for name, block in cfg.model.blocks.items()
    }
    model = cfg.model.model_copy(update={"blocks": blocks})
    mesh = cfg.mesh.model_copy(update={"rules": rules})
    return cfg.model_copy(update={"model": model, "mesh": mesh})


class Batch(NamedTuple):
    """Rows of a step, and the rows whose logits are wanted."""

    rows: Rows
    wanted_O: Any
    """Index of a row; 0 where no logits are wanted."""
    tables: tuple[Any, ...]
    """By group: int32 [S, W]."""


class Programs:
    """Programs for the weights of a run on its mesh, and the cache that they read and replace."""

    def __init__(
        self,
        run: "Run",
        params: Any,
        layout: Layout,
        limits: Limits,
        max_length: int,
        adapters: Mapping[str, Any],
    ):
        """`adapters`: see adapters.Adapters."""
        self._run, self._layout, self.limits = run, layout, limits
        self.replicas = parts(run.cfg.mesh.rules["batch"], run.mesh.shape)
        self.width = -(-max_length // limits.page)
        self._max_length = max_length
        self._params, self._adapters = prepared(run, params), adapters
        ordered = in_order(run.mesh)
        self.cache = jax.jit(
            self._empty, out_shardings=self._shardings(), compiler_options=ordered
        )()
        self._forward = jax.jit(
            run.within(self._step),
            donate_argnums=1,
            out_shardings=(self._everywhere, self._shardings()),
            compiler_options=ordered,
        )
        self._copy = jax.jit(
            self._copied,
            donate_argnums=0,
            out_shardings=self._shardings(),
            compiler_options=ordered,
        )

    @property
    def adapters(self) -> int:
        """Number of an adapter that changes something; 0 where there is none."""
        return int(bool(self._adapters))

    @property
    def slots(self) -> int:
        """Slots of a replica: nobody's, of requests, of snapshots."""
        return 1 + self.limits.requests + self.limits.snapshots

    @property
    def _everywhere(self) -> NamedSharding:
        return NamedSharding(self._run.mesh, PartitionSpec())

    def forward(self, batch: Batch) -> jax.Array:
        """Logits float32 [O, V] of the wanted rows of a step; keys and values go to the cache."""
        logits_OV, self.cache = self._forward(self._params, self.cache, batch, self._adapters)
        return logits_OV

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies of states between slots, one after the other."""
        for copy in copies:
            first = copy.replica * self.slots
            self.cache = self._copy(self.cache, first + copy.source, first + copy.target)

    def _step(
        self, params: Any, cache: Any, batch: Batch, adapters: Mapping[str, Any]
    ) -> tuple[jax.Array, Any]:
        model = nnx.merge(self._run.graph, nnx.State(params))
        install(model, adapters)
        tables = [batch.tables[group] for group in self._layout.groups]
        backend = self._run.cfg.serve.attention
        kept = Cache(self._layout.owners, tables, list(cache), backend)
        with choosing(batch.rows.adapters_R):
            x_R1D = model.decode(batch.rows, kept, self._max_length)
        return model.logits(x_R1D[batch.wanted_O])[:, 0], kept.arrays

    def _empty(self) -> list[dict[str, jax.Array]]:
        cfg, layout = self._run.cfg.model, self._layout
        return [
            {
                name: jnp.zeros(
                    (*self._leading(group, array.per_request), *(dim.size for dim in array.dims)),
                    array.dtype or cfg.dtype,
                )
                for name, array in arrays.items()
            }
            for arrays, group in zip(layout.arrays, layout.groups, strict=True)
        ]

    def _leading(self, group: int, per_request: bool) -> tuple[int, ...]:
        if per_request:
            return (self.replicas * self.slots,)
        return self.replicas * (1 + self.limits.pages[group]), self.limits.page

    def _shardings(self) -> list[dict[str, NamedSharding]]:
        rules, mesh = self._run.cfg.mesh.rules, self._run.mesh
        return [
            {
                name: NamedSharding(
                    mesh,
                    spec(
                        ("batch",)
                        + ("",) * (not array.per_request)
                        + tuple(dim.axis for dim in array.dims),
                        rules,
                    ),
                )
                for name, array in arrays.items()
            }
            for arrays in self._layout.arrays
        ]

    def _copied(self, cache: Any, source: jax.Array, target: jax.Array) -> Any:
        return [
            {
                name: array.at[target].set(array[source]) if kept[name].per_request else array
                for name, array in arrays.items()
            }
            for arrays, kept in zip(cache, self._layout.arrays, strict=True)
        ]


def prepared(run: "Run", params: Any) -> Any:
    """Weights as steps of inference read them: stacks of the pattern's repetitions as tuples, and
    what is multiplied in the compute dtype kept in it, which changes no bit. Deletes the arrays
    that it replaces."""
    uses = {
        "/".join(map(str, path)): param.get_metadata().get("use")
        for path, param in nnx.to_flat_state(run.weights.rewrite.state)
    }
    original, weights = weights_of(run.cfg.model), {}
    for path, array in flat(params).items():
        kept = array
        if uses[path] and path in original:
            kept = array.astype(run.cfg.model.dtype)
        if path.startswith("blocks/"):
            kept = jax.block_until_ready(tuple(kept[i] for i in range(kept.shape[0])))
        if kept is not array:
            array.delete()
        weights[path] = kept
    return tree(weights)
