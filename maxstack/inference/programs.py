"""Compiled programs of inference.

A step is R rows, each one token of some request at its position; prompts and answers are computed
alike, so there are few programs: those of layer_programs.py for each number of rows, and `head` for
the rows whose logits are wanted. Layers run as in training on rows [R, 1, D], but read and write
the cache. On one CPU device matrices are kept as weights/cpu_matrix.py says, and what has no
batch-invariant form is computed in groups of rows (layers/batch_invariance.py).
Shapes: R rows of all replicas  O outputs  S slots  W pages of a request at most  D embed  V vocab.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maxstack.hardware.compiling import in_order, sparing
from maxstack.hf.layer_reader import Kept
from maxstack.inference import multi_step
from maxstack.inference.cache_arrays import CacheArrays, cache_shardings
from maxstack.inference.layer_programs import LayerPrograms, compile_ahead, shape
from maxstack.inference.layout import Layout
from maxstack.inference.multi_step import Bounds, Made, Rules
from maxstack.inference.page_cache import Limits
from maxstack.inference.runner import Batch, Runner
from maxstack.kernels.backends import Choice, record_choices
from maxstack.layers.batch_invariance import batch_invariant
from maxstack.layers.cache import LayerCache, Rows
from maxstack.models.model import weights_of
from maxstack.schema.mesh import parts
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
FEWEST, SMALL = 16, 1 << 23
"""Pages, and bytes of a group's pages, with which a cache that grows begins at least."""
GROWTH = 4
"""The factor by which it grows: for each size programs are compiled anew."""
THREADS = 2
"""Weights that are converted, and sizes of step that are compiled, at a time."""
SCRATCH = 128
"""Tokens of a text on which sizes of steps are tried."""


class Programs(Runner):
    """Compiled programs for the weights of a run on its mesh."""

    def __init__(
        self,
        run: "Run",
        layout: Layout,
        limits: Limits,
        max_length: int,
        adapters: "Adapters",
        on_demand: int | None = None,
    ):
        """`on_demand`: the cache begins with room for so many tokens, grows up to `limits.pages`,
        and has room for texts on which sizes of steps are tried (batch_invariance.py)."""
        self._run = run
        replicas, ordered = parts(run.cfg.mesh.rules["batch"], run.mesh.shape), in_order(run.mesh)
        shardings = cache_shardings(run, layout)
        spare = 0
        if on_demand is not None:
            spare = 2 * -(-min(limits.rows, max_length, SCRATCH) // limits.page)
        super().__init__(layout, limits, max_length, replicas, shardings, ordered, spare)
        if on_demand is not None:
            # Few numbers of pages, since programs are compiled for each.
            pages = FEWEST
            while pages * limits.page < on_demand:
                pages *= GROWTH
            self.held = tuple(
                min(most, max(pages, SMALL // max(1, layout.token_bytes(group) * limits.page)))
                for group, most in enumerate(limits.pages)
            )
        self._arrays = CacheArrays(self, run.cfg.model.dtype, shardings, ordered)
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
        self._makers = {
            path: jax.jit(functools.partial(convert_layer, matrix))
            for path, matrix in self._matrices.items()
        }
        # Groups of one size give experts and latents equal bits in steps of 4 to 512 rows (all 13
        # golden models tried); without them such models had steps of 64 rows alone.
        self._group: int | None = GROUP if self._matrices else 0
        # Layers compute as in training, which gains at most 6 % in prefill and nothing visible in
        # decode.
        if run.cfg.serve.identical == "any":
            self._group = None
        everywhere = NamedSharding(run.mesh, PartitionSpec())
        # `sparing`, because XLA moves all transpositions of panels to the start of a program
        # otherwise: 292 ms a step, not 34.
        options = ordered | sparing(run.mesh)
        self._compiler = ThreadPoolExecutor(1, "compiler")
        self._compiled: dict[Any, Future[Any]] = {}
        self._compiles_larger = False
        self._layers = LayerPrograms(run, layout, max_length, self._group, shardings, options)
        self._whole = jax.jit(lambda x_R1D: x_R1D[:, 0], out_shardings=everywhere)
        self._further = jax.jit(
            run.within(self._module_step),
            static_argnums=4,
            donate_argnums=1,
            out_shardings=(everywhere, shardings[-1]),
            compiler_options=options,
        )
        # Apart from the head, which is so compiled for numbers of outputs alone, not for each with
        # each size of step.
        self._take = jax.jit(lambda x_RD, wanted_O: x_RD[wanted_O], out_shardings=everywhere)
        self._head = jax.jit(
            run.within(lambda state, *given: self._logits(self._layers.model(state), *given)),
            static_argnums=2,
            out_shardings=everywhere,
            compiler_options=ordered,
        )
        self._multi_step = jax.jit(
            run.within(self._steps),
            static_argnums=5,
            donate_argnums=1,
            out_shardings=(everywhere, shardings),
            compiler_options=options,
        )

    def load(self, params: Any, keep: bool = False) -> None:
        """Replace the weights; unless `keep`, arrays are deleted as others are made of them. None:
        forget them."""
        # Let the old weights go before the new ones are made: both together may not fit.
        self._params = None
        self._layers.forget()
        # Keep the cache between loads; the scheduler forgets its contents (`Engine.load`).
        if self.cache is None:
            self.renew()
        if params is not None:
            self._params = self.prepare(params, keep)
            self._layers.load(self._model(self._params))

    def compile(self, sizes: Sequence[int], outputs: Collection[int]) -> Any:
        # On several devices only the loaded weights have the shardings that programs depend on.
        if self._run.mesh.size > 1:
            return None
        with ThreadPoolExecutor(THREADS, "compiler") as pool:
            made = [*pool.map(self._compile_size(self.held, outputs), sizes)]
        logits = (logits_OV for logits_OV in made if logits_OV is not None)
        return min(logits, key=lambda logits_OV: logits_OV.shape[0], default=None)

    def compile_larger(self) -> None:
        self._compiles_larger = True
        held = self._enough([1 + held for held in self.held])
        if held != self.held and self._run.mesh.size == 1:
            # The head does not read the cache.
            compile_size = self._compile_size(held, ())
            for size in self.sizes:
                self._compiler.submit(compile_size, size)

    def _compile_size(self, held: Sequence[int], outputs: Collection[int]) -> Callable[[int], Any]:
        """Return a function that compiles the programs of a size of step, with a cache of so many
        pages by group and the head for so many outputs -> the shape of its logits, None where the
        head comes with another size."""
        layers = self._layers.shapes(self._model(self._prepared_shapes()))
        cache = self._arrays.shapes(self.cache, held)

        def compile_size(size: int) -> Any:
            batch, _ = self.batch([], size)
            x_RD = compile_ahead(self._whole, layers.compile(cache, batch))
            # Of each step any number of rows may be taken; a head comes with the smallest step.
            logits_OV = None
            for count in self.outputs:
                if count > size:
                    break
                x_OD = compile_ahead(self._take, x_RD, np.zeros(count, np.int32))
                if count in outputs and size == next(s for s in self.sizes if s >= count):
                    logits_OV = compile_ahead(self._head, layers.weights, x_OD, None)[1]
            return logits_OV

        return compile_size

    def renew(self) -> None:
        self.cache = self._arrays.make()

    def close(self) -> None:
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _prepared_shapes(self) -> Any:
        params = self._run.abstract.params
        return jax.eval_shape(lambda params: self.prepare(params, keep=True), params)

    def kept(self) -> dict[str, Kept] | None:
        run = self._run
        # Sharded, quantized and adapted weights are made of arrays on the devices.
        if run.mesh.size > 1 or run.weights.rewrite.replaced or self._adapters.specs:
            return None
        uses, dtype = _uses(self._state), np.dtype(run.cfg.model.dtype)
        kept = {}
        for path, leaf in run.weights.original.items():
            matrix = self._matrices.get(path)
            own = dtype if uses[path] else leaf.dtype
            lay = matrix.convert if matrix else None
            kept[path] = Kept(leaf.shape, own, path.startswith("blocks/"), lay)
        return kept

    def load_prepared(self, weights: Mapping[str, Any]) -> None:
        self.load(None)
        named = {
            f"{path}/kept" if path in self._matrices else path: own for path, own in weights.items()
        }
        self._params = tree(named)
        self._layers.load(self._model(self._params))

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
            cache = jax.eval_shape(self.empty)
            jax.eval_shape(self._run.within(self.step), self._prepared_shapes(), cache, batch)
        return choices

    def empty(self) -> list[dict[str, jax.Array]]:
        """Return the cache before the first step, as a function."""
        return self._arrays.empty()

    def hold(self, pages: Sequence[int]) -> None:
        before, enough = self.held, self._enough(pages)
        if enough != before:
            self.held = enough
            self.cache = self._arrays.grow(self.cache, before)
            if self._compiles_larger:
                self.compile_larger()

    def _enough(self, pages: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            held if page <= held else min(most, max(page, GROWTH * held))
            for page, held, most in zip(pages, self.held, self.limits.pages, strict=True)
        )

    def forward(
        self, batch: Batch, x_RD: jax.Array | None = None, module: int | None = None
    ) -> jax.Array:
        if x_RD is None:
            x_R1D, self.cache = self._layers(self.cache, batch)
            return self._whole(x_R1D)
        assert module is not None
        own = self._run.cfg.decoder.layers + module
        x_RD, self.cache[own] = self._further(
            self._layers.weights, self.cache[own], batch, x_RD, module
        )
        return x_RD

    def head(
        self, x_RD: jax.Array, rows: Sequence[int], module: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        # Padding asks for row 0 again, which costs little and compiles few shapes.
        wanted_O = np.zeros(next(size for size in self.outputs if size >= len(rows)), np.int32)
        wanted_O[: len(rows)] = rows
        return self._head(self._layers.weights, self._take(x_RD, wanted_O), module)

    def multi_step(
        self, batch: Batch, rules: Rules, bounds: Bounds, top: int | None
    ) -> Made | None:
        given = self._params, self.cache, batch, rules, bounds
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (batch, rules))
        key = self.held, top, tuple(jax.tree.leaves(shapes))
        if key not in self._compiled:
            # In the background: this one program of all layers takes as long to compile as they are
            # many, and single steps give the same tokens meanwhile.
            lowered = functools.partial(self._multi_step.lower, *jax.tree.map(shape, given), top)
            self._compiled[key] = self._compiler.submit(lambda: lowered().compile())
        if not self._compiled[key].done():
            return None
        made, self.cache = self._compiled[key].result()(*given)
        # The only time that the host waits for these steps.
        return jax.device_get(made)

    def step(self, params: Any, cache: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """Return what `forward` returns without a module, and the next cache, as a function of
        prepared weights."""
        x_R1D, cache = self._layers.trace(self._model(params), cache, batch)
        return x_R1D[:, 0], cache

    def _module_step(
        self,
        state: nnx.State,
        arrays: dict[str, jax.Array],
        batch: Batch,
        x_RD: jax.Array,
        module: int,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        table_SW = batch.tables[self.layout.groups[self._run.cfg.decoder.layers + module]]
        backend = self._run.cfg.serve.attention
        kept = LayerCache(batch.rows, table_SW, dict(arrays), backend)
        with batch_invariant(self._group, batch.rows.adapters_R):
            x_R1D = self._layers.model(state).decode_further(
                module, x_RD[:, None], batch.rows, kept, self._max_length
            )
        return x_R1D[:, 0], kept.arrays

    def _model(self, params: Any) -> Any:
        return nnx.merge(self._graph, nnx.State(params))

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
            x_RD, cache = self.step(params, cache, batch._replace(rows=rows))
            return whole(x_RD), cache

        def head(x_OD: jax.Array) -> jax.Array:
            return whole(self.logits_of(params, x_OD)[1])

        sizes = self.replicas, self.outputs[-1]
        return multi_step.run(forward, head, batch.rows, cache, rules, bounds, top, sizes)

    def logits_of(self, params: Any, x_OD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return what `head` returns of all rows without a module, as a function of prepared
        weights."""
        return self._logits(self._model(params), x_OD, None)

    def _logits(
        self, model: Any, x_OD: jax.Array, module: int | None
    ) -> tuple[jax.Array, jax.Array]:
        norm = model.norm if module is None else model.mtp[f"{module}"].norm
        with batch_invariant(self._group):
            x_O1D = norm(x_OD[:, None])
            return x_O1D[:, 0], model.logits(x_O1D)[:, 0]


def original_paths(run: "Run") -> set[str]:
    """Return the paths of weights that are kept in the compute dtype: the model's own, not
    adapters."""
    own = {*weights_of(run.cfg.model)}
    return own | {f"{path}/base" for path in run.weights.rewrite.adapted}


def _uses(state: nnx.State) -> dict[str, str | None]:
    """Return what each weight is used for, by path."""
    pairs = nnx.to_flat_state(state)
    return {"/".join(map(str, path)): param.get_metadata().get("use") for path, param in pairs}


def convert_layer(matrix: "CpuMatrix", weight: jax.Array, layer: Any = None) -> jax.Array:
    """Return what a matrix keeps of a weight, or of one layer of a stack of weights."""
    return matrix.convert(weight if layer is None else weight[layer])


def prepare_weights(
    state: nnx.State,
    params: Any,
    makers: Mapping[str, Callable[..., jax.Array]],
    original: Collection[str],
    dtype: str,
    keep: bool,
) -> Any:
    """Return the weights as steps of inference read them: stacks of the pattern's repetitions as
    tuples, `original` weights that are multiplied in the compute dtype, and matrices converted by
    the `makers` of their paths (`convert_layer`). Replaced arrays are deleted, unless `keep`."""
    uses = _uses(state)

    def prepared(path: str, array: jax.Array) -> tuple[str, Any]:
        kept: Any = array
        # A weight that is multiplied is cast before its product anyway, so casting it once changes
        # no bit.
        if uses[path] and path in original:
            kept = array.astype(dtype)
        make = makers.get(path)
        if path.startswith("blocks/"):
            # A scan over stacked weights would copy each layer's slice in each step.
            layers = range(kept.shape[0])
            kept = tuple(make(kept, i) if make else kept[i] for i in layers)
        elif make:
            kept = make(kept)
        # Wait before deleting: dispatch is asynchronous. Then free each weight as soon as it is
        # replaced, so that the old and the new model are never held together.
        if kept is not array and not keep:
            jax.block_until_ready(kept)
            array.delete()
        return (f"{path}/kept" if make else path), kept

    pairs = flat(params).items()
    if keep or not makers:
        return tree(dict(itertools.starmap(prepared, pairs)))
    # XLA transposes on one thread.
    with ThreadPoolExecutor(THREADS) as pool:
        return tree(dict(pool.map(prepared, *zip(*pairs, strict=True))))
