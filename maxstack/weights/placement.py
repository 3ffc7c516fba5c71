"""The weights of a run by path: their sharding, and how they are made of other weights.

A checkpoint or a model folder may hold the original float weights, or quantized ones without
adapters. `sources` lists what a run can be made of, and the functions that make it. Original
weights are rewritten one at a time, so that no second copy of the model is in memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from maxstack.hardware import compiling
from maxstack.models.model import abstract
from maxstack.state import count, flat, of_weights, sharding_of_weights
from maxstack.weights.adapter import LEAVES
from maxstack.weights.rewrite import Rewrite, rebase

if TYPE_CHECKING:
    from maxstack.hf.adapter import Adapter
    from maxstack.hf.binding import BoundTensor
    from maxstack.schema.config import Config


@dataclasses.dataclass(frozen=True)
class PlacedWeights:
    """The weights that a run keeps, and the originals behind them."""

    cfg: "Config"
    mesh: Mesh
    rewrite: Rewrite
    """The weights that are quantized or have adapters."""
    shapes: Mapping[str, Any]
    """Shapes, dtypes and shardings by path."""

    @property
    def adapters(self) -> int:
        """Parameters of low-rank adapters."""
        return self._size_of("lora_a", "lora_b")

    @functools.cached_property
    def parameters(self) -> int:
        """Parameters of the original model and of adapters."""
        if not self.rewrite.replaced:
            return count(self.shapes)[0]
        # Quantized leaves do not count parameters: 4-bit types store two in an element, and scales
        # are none.
        return count(self.original)[0] + self._size_of(*LEAVES)

    def _size_of(self, *names: str) -> int:
        leaves = self.shapes.items()
        return sum(leaf.size for path, leaf in leaves if path.rpartition("/")[2] in names)

    @functools.cached_property
    def original(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of the original model's weights."""
        return self._place(abstract(self.cfg.model)[1])

    @property
    def sources(self) -> tuple[tuple[Mapping[str, Any], Callable[..., dict[str, Array]]], ...]:
        """Other weights that the run's can be made of, and how: original ones, and quantized ones
        without adapters."""
        if not self.rewrite.replaced:
            return ()
        # The same recipe without lora: what a run that only quantizes keeps in its checkpoints.
        quantized = self._place(Rewrite(self.cfg.model_copy(update={"lora": None})).state)
        return (self.original, self.from_original), (quantized, self.add_adapters)

    def add_adapters(
        self, weights: Iterable[tuple[str, Array]] | Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return weights of the run's quantization with new adapters beside them, by path."""
        leaves = rebase(dict(weights), self.rewrite.adapted)
        for path in self.rewrite.adapted:
            under = f"{path}/base/"
            # With the slash, PATH/base itself matches too, and not only the quantized leaves below
            # it.
            base = {name: leaf for name, leaf in leaves.items() if f"{name}/".startswith(under)}
            leaves |= self._make(functools.partial(self.rewrite.new_adapter, path), base)
        return leaves

    def from_original(self, weights: Iterable[tuple[str, Array]]) -> dict[str, Array]:
        """Make the run's weights of original ones, by path and sharded; each is rewritten before
        the next is read."""
        leaves: dict[str, Array] = {}
        # An iterator: the next weight is read when this one's float array is no longer needed.
        for path, array in weights:
            if path in self.shapes:
                leaves[path] = array
            else:
                leaves |= self._make(functools.partial(self.rewrite.leaves_of, path), array)
        return leaves

    def read_adapter(self, folder: str) -> dict[str, np.ndarray]:
        """Read the run's adapters from a folder in PEFT's format, by path. ConfigError where it is
        another adapter than `lora` describes."""
        from maxstack.hf import peft
        from maxstack.hf.adapter import Adapter

        lora = self.cfg.lora
        assert lora
        adapter = Adapter(folder, finite=not self.cfg.checkpoint.allow_nonfinite)
        adapted = {path: spec.contract for path, spec in self.rewrite.adapted.items()}
        names = {f"{path}/{name}" for path in adapted for name in LEAVES}
        shapes = {path: leaf.shape for path, leaf in self.shapes.items() if path in names}
        where = self.cfg.model.weights or "this model"
        return peft.read(adapter, lora, adapted, self.bind(adapter), shapes, where)

    def with_adapter(self, weights: dict[str, Any], folder: str) -> dict[str, Any]:
        """Return the weights by path with the adapter of a folder in place of a new one.
        ConfigError as in `read_adapter`."""
        return weights | {
            path: jax.device_put(leaf, self.shapes[path].sharding)
            for path, leaf in self.read_adapter(folder).items()
        }

    def bind(self, adapter: "Adapter") -> "list[BoundTensor]":
        """Return the tensors of the first family that expresses this model and has an adapter's
        modules. ConfigError where there is none."""
        from maxstack.hf import peft

        shapes = {path: leaf.shape for path, leaf in self.original.items()}
        return peft.bind_adapter(adapter, self.cfg.model, shapes)

    def _place(self, state: nnx.State) -> dict[str, Any]:
        params, info = of_weights(state)
        shardings = flat(sharding_of_weights(info, self.mesh, self.cfg.mesh.rules))
        return {path: leaf.update(sharding=shardings[path]) for path, leaf in flat(params).items()}

    def _make(self, make: Callable[..., dict[str, Array]], operands: Any) -> dict[str, Array]:
        # jit needs the shardings of exactly the leaves that `make` returns; out_shardings let each
        # device make its own shard.
        shardings = {path: self.shapes[path].sharding for path in jax.eval_shape(make, operands)}
        # Several collectives at once on CPU devices may wait for each other for ever.
        options = compiling.in_order(self.mesh)
        return jax.jit(make, out_shardings=shardings, compiler_options=options)(operands)
