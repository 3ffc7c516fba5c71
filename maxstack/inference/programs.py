"""Compiled programs of inference. Shapes: R rows and O outputs of all replicas  S slots  W pages of
a request at most  V vocab."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maxstack.hardware.compiling import in_order
from maxstack.inference.layout import Layout
from maxstack.inference.scheduler import Copy, Limits
from maxstack.kernels.backends import Choice, recording
from maxstack.kernels.paged_attention import BITS
from maxstack.layers.cache import Cache, Rows
from maxstack.layers.norm import by_rows
from maxstack.models.model import weights_of
from maxstack.schema.mesh import parts
from maxstack.schema.parts import Cached
from maxstack.sharding import spec
from maxstack.state import flat, tree
from maxstack.weights.adapted_rows import choosing, with_adapters
from maxstack.weights.rewrite import beside

if TYPE_CHECKING:
    from maxstack.inference.adapters import Adapters
    from maxstack.run import Run
    from maxstack.schema.config import Config
    from maxstack.weights.panels import Panels


def serving(cfg: "Config") -> "Config":
    """The configuration with what inference does otherwise than training: no token is dropped by a
    capacity."""
    blocks = {
        name: block.model_copy(update={"mlp": block.mlp.dropless()})
        for name, block in cfg.model.blocks.items()
    }
    model = cfg.model.model_copy(update={"blocks": blocks})
    return cfg.model_copy(update={"model": model})


def sizes_of(limits: Limits) -> tuple[int, ...]:
    """Numbers of rows that steps may have: the most, and a half, a quarter and a sixteenth of it.
    Fewer cost as much on most devices."""
    return tuple(sorted({max(1, limits.rows // share) for share in (16, 4, 2, 1)}))


class Batch(NamedTuple):
    """Rows of a step, and the rows whose logits are wanted."""

    rows: Rows
    wanted_O: Any
    """Index of a row; 0 where no logits are wanted."""
    tables: tuple[Any, ...]
    """By group: int32 [S, W]."""


class Rowed(NamedTuple):
    """Tokens of a request, to be rows of a step."""

    replica: int
    slot: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[Sequence[int]]
    """By group."""
    adapter: int = 0


class Programs:
    """Programs for the weights of a run on its mesh, and the cache that they read and replace."""

    def __init__(
        self,
        run: "Run",
        layout: Layout,
        limits: Limits,
        max_length: int,
        adapters: "Adapters",
    ):
        self._run, self._layout, self.limits = run, layout, limits
        self.replicas = parts(run.cfg.mesh.rules["batch"], run.mesh.shape)
        self.width = -(-max_length // limits.page)
        self.sizes = sizes_of(limits)
        self._max_length = max_length
        self._graph, self._state = run.graph, run.weights.rewrite.state
        self._adapters = adapters
        self._original = {*weights_of(run.cfg.model)}
        self._params: Any = None
        if adapters.specs:
            specs, weights = adapters.specs, adapters.weights
            self._graph, self._state = with_adapters(self._graph, self._state, specs, weights)
            self._original |= {f"{path}/base" for path in specs}
        self._panels: dict[str, Panels] = {}
        if run.mesh.size == 1 and run.mesh.devices.flat[0].platform == "cpu":
            from maxstack.weights.panels import in_panels

            self._graph, self._panels = in_panels(self._graph, self._state)
        ordered = in_order(run.mesh)
        self._made = jax.jit(self._empty, out_shardings=self._shardings(), compiler_options=ordered)
        self.cache: Any = None
        self._forward = jax.jit(
            run.within(self._step),
            donate_argnums=1,
            out_shardings=self._results(),
            compiler_options=ordered,
        )
        self._further = jax.jit(
            run.within(self._further_step),
            static_argnums=4,
            donate_argnums=1,
            out_shardings=self._results(),
            compiler_options=ordered,
        )
        self._states: Any = None
        self._copy = jax.jit(
            self._copied,
            donate_argnums=0,
            out_shardings=self._shardings(),
            compiler_options=ordered,
        )

    def load(self, params: Any, keep: bool = False) -> None:
        """Take the weights of the run in place of those before; unless they are to be kept, arrays
        are deleted as others are made of them. None: forget them."""
        self._params = None
        if self.cache is None:
            self.cache = self._made()
        if params is not None:
            self._params = self._prepared(params, keep)

    def _prepared(self, params: Any, keep: bool) -> Any:
        specs, weights = self._adapters.specs, self._adapters.weights
        if specs:
            params = tree({**beside(flat(params), specs), **weights})
        dtype = self._run.cfg.model.dtype
        return prepared(self._state, params, self._panels, self._original, dtype, keep)

    def kernels(self) -> list[Choice]:
        """The kernels that serve the largest step; no array is made."""
        batch, _ = self.batch([], 0)
        with recording() as choices:
            params = jax.eval_shape(
                lambda params: self._prepared(params, keep=True), self._run.abstract.params
            )
            cache = jax.eval_shape(self._empty)
            jax.eval_shape(self._run.within(self._step), params, cache, batch)
        return choices

    def batch(self, pieces: Sequence[Rowed], wanted: int) -> tuple[Batch, list[int]]:
        """Pieces as a step of the smallest size that holds them, each replica's from its own first
        row on, with room for `wanted` logits; and the first row of each piece."""
        used = [0] * self.replicas
        for piece in pieces:
            used[piece.replica] += len(piece.tokens)
        size = next(size for size in self.sizes if size >= max(used)) if pieces else self.sizes[-1]
        rows = np.zeros((4, self.replicas * size), np.int32)
        rows[1] = -1
        tables = np.zeros(
            (len(self._layout.reaches), self.replicas * self.slots, self.width), np.int32
        )
        filled, firsts = [size * replica for replica in range(self.replicas)], []
        for replica, slot, start, tokens, pages, adapter in pieces:
            first = filled[replica]
            firsts.append(first)
            filled[replica] += len(tokens)
            own = slice(first, filled[replica])
            rows[0, own], rows[1, own] = tokens, np.arange(start, start + len(tokens))
            rows[2, own], rows[3, own] = slot, adapter
            for table, held in zip(tables, pages, strict=True):
                table[replica * self.slots + slot, : len(held)] = held
        few = rows.shape[1] // 4
        outputs = few if size == self.sizes[-1] and wanted <= few else rows.shape[1]
        return Batch(Rows(*rows), np.zeros(outputs, np.int32), tuple(tables)), firsts

    @property
    def adapters(self) -> int:
        """Number of adapters."""
        return len(self._adapters.names)

    @property
    def slots(self) -> int:
        """Slots of a replica: nobody's, of requests, of snapshots."""
        return 1 + self.limits.requests + self.limits.snapshots

    @property
    def _everywhere(self) -> NamedSharding:
        return NamedSharding(self._run.mesh, PartitionSpec())

    def forward(self, batch: Batch) -> jax.Array:
        """Logits float32 [O, V] of the wanted rows of a step; keys and values go to the cache."""
        logits_OV, self._states, self.cache = self._forward(self._params, self.cache, batch)
        return logits_OV

    def forward_further(self, batch: Batch, module: int) -> jax.Array:
        """Logits of a module of multi-token prediction for rows of the step that `forward`, or the
        module before, computed; `batch` holds the tokens as `Decoder.decode_further` reads them."""
        logits_OV, self._states, self.cache = self._further(
            self._params, self.cache, batch, self._states, module
        )
        return logits_OV

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies of states between slots, one after the other."""
        for copy in copies:
            first = copy.replica * self.slots
            self.cache = self._copy(self.cache, first + copy.source, first + copy.target)

    def _step(self, params: Any, cache: Any, batch: Batch) -> tuple[jax.Array, Any, Any]:
        model, kept = self._opened(params, cache, batch)
        with choosing(batch.rows.adapters_R), by_rows():
            x_R1D = model.decode(batch.rows, kept, self._max_length)
            normed_R1D = model.norm(x_R1D)
        states = x_R1D if self._run.cfg.serve.modules else None
        return model.logits(normed_R1D[batch.wanted_O])[:, 0], states, kept.arrays

    def _further_step(
        self, params: Any, cache: Any, batch: Batch, x_R1D: jax.Array, module: int
    ) -> tuple[jax.Array, Any, Any]:
        model, kept = self._opened(params, cache, batch)
        with choosing(batch.rows.adapters_R), by_rows():
            x_R1D = model.decode_further(module, x_R1D, batch.rows, kept, self._max_length)
            normed_R1D = model.mtp[f"{module}"].norm(x_R1D)
        return model.logits(normed_R1D[batch.wanted_O])[:, 0], x_R1D, kept.arrays

    def _opened(self, params: Any, cache: Any, batch: Batch) -> tuple[Any, Cache]:
        tables = [batch.tables[group] for group in self._layout.groups]
        backend = self._run.cfg.serve.attention
        kept = Cache(self._layout.owners, tables, list(cache), backend)
        return nnx.merge(self._graph, nnx.State(params)), kept

    def _results(self) -> tuple[Any, Any, Any]:
        """Shardings of logits, states of rows and cache."""
        rows = NamedSharding(self._run.mesh, spec(("batch",), self._run.cfg.mesh.rules))
        return self._everywhere, rows, self._shardings()

    def _empty(self) -> list[dict[str, jax.Array]]:
        layout = self._layout
        return [
            {
                name: jnp.zeros(
                    (*self._leading(group, array.per_request), *(dim.size for dim in array.dims)),
                    self._dtype(array),
                )
                for name, array in arrays.items()
            }
            for arrays, group in zip(layout.arrays, layout.groups, strict=True)
        ]

    def _dtype(self, array: Cached) -> str:
        dtype = array.dtype or self._run.cfg.model.dtype
        on_cpu = self._run.mesh.devices.flat[0].platform == "cpu"
        return BITS.get(dtype, dtype) if on_cpu and not array.per_request else dtype

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


def prepared(
    state: nnx.State,
    params: Any,
    panels: Mapping[str, "Panels"],
    original: Collection[str],
    dtype: str,
    keep: bool,
) -> Any:
    """Weights as steps of inference read them: stacks of the pattern's repetitions as tuples, what
    is multiplied in the compute dtype kept in it if it is `original`, which changes no bit, and
    some in panels. Arrays that are replaced are deleted, unless they are to be kept."""
    uses = {
        "/".join(map(str, path)): param.get_metadata().get("use")
        for path, param in nnx.to_flat_state(state)
    }
    weights = {}
    for path, array in flat(params).items():
        kept: Any = array
        if uses[path] and path in original:
            kept = array.astype(dtype)
        if path.startswith("blocks/"):
            kept = tuple(kept[i] for i in range(kept.shape[0]))
        name = path
        if path in panels:
            name = f"{path}/panels"
            make = jax.jit(panels[path].made)
            kept = jax.tree.map(make, kept)
        if kept is not array and not keep:
            jax.block_until_ready(kept)
            array.delete()
        weights[name] = kept
    return tree(weights)
