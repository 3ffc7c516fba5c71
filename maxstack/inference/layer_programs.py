"""A step of inference through the layers of a decoder, by a program for each kind of layer.

A decoder repeats a few kinds of blocks. The host calls a kind's program once for each of its layers
with that layer's weights and cache, so the time to trace and compile does not grow with depth, and
a step is about as fast as one program of all layers (EXPERIMENTS.md, "A program for a layer").
Where several steps are one program (multi_step.py) or a program is exported, `trace` puts the same
functions behind each other.
Shapes: R rows of all replicas  S slots  W pages of a request at most  D embed.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maxstack.inference.layout import Layout
from maxstack.inference.runner import Batch
from maxstack.layers.batch_invariance import batch_invariant
from maxstack.layers.cache import LayerCache, Rows
from maxstack.layers.context import Context
from maxstack.models.decoder import Decoder
from maxstack.sharding import spec

if TYPE_CHECKING:
    from maxstack.run import Run

Arrays = dict[str, jax.Array]


class LayerPrograms:
    """Programs of the embedding and of each kind of layer."""

    def __init__(
        self,
        run: "Run",
        layout: Layout,
        max_length: int,
        group: int | None,
        shardings: list[dict[str, Any]],
        options: dict[str, Any],
    ):
        """`shardings` of the cache by layer, `options` of the compiler, `group` of
        `batch_invariant`."""
        self._run = run
        self._layout = layout
        self._max_length = max_length
        self._group = group
        self._shardings = shardings
        self._options = options
        self.outer: Any = None
        """Graph of the model without its blocks."""
        self.weights: Any = None
        """Its weights."""
        # The same shardings before and behind each layer, or layers of a kind had several programs.
        axes = ["batch", "residual", "embed"]
        self._stream = NamedSharding(run.mesh, spec(axes, run.cfg.mesh.rules))
        self._whole = NamedSharding(run.mesh, PartitionSpec()) if run.mesh.size == 1 else None
        self._inputs = jax.jit(
            run.within(self._flat_inputs),
            out_shardings=(self._stream, None, None),
            compiler_options=options,
        )
        self._context: dict[str, Any] = {}
        """Structure of the context that all layers read."""
        self._layers: list[tuple[int, Callable[..., tuple[jax.Array, Arrays]], Any]] = []
        """Index, program and weights of each layer."""
        self._programs: dict[Any, Callable[..., Any]] = {}
        # Traced once for a kind, however many layers call it.
        self._traced = jax.jit(self._layer, static_argnums=0)

    def load(self, model: Decoder) -> None:
        """Take the weights of a model."""
        self._split(model)
        if self._whole:
            # On one device, shardings of other spellings are the same place but other programs.
            self._place(lambda weights: jax.device_put(weights, self._whole))

    def shapes(self, model: Decoder) -> "LayerPrograms":
        """Return these programs for a model of shapes, for `compile`."""
        own = copy.copy(self)
        own._split(model)
        # The compiled functions read the graph from here.
        self.outer = own.outer
        placed = functools.partial(shape, sharding=self._whole)
        own._place(functools.partial(jax.tree.map, placed))
        return own

    def compile(self, cache: list[dict[str, Any]], batch: Batch) -> Any:
        """Compile what a step needs with a cache of these shapes -> shape of the residual stream
        after the last block."""
        x_R1D, context, extras = compile_ahead(self._inputs, self.weights, batch.rows)
        compiled = set()
        for i, layer, weights in self._layers:
            owner, table_SW = self._of(i, batch)
            given = weights, cache[owner], table_SW, x_R1D, context, batch.rows, extras[i]
            kind = layer, *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(given))
            if kind not in compiled:
                compiled.add(kind)
                x_R1D, _ = compile_ahead(layer, *given)
        return x_R1D

    def _split(self, model: Decoder) -> None:
        self._layers = []
        for i, block in enumerate(model.unrolled()):
            graph, state = nnx.split(block)
            # As lists: jax takes trees of Python's classes apart in Python, once a layer and step.
            weights, structure = jax.tree.flatten(state)
            program = self._program(graph, structure, self._layout.owners[i])
            self._layers.append((i, program, weights))
        self.outer, self.weights = nnx.split(without_blocks(model))

    def _place(self, place: Callable[[Any], Any]) -> None:
        self.weights = place(self.weights)
        self._layers = [(i, program, place(weights)) for i, program, weights in self._layers]

    def forget(self) -> None:
        """Let the weights go."""
        self._layers, self.weights = [], None

    def model(self, weights: nnx.State) -> Decoder:
        """Return the model without its blocks, inside a program."""
        # Loaded again, a model has the same graph, so the compiled programs stay right.
        return nnx.merge(self.outer, weights)

    def __call__(self, cache: list[Arrays], batch: Batch) -> tuple[jax.Array, list[Arrays]]:
        """Compute a step -> the residual stream [R, 1, D] after the last block, and the cache.
        Arrays of the given cache are donated."""
        # Once, not in the call of each layer.
        batch = jax.device_put(batch)
        x_R1D, context, extras = self._inputs(self.weights, batch.rows)
        cache = list(cache)
        for i, layer, weights in self._layers:
            owner, table_SW = self._of(i, batch)
            x_R1D, cache[owner] = layer(
                weights, cache[owner], table_SW, x_R1D, context, batch.rows, extras[i]
            )
        return x_R1D, cache

    def trace(
        self, model: Decoder, cache: list[Arrays], batch: Batch
    ) -> tuple[jax.Array, list[Arrays]]:
        """Compute the same inside a program that is being traced."""
        x_R1D, context, extras = self._begin(model, batch.rows)
        cache = list(cache)
        for i, block in enumerate(model.unrolled()):
            owner, table_SW = self._of(i, batch)
            x_R1D, cache[owner] = self._traced(
                *nnx.split(block), cache[owner], table_SW, x_R1D, context, batch.rows, extras[i]
            )
        return x_R1D, cache

    def _of(self, i: int, batch: Batch) -> tuple[int, jax.Array]:
        """Return the layer whose arrays layer `i` reads, and the page table for them."""
        owner = self._layout.owners[i]
        return owner, batch.tables[self._layout.groups[owner]]

    def _begin(self, model: Decoder, rows: Rows) -> tuple[jax.Array, Context, list[Any]]:
        with batch_invariant(self._group, rows.adapters_R):
            return model.decode_inputs(rows, self._max_length)

    def _flat_inputs(
        self, state: nnx.State, rows: Rows
    ) -> tuple[jax.Array, list[jax.Array], list[Any]]:
        x_R1D, context, extras = self._begin(self.model(state), rows)
        leaves, self._context["structure"] = jax.tree.flatten(context)
        return x_R1D, leaves, extras

    def _program(self, graph: Any, structure: Any, owner: int) -> Callable[..., Any]:
        """Return the compiled function of layers of one kind, whose weights have this structure."""
        shardings = self._shardings[owner]
        kind = graph, structure, tuple(sorted(shardings.items()))
        if kind not in self._programs:
            run = self._run

            def flat(
                weights: Any, arrays: Any, table_SW: Any, x_R1D: Any, context: Any, *others: Any
            ) -> tuple[jax.Array, Arrays]:
                state = structure.unflatten(weights)
                context = self._context["structure"].unflatten(context)
                return self._layer(graph, state, arrays, table_SW, x_R1D, context, *others)

            # The cache is donated: it is the largest array, and a copy would double it.
            self._programs[kind] = jax.jit(
                run.within(flat),
                donate_argnums=(1, 3),
                out_shardings=(self._stream, shardings),
                compiler_options=self._options,
            )
        return self._programs[kind]

    def _layer(
        self,
        graph: Any,
        state: nnx.State,
        arrays: Arrays,
        table_SW: jax.Array,
        x_R1D: jax.Array,
        context: Context,
        rows: Rows,
        extra_R1P: jax.Array | None,
    ) -> tuple[jax.Array, Arrays]:
        # Inside a larger program, XLA would fuse the end of a layer with the beginning of the next,
        # and a product and a sum that are fused are rounded once, not twice.
        x_R1D, context = jax.lax.optimization_barrier((x_R1D, context))
        kept = LayerCache(rows, table_SW, dict(arrays), self._run.cfg.serve.attention)
        with batch_invariant(self._group, rows.adapters_R):
            x_R1D, _ = nnx.merge(graph, state)(
                x_R1D, dataclasses.replace(context, cache=kept), extra_R1P
            )
        return x_R1D, kept.arrays


def shape(x: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Return the shape of an array on the host or on devices, with its sharding or this one."""
    sharding = sharding or getattr(x, "sharding", None)
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=sharding)


def compile_ahead(function: Any, *given: Any) -> Any:
    """Compile a jitted function for arguments that may be shapes -> shapes of its results. A call
    with such arguments compiles nothing more."""
    compiled = function.lower(*given).compile()
    return jax.tree.map(shape, compiled.out_info, compiled.output_shardings)


def without_blocks(model: Decoder) -> Decoder:
    """Return a decoder of embedding, modules, norm and head alone, of the same arrays."""
    # Or each call of these would pass the weights of all layers: 270 arrays of a 0.1 B model.
    graph, state = nnx.split(model)
    model = nnx.merge(graph, state)
    model.prefix = nnx.Dict({})
    model.blocks = nnx.Dict({})
    model.rest = nnx.Dict({})
    return model
