"""The weights of a run by path: where they lie on the mesh, and how they are made of the original
weights of the model and of adapters."""

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
from maxstack.weights.rewrite import Rewrite

if TYPE_CHECKING:
    from maxstack.hf.binding import BoundTensor
    from maxstack.hf.peft import Adapter
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
        """Parameters of the model, whatever is kept in their place, and of adapters."""
        if not self.rewrite.replaced:
            return count(self.shapes)[0]
        return count(self.original)[0] + self._size_of(*LEAVES)

    def _size_of(self, *names: str) -> int:
        """Numbers in all leaves of these names."""
        leaves = self.shapes.items()
        return sum(leaf.size for path, leaf in leaves if path.rpartition("/")[2] in names)

    @functools.cached_property
    def original(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of the model's weights before they are quantized and get
        adapters."""
        return self._placed(abstract(self.cfg.model)[1])

    @property
    def sources(self) -> tuple[tuple[Mapping[str, Any], Callable[..., dict[str, Array]]], ...]:
        """Weights that those of the run can be made of, and how: original ones, and without
        adapters."""
        if not self.rewrite.replaced:
            return ()
        quantized = self._placed(Rewrite(self.cfg.model_copy(update={"lora": None})).state)
        return (self.original, self.rewritten), (quantized, self.beside)

    def beside(
        self, weights: Iterable[tuple[str, Array]] | Mapping[str, Array]
    ) -> dict[str, Array]:
        """Fresh adapters beside weights of the run's quantization, by path."""
        leaves = self.rewrite.under_adapters(dict(weights))
        for path in self.rewrite.adapted:
            base = {
                name: leaf
                for name, leaf in leaves.items()
                if f"{name}/".startswith(f"{path}/base/")
            }
            leaves |= self._made(functools.partial(self.rewrite.adapters, path), base)
        return leaves

    def rewritten(self, weights: Iterable[tuple[str, Array]]) -> dict[str, Array]:
        """Weights of the run, made of original ones, by path and sharded; each is rewritten before
        the next is read."""
        leaves: dict[str, Array] = {}
        for path, array in weights:
            if path in self.shapes:
                leaves[path] = array
            else:
                leaves |= self._made(functools.partial(self.rewrite.kept, path), array)
        return leaves

    def adapter(self, folder: str) -> dict[str, np.ndarray]:
        """The run's adapters out of a folder in PEFT's format, by path. ConfigError where it is not
        lora's."""
        from maxstack.hf import peft

        lora = self.cfg.lora
        adapted = {path: spec.contract for path, spec in self.rewrite.adapted.items()}
        assert lora
        adapter = peft.Adapter(folder, finite=not self.cfg.checkpoint.allow_nonfinite)
        names = {f"{path}/{name}" for path in adapted for name in LEAVES}
        shapes = {path: leaf.shape for path, leaf in self.shapes.items() if path in names}
        return peft.read(
            adapter,
            lora,
            adapted,
            self.bound(adapter),
            shapes,
            self.cfg.model.weights or "this model",
        )

    def with_adapter(self, weights: dict[str, Any], folder: str) -> dict[str, Any]:
        """The weights by path, with the adapter of a folder in place of a fresh one. ConfigError
        where it is not lora's."""
        return weights | {
            path: jax.device_put(leaf, self.shapes[path].sharding)
            for path, leaf in self.adapter(folder).items()
        }

    def bound(self, adapter: "Adapter") -> "list[BoundTensor]":
        """The tensors of the first family that is this model and has an adapter's modules;
        ConfigError where there is none."""
        from maxstack.hf import peft

        return peft.bound_to(
            adapter, self.cfg.model, {path: leaf.shape for path, leaf in self.original.items()}
        )

    def _placed(self, state: nnx.State) -> dict[str, Any]:
        params, info = of_weights(state)
        shardings = flat(sharding_of_weights(info, self.mesh, self.cfg.mesh.rules))
        return {path: leaf.update(sharding=shardings[path]) for path, leaf in flat(params).items()}

    def _made(self, make: Callable[..., dict[str, Array]], operands: Any) -> dict[str, Array]:
        shardings = {path: self.shapes[path].sharding for path in jax.eval_shape(make, operands)}
        options = compiling.in_order(self.mesh)
        return jax.jit(make, out_shardings=shardings, compiler_options=options)(operands)
