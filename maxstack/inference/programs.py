"""Compiled programs of inference.

A step is R rows, each one token of some request at its position; prompts and answers are computed
alike, so there are few programs: `step` for each number of rows, and `logits_of` for the rows whose
logits are wanted. Layers run as in training on rows [R, 1, D], but unrolled, and read and write the
cache while the step is traced. On one CPU device matrices are kept as weights/cpu_matrix.py says,
and what has no batch-invariant form is computed in groups of rows (layers/batch_invariance.py).
Shapes: R rows of all replicas  O outputs  S slots  W pages of a request at most  D embed  V vocab.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import layout as jax_layout
from jax.sharding import NamedSharding, PartitionSpec

from maxstack.hardware.compiling import in_order, sparing
from maxstack.inference import multi_step
from maxstack.inference.layout import Layout
from maxstack.inference.multi_step import Bounds, Made, Rules
from maxstack.inference.page_cache import Limits
from maxstack.inference.runner import Batch, Runner
from maxstack.kernels.backends import Choice, record_choices
from maxstack.kernels.paged_attention import BITS
from maxstack.layers.batch_invariance import batch_invariant
from maxstack.layers.cache import Cache, Rows
from maxstack.models.model import weights_of
from maxstack.schema.mesh import parts
from maxstack.schema.parts import Cached
from maxstack.sharding import spec
from maxstack.state import flat, tree
from maxstack.weights.multi_adapter import with_adapters
from maxstack.weights.rewrite import rebase

if TYPE_CHECKING:
    from maxstack.inference.adapters import Adapters
    from maxstack.run import Run
    from maxstack.schema.config import Config
    from maxstack.weights.cpu_matrix import CpuMatrix


def inference_config(cfg: "Config") -> "Config":
    """Return the configuration for inference, in which experts have no capacity and drop no
    token."""
    # With a capacity a token's result would depend on which other tokens choose its experts.
    blocks = {
        name: block.model_copy(update={"mlp": block.mlp.dropless()})
        for name, block in cfg.model.blocks.items()
    }
    model = cfg.model.model_copy(update={"blocks": blocks})
    return cfg.model_copy(update={"model": model})


GROUP = 16
"""Rows that experts and projections of latents compute at a time on a CPU."""


class Programs(Runner):
    """Compiled programs for the weights of a run on its mesh."""

    def __init__(
        self,
        run: "Run",
        layout: Layout,
        limits: Limits,
        max_length: int,
        adapters: "Adapters",
    ):
        self._run = run
        replicas, ordered = parts(run.cfg.mesh.rules["batch"], run.mesh.shape), in_order(run.mesh)
        shardings = cache_shardings(run, layout)
        super().__init__(layout, limits, max_length, replicas, shardings, ordered)
        self._graph, self._state = run.graph, run.weights.rewrite.state
        self._adapters, self.adapters = adapters, len(adapters.names)
        self._original = original_paths(run)
        self._params: Any = None
        if adapters.specs:
            specs, weights = adapters.specs, adapters.weights
            self._graph, self._state = with_adapters(self._graph, self._state, specs, weights)
            # An adapter moves the weight that it changes to `base`.
            self._original |= {f"{path}/base" for path in specs}
        self._matrices: dict[str, CpuMatrix] = {}
        # Panels are kept whole, so they are for one device alone.
        if run.mesh.size == 1 and layout.platform == "cpu":
            from maxstack.weights.cpu_matrix import with_cpu_matrices

            self._graph, self._matrices = with_cpu_matrices(self._graph, self._state)
        # Kept between loads: compiled anew for each rollout they took 0.3 s of it.
        self._makers = {path: jax.jit(matrix.convert) for path, matrix in self._matrices.items()}
        # Groups of one size give experts and latents equal bits in steps of 4 to 512 rows (all 13
        # golden models tried); without them such models had steps of 64 rows alone.
        self._group: int | None = GROUP if self._matrices else 0
        # Layers compute as in training, which gains at most 6 % in prefill and nothing visible in
        # decode.
        if run.cfg.serve.identical == "any":
            self._group = None
        # In its shards from the start: the whole cache may not fit on one device.
        self._made = jax.jit(self.empty, out_shardings=shardings, compiler_options=ordered)
        everywhere = NamedSharding(run.mesh, PartitionSpec())
        # The cache is donated: it is the largest array, and a copy would double it. `sparing`,
        # because XLA moves all transpositions of panels to the start of the program otherwise: 292
        # ms a step, not 34.
        self._forward = jax.jit(
            run.within(self.step),
            static_argnums=4,
            donate_argnums=1,
            out_shardings=(everywhere, shardings),
            compiler_options=ordered | sparing(run.mesh),
        )
        self._head = jax.jit(
            run.within(self.logits_of),
            static_argnums=3,
            out_shardings=everywhere,
            compiler_options=ordered,
        )
        self._multi_step = jax.jit(
            run.within(self._steps),
            static_argnums=5,
            donate_argnums=1,
            out_shardings=(everywhere, shardings),
            compiler_options=ordered | sparing(run.mesh),
        )

    def load(self, params: Any, keep: bool = False) -> None:
        """Replace the weights; unless `keep`, arrays are deleted as others are made of them. None:
        forget them."""
        # Let the old weights go before the new ones are made: both together may not fit.
        self._params = None
        # Keep the cache between loads; the scheduler forgets its contents (`Engine.load`).
        if self.cache is None:
            self.cache = self._made()
        if params is not None:
            self._params = self.prepare(params, keep)

    def prepare(self, params: Any, keep: bool) -> Any:
        """Return the weights of the run as steps read them; see `prepare_weights`."""
        specs, weights = self._adapters.specs, self._adapters.weights
        if specs:
            params = tree({**rebase(flat(params), specs), **weights})
        dtype = self._run.cfg.model.dtype
        return prepare_weights(self._state, params, self._makers, self._original, dtype, keep)

    def kernels(self) -> list[Choice]:
        """Return the kernels that serve the largest step; no array is made."""
        batch, _ = self.batch([])
        # Kernels are chosen while a step is traced, so trace one on shapes alone.
        with record_choices() as choices:
            params = jax.eval_shape(
                lambda params: self.prepare(params, keep=True), self._run.abstract.params
            )
            cache = jax.eval_shape(self.empty)
            step = self._run.within(functools.partial(self.step, x_RD=None, module=None))
            jax.eval_shape(step, params, cache, batch)
        return choices

    def forward(
        self, batch: Batch, x_RD: jax.Array | None = None, module: int | None = None
    ) -> jax.Array:
        x_RD, self.cache = self._forward(self._params, self.cache, batch, x_RD, module)
        return x_RD

    def head(
        self, x_RD: jax.Array, rows: Sequence[int], module: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        # Padding asks for row 0 again, which costs little and compiles few shapes.
        wanted_O = np.zeros(next(size for size in self.outputs if size >= len(rows)), np.int32)
        wanted_O[: len(rows)] = rows
        return self._head(self._params, x_RD, wanted_O, module)

    def multi_step(self, batch: Batch, rules: Rules, bounds: Bounds, top: int | None) -> Made:
        made, self.cache = self._multi_step(self._params, self.cache, batch, rules, bounds, top)
        # The only time that the host waits for these steps.
        return jax.device_get(made)

    def step(
        self, params: Any, cache: Any, batch: Batch, x_RD: jax.Array | None, module: int | None
    ) -> tuple[jax.Array, Any]:
        """Return what `forward` returns, and the next cache, as a function."""
        model = nnx.merge(self._graph, nnx.State(params))
        tables = [batch.tables[group] for group in self._layout.groups]
        backend = self._run.cfg.serve.attention
        kept = Cache(self._layout.owners, tables, list(cache), backend)
        with batch_invariant(self._group, batch.rows.adapters_R):
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
        # The sharding that single-step programs return, which the loop would otherwise leave to
        # XLA.
        whole = functools.partial(jax.lax.with_sharding_constraint, shardings=everywhere)

        def forward(rows: Rows, cache: Any) -> tuple[jax.Array, Any]:
            x_RD, cache = self.step(params, cache, batch._replace(rows=rows), None, None)
            return whole(x_RD), cache

        def head(x_OD: jax.Array) -> jax.Array:
            return whole(self.logits_of(params, x_OD, jnp.arange(x_OD.shape[0]), None)[1])

        sizes = self.replicas, self.outputs[-1]
        return multi_step.run(forward, head, batch.rows, cache, rules, bounds, top, sizes)

    def logits_of(
        self, params: Any, x_RD: jax.Array, wanted_O: jax.Array, module: int | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return what `head` returns, as a function."""
        model = nnx.merge(self._graph, nnx.State(params))
        norm = model.norm if module is None else model.mtp[f"{module}"].norm
        with batch_invariant(self._group):
            x_O1D = norm(x_RD[wanted_O][:, None])
            return x_O1D[:, 0], model.logits(x_O1D)[:, 0]

    def empty(self) -> list[dict[str, jax.Array]]:
        """Return the cache before the first step."""
        layout = self._layout
        cache = []
        for arrays, group in zip(layout.arrays, layout.groups, strict=True):
            own = {}
            for name, array in arrays.items():
                sizes = [dim.size for dim in array.dims]
                shape = *self._leading(group, array.per_request), *sizes
                own[name] = jnp.zeros(shape, self._dtype(array))
            cache.append(own)
        return cache

    def _dtype(self, array: Cached) -> str:
        dtype = array.dtype or self._run.cfg.model.dtype
        on_cpu = self._layout.platform == "cpu"
        # A cache of 8,193 pages of bfloat16 took 164 ms a layer and step of 4 rows, its bits as
        # uint16 2 ms.
        return BITS.get(dtype, dtype) if on_cpu and not array.per_request else dtype

    def _leading(self, group: int, per_request: bool) -> tuple[int, ...]:
        if per_request:
            return (self.replicas * self.slots,)
        # One page more than the scheduler knows: page 0, which rows without a token read and write.
        return self.replicas * (1 + self.limits.pages[group]), self.limits.page


def cache_shardings(run: "Run", layout: Layout) -> list[dict[str, Any]]:
    """Return the shardings and layouts of the arrays of the cache."""
    rules = run.cfg.mesh.rules

    def placement(array: Cached) -> Any:
        # The first dimension holds the pages of all replicas in order, so those of a replica lie on
        # its own devices.
        axes = ["batch"] if array.per_request else ["batch", ""]
        axes += [dim.axis for dim in array.dims]
        sharding = NamedSharding(run.mesh, spec(axes, rules))
        order = layout.page_order(array)
        # The layout is asked for at the edge of every program; else XLA copies the cache into its
        # own.
        return jax_layout.Format(jax_layout.Layout(order), sharding) if order else sharding

    shardings = []
    for arrays in layout.arrays:
        shardings.append({name: placement(array) for name, array in arrays.items()})
    return shardings


def original_paths(run: "Run") -> set[str]:
    """Return the paths of weights that are kept in the compute dtype: the model's own, not
    adapters."""
    own = {*weights_of(run.cfg.model)}
    return own | {f"{path}/base" for path in run.weights.rewrite.adapted}


def prepare_weights(
    state: nnx.State,
    params: Any,
    makers: Mapping[str, Callable[[jax.Array], jax.Array]],
    original: Collection[str],
    dtype: str,
    keep: bool,
) -> Any:
    """Return the weights as steps of inference read them: stacks of the pattern's repetitions as
    tuples, `original` weights that are multiplied in the compute dtype, and matrices converted by
    the `makers` of their paths. Replaced arrays are deleted, unless `keep`."""
    uses = {
        "/".join(map(str, path)): param.get_metadata().get("use")
        for path, param in nnx.to_flat_state(state)
    }
    weights = {}
    for path, array in flat(params).items():
        kept: Any = array
        # A weight that is multiplied is cast before its product anyway, so casting it once changes
        # no bit.
        if uses[path] and path in original:
            kept = array.astype(dtype)
        if path.startswith("blocks/"):
            # A scan over stacked weights would copy each layer's slice in each step.
            kept = tuple(kept[i] for i in range(kept.shape[0]))
        name = path
        if path in makers:
            name = f"{path}/kept"
            kept = jax.tree.map(makers[path], kept)
        # Wait before deleting: dispatch is asynchronous. Then free each weight as soon as it is
        # replaced, so that the old and the new model are never held together.
        if kept is not array and not keep:
            jax.block_until_ready(kept)
            array.delete()
        weights[name] = kept
    return tree(weights)
