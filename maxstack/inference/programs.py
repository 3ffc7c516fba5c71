"""Compiled programs of inference. Shapes: R rows of all replicas  O outputs  S slots  W pages of a
request at most  D embed  V vocab."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import layout as jax_layout
from jax.sharding import NamedSharding, PartitionSpec

from maxstack.hardware.compiling import in_order, sparing
from maxstack.inference import bursts
from maxstack.inference.bursts import Bounds, Made, Rules
from maxstack.inference.layout import Layout
from maxstack.inference.scheduler import Copy, Limits, PageCopy
from maxstack.kernels.backends import Choice, recording
from maxstack.kernels.paged_attention import BITS
from maxstack.layers.by_rows import by_rows
from maxstack.layers.cache import Cache, Rows
from maxstack.models.model import weights_of
from maxstack.schema.mesh import parts
from maxstack.schema.parts import Cached
from maxstack.sharding import spec
from maxstack.state import flat, tree
from maxstack.weights.adapted_rows import with_adapters
from maxstack.weights.rewrite import beside

if TYPE_CHECKING:
    from maxstack.inference.adapters import Adapters
    from maxstack.run import Run
    from maxstack.schema.config import Config
    from maxstack.weights.cpu_matrix import CpuMatrix


def serving(cfg: "Config") -> "Config":
    """The configuration with what inference does otherwise than training: no token is dropped by a
    capacity."""
    blocks = {
        name: block.model_copy(update={"mlp": block.mlp.dropless()})
        for name, block in cfg.model.blocks.items()
    }
    model = cfg.model.model_copy(update={"blocks": blocks})
    return cfg.model_copy(update={"model": model})


GROUP = 16
"""Rows that experts and projections of latents compute at a time on a CPU."""
OUTPUTS = 128
"""Rows whose logits are computed at a time, at most; the rest of a step follows."""

COPIES = 64
"""Pages that are copied at a time."""


def sizes_of(limits: Limits) -> tuple[int, ...]:
    """Numbers of rows that steps may have: the most, and shares of it. Answers of a few requests
    need few rows, which cost less on a CPU; each number is another program to compile."""
    return tuple(sorted({max(1, limits.rows // share) for share in (128, 64, 32, 16, 4, 1)}))


class Batch(NamedTuple):
    """Rows of a step."""

    rows: Rows
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
        self._original = originals(run)
        self._params: Any = None
        if adapters.specs:
            specs, weights = adapters.specs, adapters.weights
            self._graph, self._state = with_adapters(self._graph, self._state, specs, weights)
            self._original |= {f"{path}/base" for path in specs}
        self._matrices: dict[str, CpuMatrix] = {}
        if run.mesh.size == 1 and layout.platform == "cpu":
            from maxstack.weights.cpu_matrix import with_cpu_matrices

            self._graph, self._matrices = with_cpu_matrices(self._graph, self._state)
        self._makers = {path: jax.jit(matrix.made) for path, matrix in self._matrices.items()}
        self._group: int | None = GROUP if self._matrices else 0
        if run.cfg.serve.identical == "any":
            self._group = None
        ordered = in_order(run.mesh)
        self._made = jax.jit(self.empty, out_shardings=self.shardings(), compiler_options=ordered)
        self.cache: Any = None
        everywhere = NamedSharding(run.mesh, PartitionSpec())
        self._forward = jax.jit(
            run.within(self.step),
            static_argnums=4,
            donate_argnums=1,
            out_shardings=(everywhere, self.shardings()),
            compiler_options=ordered | sparing(run.mesh),
        )
        self._head = jax.jit(
            run.within(self.logits_of),
            static_argnums=3,
            out_shardings=everywhere,
            compiler_options=ordered,
        )
        self._burst = jax.jit(
            run.within(self._steps),
            static_argnums=5,
            donate_argnums=1,
            out_shardings=(everywhere, self.shardings()),
            compiler_options=ordered | sparing(run.mesh),
        )
        self._copy = jax.jit(
            self._copied,
            donate_argnums=0,
            out_shardings=self.shardings(),
            compiler_options=ordered,
        )
        self._copy_pages = jax.jit(
            self._with_copies,
            static_argnums=3,
            donate_argnums=0,
            out_shardings=self.shardings(),
            compiler_options=ordered,
        )

    def load(self, params: Any, keep: bool = False) -> None:
        """Take the weights of the run in place of those before; unless they are to be kept, arrays
        are deleted as others are made of them. None: forget them."""
        self._params = None
        if self.cache is None:
            self.cache = self._made()
        if params is not None:
            self._params = self.prepare(params, keep)

    def prepare(self, params: Any, keep: bool) -> Any:
        """The weights of the run as steps read them; see `prepared`."""
        specs, weights = self._adapters.specs, self._adapters.weights
        if specs:
            params = tree({**beside(flat(params), specs), **weights})
        dtype = self._run.cfg.model.dtype
        return prepared(self._state, params, self._makers, self._original, dtype, keep)

    def kernels(self) -> list[Choice]:
        """The kernels that serve the largest step; no array is made."""
        batch, _ = self.batch([])
        with recording() as choices:
            params = jax.eval_shape(
                lambda params: self.prepare(params, keep=True), self._run.abstract.params
            )
            cache = jax.eval_shape(self.empty)
            step = self._run.within(functools.partial(self.step, x_RD=None, module=None))
            jax.eval_shape(step, params, cache, batch)
        return choices

    def batch(self, pieces: Sequence[Rowed]) -> tuple[Batch, list[int]]:
        """Pieces as a step of the smallest size that holds them, each replica's from its own first
        row on; and the first row of each piece."""
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
        return Batch(Rows(*rows), tuple(tables)), firsts

    @property
    def adapters(self) -> int:
        """Number of adapters."""
        return len(self._adapters.names)

    @property
    def slots(self) -> int:
        """Slots of a replica: nobody's, of requests, of snapshots."""
        return 1 + self.limits.requests + self.limits.snapshots

    def forward(
        self, batch: Batch, x_RD: jax.Array | None = None, module: int | None = None
    ) -> jax.Array:
        """What the last block gives for each row of a step [R, D], or with `x_RD`, which is that of
        the model or the module before, a module of multi-token prediction, for which `batch` holds
        the tokens as `Decoder.decode_further` reads them; keys and values go to the cache."""
        x_RD, self.cache = self._forward(self._params, self.cache, batch, x_RD, module)
        return x_RD

    @property
    def outputs(self) -> tuple[int, ...]:
        """Numbers of rows whose logits are computed at a time."""
        return tuple(size for size in self.sizes if size <= OUTPUTS) or (OUTPUTS,)

    def head(
        self, x_RD: jax.Array, rows: Sequence[int], module: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """(normed states [O, D], logits float32 [O, V]) of at most outputs[-1] rows, and of others
        after them, of what `forward` or a module gave."""
        wanted_O = np.zeros(next(size for size in self.outputs if size >= len(rows)), np.int32)
        wanted_O[: len(rows)] = rows
        return self._head(self._params, x_RD, wanted_O, module)

    def burst(self, batch: Batch, rules: Rules, bounds: Bounds, top: int | None) -> Made:
        """Tokens of several steps, from a batch of the last known token of each request; `top`:
        likeliest tokens to report, None: no log-probabilities."""
        made, self.cache = self._burst(self._params, self.cache, batch, rules, bounds, top)
        return jax.device_get(made)

    def copy(self, copies: Sequence[Copy | PageCopy]) -> None:
        """Copies of states between slots, one after the other, and of pages."""
        pages = []
        for copy in copies:
            if isinstance(copy, PageCopy):
                first = copy.replica * (1 + self.limits.pages[copy.group])
                pages.append((copy.group, first + copy.source, first + copy.target))
            else:
                first = copy.replica * self.slots
                self.cache = self._copy(self.cache, first + copy.source, first + copy.target)
        for group in range(len(self._layout.reaches)):
            own = [ids for of, *ids in pages if of == group]
            for start in range(0, len(own), COPIES):
                ids = np.zeros((2, COPIES), np.int32)  # page 0 is nobody's
                some = own[start : start + COPIES]
                ids[:, : len(some)] = np.transpose(some)
                self.cache = self._copy_pages(self.cache, *ids, group)

    def step(
        self, params: Any, cache: Any, batch: Batch, x_RD: jax.Array | None, module: int | None
    ) -> tuple[jax.Array, Any]:
        """`forward` as a function: what the last block gives, and the next cache."""
        model = nnx.merge(self._graph, nnx.State(params))
        tables = [batch.tables[group] for group in self._layout.groups]
        backend = self._run.cfg.serve.attention
        kept = Cache(self._layout.owners, tables, list(cache), backend)
        with by_rows(self._group, batch.rows.adapters_R):
            if x_RD is None:
                x_R1D = model.decode(batch.rows, kept, self._max_length)
            else:
                before, length = x_RD[:, None], self._max_length
                x_R1D = model.decode_further(module, before, batch.rows, kept, length)
        return x_R1D[:, 0], kept.arrays

    def _steps(
        self,
        params: Any,
        cache: Any,
        batch: Batch,
        rules: Rules,
        bounds: Bounds,
        top: int | None,
    ) -> tuple[Made, Any]:
        everywhere = NamedSharding(self._run.mesh, PartitionSpec())
        whole = functools.partial(jax.lax.with_sharding_constraint, shardings=everywhere)

        def forward(rows: Rows, cache: Any) -> tuple[jax.Array, Any]:
            x_RD, cache = self.step(params, cache, batch._replace(rows=rows), None, None)
            return whole(x_RD), cache

        def head(x_OD: jax.Array) -> jax.Array:
            return whole(self.logits_of(params, x_OD, jnp.arange(x_OD.shape[0]), None)[1])

        sizes = self.replicas, self.outputs[-1]
        return bursts.run(forward, head, batch.rows, cache, rules, bounds, top, sizes)

    def logits_of(
        self, params: Any, x_RD: jax.Array, wanted_O: jax.Array, module: int | None
    ) -> tuple[jax.Array, jax.Array]:
        """`head` as a function."""
        model = nnx.merge(self._graph, nnx.State(params))
        norm = model.norm if module is None else model.mtp[f"{module}"].norm
        with by_rows(self._group):
            x_O1D = norm(x_RD[wanted_O][:, None])
            return x_O1D[:, 0], model.logits(x_O1D)[:, 0]

    def empty(self) -> list[dict[str, jax.Array]]:
        """The cache before the first step."""
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
        on_cpu = self._layout.platform == "cpu"
        return BITS.get(dtype, dtype) if on_cpu and not array.per_request else dtype

    def _leading(self, group: int, per_request: bool) -> tuple[int, ...]:
        if per_request:
            return (self.replicas * self.slots,)
        return self.replicas * (1 + self.limits.pages[group]), self.limits.page

    def shardings(self) -> list[dict[str, Any]]:
        """Where the arrays of the cache lie."""
        rules = self._run.cfg.mesh.rules

        def placed(array: Cached) -> Any:
            axes = ("batch", *("",) * (not array.per_request), *(dim.axis for dim in array.dims))
            sharding = NamedSharding(self._run.mesh, spec(axes, rules))
            order = self._layout.page_order(array)
            return jax_layout.Format(jax_layout.Layout(order), sharding) if order else sharding

        return [
            {name: placed(array) for name, array in arrays.items()}
            for arrays in self._layout.arrays
        ]

    def _with_copies(self, cache: Any, source: jax.Array, target: jax.Array, group: int) -> Any:
        """The cache with pages of a group copied over others."""

        def copied(array: jax.Array, per_request: bool, own: int) -> jax.Array:
            return array if per_request or own != group else array.at[target].set(array[source])

        layout = self._layout
        return [
            {name: copied(array, kept[name].per_request, own) for name, array in arrays.items()}
            for arrays, kept, own in zip(cache, layout.arrays, layout.groups, strict=True)
        ]

    def _copied(self, cache: Any, source: jax.Array, target: jax.Array) -> Any:
        return [
            {
                name: array.at[target].set(array[source]) if kept[name].per_request else array
                for name, array in arrays.items()
            }
            for arrays, kept in zip(cache, self._layout.arrays, strict=True)
        ]


def originals(run: "Run") -> set[str]:
    """Paths of weights that are kept in the compute dtype: the model's own, beside adapters too."""
    own = {*weights_of(run.cfg.model)}
    return own | {f"{path}/base" for path in run.weights.rewrite.adapted}


def prepared(
    state: nnx.State,
    params: Any,
    makers: Mapping[str, Callable[[jax.Array], jax.Array]],
    original: Collection[str],
    dtype: str,
    keep: bool,
) -> Any:
    """Weights as steps of inference read them: stacks of the pattern's repetitions as tuples, what
    is multiplied in the compute dtype kept in it if it is `original`, which changes no bit, and
    some as CPUs read them, by the `makers` of their paths. Arrays that are replaced are deleted,
    unless they are to be kept."""
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
        if path in makers:
            name = f"{path}/kept"
            kept = jax.tree.map(makers[path], kept)
        if kept is not array and not keep:
            jax.block_until_ready(kept)
            array.delete()
        weights[name] = kept
    return tree(weights)
