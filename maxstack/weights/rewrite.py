"""Weights of a model as a run has them: which are multiplied or kept in low precision, and which
have adapters. Models know nothing of it."""

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from maxstack.errors import ConfigError, quoted
from maxstack.layers.weight import Weight, draw
from maxstack.models.model import Model, initial, model_of
from maxstack.schema.foreign import equivalent
from maxstack.weights import adapter
from maxstack.weights.spec import WeightSpec, matches, module_of, near

if TYPE_CHECKING:
    from maxstack.schema.config import Config
    from maxstack.weights.quantization_errors import Errors
    from maxstack.weights.recipe import RuleMatch

Tree = dict[str, Any]
AnyArray = Array | np.ndarray


class Rewrite:
    """The model of `cfg` with substitutes for some weights: `graph` and `state` are those of
    nnx.split, and hold no arrays. ConfigError where a rule or a target takes nothing, or what it
    cannot serve.

    The original model is that without substitutes; weights of either are named by their paths.
    """

    def __init__(self, cfg: "Config", errors: "Errors | None" = None):
        """`errors`: the model computes as the original one does, and adds the changes that its
        recipe would make to them."""
        self._cfg, self._errors = cfg, errors
        self.matches: dict[str, RuleMatch] = {}
        self.adapted: dict[str, WeightSpec] = {}
        self.skipped: dict[str, None] = {}
        """Weights that targets of adapters match, but that take none."""
        self.graph, self.state = nnx.split(nnx.eval_shape(self._built))
        self._params = {
            "/".join(map(str, path)): param for path, param in nnx.to_flat_state(self.state)
        }

    def counting(self, real_BT: Array) -> contextlib.AbstractContextManager[None]:
        """Context in which errors are those of these positions alone."""
        if self._errors is None:
            return contextlib.nullcontext()
        from maxstack.weights.quantization_errors import counting

        return counting(real_BT)

    @property
    def replaced(self) -> set[str]:
        """Original weights that are kept as other leaves."""
        return {*self.adapted, *(path for path, match in self.matches.items() if match.kept_low)}

    def initial(self, seed: int) -> Tree:
        """Fresh weights."""
        drawn = initial(self._cfg.model, seed)
        if not self.replaced:
            return drawn
        # without a barrier XLA rounds what it draws in another way
        return self.applied(jax.lax.optimization_barrier(drawn))

    def applied(self, params: Tree) -> Tree:
        """Nested dicts of arrays: weights of the original model -> those of the rewritten one."""
        leaves: Tree = {}
        for path, array in nnx.traversals.flatten_mapping(params, sep="/").items():
            leaves |= self.kept(path, array)
        return nnx.traversals.unflatten_mapping(leaves, sep="/")

    def kept(self, path: str, array: Array) -> dict[str, Array]:
        """Leaves that are kept of an original weight; a new adapter is drawn by train.seed."""
        match, leaves = self.matches.get(path), {path: array}
        if match and self._errors is not None:
            lead = array.shape[: array.ndim - len(match.spec.shape)]
            layers = jnp.arange(math.prod(lead), dtype=jnp.int32).reshape(lead)
            return {f"{path}/base": array, f"{path}/layer": layers}
        if match and match.kept_low:
            leaves = {f"{path}/{name}": leaf for name, leaf in match.stored(array).items()}
        leaves = self.under_adapters(leaves)
        return leaves | self.adapters(path, leaves) if path in self.adapted else leaves

    def under_adapters(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves of weights without adapters, by the paths that they have beside adapters."""
        return beside(leaves, self.adapted)

    def adapters(self, path: str, leaves: Mapping[str, AnyArray]) -> dict[str, Array]:
        """A fresh adapter of the weight at `path`, of which `leaves` are kept."""
        spec, seed = self.adapted[path], self._cfg.train.seed
        made = {
            f"{path}/{name}": draw(self._params[f"{path}/{name}"], (path, name), seed)
            for name in adapter.LEAVES[:2]
        }
        if f"{path}/magnitude" in self._params:
            whole = jnp.asarray(self.floats(path, leaves), jnp.float32)
            lead = whole.ndim - len(spec.shape)
            lengths = adapter.column_norms(whole, range(lead, lead + spec.contract))
            made[f"{path}/magnitude"] = lengths
        return made

    def floats(self, path: str, leaves: Mapping[str, AnyArray]) -> AnyArray:
        """The original weight that leaves of the rewritten model stand for, without its adapter."""
        base = f"{path}/base" if path in self.adapted else path
        match = self.matches.get(path)
        if not match or not match.kept_low:
            return leaves[base]
        return match.floats(
            {
                name.removeprefix(f"{base}/"): leaf
                for name, leaf in leaves.items()
                if name.startswith(f"{base}/")
            }
        )

    def original(
        self, path: str, leaves: Mapping[str, AnyArray], evaluated: bool = False
    ) -> AnyArray:
        """The original weight that leaves of the rewritten model stand for, with its adapter merged
        into it in float32; with `evaluated`, rounded as evaluation rounds it where the mode is
        qat."""
        whole, lora = self.floats(path, leaves), self._cfg.lora
        match = self.matches.get(path)
        if evaluated and match and match.mode == "qat":
            whole = match.floats(match.stored(jnp.asarray(whole)))
        if path not in self.adapted or not lora:
            return whole
        spec = self.adapted[path]
        merge = functools.partial(adapter.merged, lora, spec.contract)
        for _ in range(whole.ndim - len(spec.shape)):
            merge = jax.vmap(merge)
        names = (f"{path}/{name}" for name in adapter.LEAVES)
        own = (jnp.asarray(leaves[name]) for name in names if name in self._params)
        return merge(jnp.asarray(whole, jnp.float32), *own)

    @property
    def unlike(self) -> list[str]:
        """What evaluation rounds and `original` does not, in words."""
        said = dict[str, None]()
        for match in self.matches.values():
            if match.mode == "qt":
                said["weights before their rounding (quantization mode qt)"] = None
            if match.quant.act:
                said["activations are not rounded (act_qtype)"] = None
        return [*said]

    def _built(self) -> Model:
        cfg, model = self._cfg, model_of(self._cfg.model)(self._cfg.model)
        owners = {path: (module, name) for path, module, name in _params(model)}
        params = {path: getattr(module, name) for path, (module, name) in owners.items()}
        if cfg.quantization.rules:
            from maxstack.weights.recipe import match_rules

            self.matches = match_rules(cfg.quantization, params)
        self.saved = self._saved(params)
        self.adapted = {
            path: WeightSpec.of(params[path])
            for path in self._targets(params)
            if path not in self.saved
        }
        self._check_magnitudes()
        for path, (module, name) in owners.items():
            param = params[path]
            if cfg.lora and path not in self.saved:
                param.set_metadata(frozen=True)
            weight: Weight = param
            if path in self.matches:
                weight = self.matches[path].substitute(param, path, self._errors)
            if cfg.lora and path in self.adapted:
                weight = adapter.AdaptedWeight(weight, param, path, cfg.lora)
            setattr(module, name, weight)
        return model

    def _check_magnitudes(self) -> None:
        """ConfigError where DoRA needs the lengths of columns that are rounded as they are used."""
        if not self._cfg.lora or not self._cfg.lora.dora:
            return
        for path in self.adapted:
            match = self.matches.get(path)
            if match and not match.kept_low:
                raise ConfigError(
                    f"lora.dora: {path} is rounded as it is used (mode {match.mode}), so its "
                    "columns have no length of their own; keep it in low precision with "
                    "mode: ptq, or set lora.dora=false"
                )

    def _saved(self, params: Mapping[str, nnx.Param]) -> frozenset[str]:
        """Paths of the weights that are trained whole beside adapters."""
        saved = {path for path, param in params.items() if param.get_metadata()["beside_adapters"]}
        for i, pattern in enumerate(self._cfg.lora.modules_to_save if self._cfg.lora else ()):
            where = f"lora.modules_to_save.{i}: {quoted(pattern)}"
            matching = {path for path in params if matches(pattern, path)}
            if not matching:
                meant = equivalent(f"modules_to_save.{pattern}")
                meant = meant or f"nearest paths: {near(pattern, [*params])}"
                raise ConfigError(f"{where} matches no weight; {meant}")
            for path in sorted(matching):
                if path in self.matches and self.matches[path].kept_low:
                    raise ConfigError(
                        f"{where} matches {path}, which is kept in low precision and cannot be "
                        "trained; narrow quantization.rules"
                    )
            saved |= matching
        return frozenset(saved)

    def _targets(self, params: Mapping[str, nnx.Param]) -> list[str]:
        """Paths of the weights that get adapters."""
        uses = {path: param.get_metadata()["use"] for path, param in params.items()}
        matmuls = [
            path
            for path, use in uses.items()
            if use == "matmul" and not params[path].get_metadata()["beside_adapters"]
        ]
        targets: dict[str, None] = {}
        for i, pattern in enumerate(self._cfg.lora.targets if self._cfg.lora else ()):
            matching = [path for path in params if matches(pattern, path)]
            own = [path for path in matching if path in matmuls]
            others = [path for path in matching if uses[path] in ("experts", "rows", "head")]
            self.skipped |= dict.fromkeys(others)
            if not own:
                meant = (
                    equivalent(f"targets.{pattern}") or f"nearest paths: {near(pattern, matmuls)}"
                )
                why = f"matches no weight; {meant}"
                if matching:
                    why = (
                        f"matches only {', '.join(matching[:3])}: experts, tables, the head "
                        "and what is no matrix take no adapters"
                    )
                raise ConfigError(f"lora.targets.{i}: {quoted(pattern)} {why}")
            targets |= dict.fromkeys(own)
        return [*targets]


def beside(leaves: Mapping[str, Any], adapted: Collection[str]) -> dict[str, Any]:
    """Leaves of a model by the paths that they have where weights `adapted` have adapters."""
    moved: dict[str, Any] = {}
    for name, leaf in leaves.items():
        path = next((path for path in (name, module_of(name)) if path in adapted), None)
        moved[name if path is None else f"{path}/base{name.removeprefix(path)}"] = leaf
    return moved


def _params(model: nnx.Module) -> Iterator[tuple[str, Any, str]]:
    """(path, the module that holds it, its name there) of every weight."""
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, nnx.Param):
                yield "/".join(map(str, (*path, name))), module, name
