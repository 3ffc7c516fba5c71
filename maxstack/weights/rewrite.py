"""The weights of a model as a run has them: which are computed or kept in low precision, and which
have adapters.

Models know nothing of either. A Rewrite builds the model as its configuration says (the original
model), replaces weights by substitutes, and splits it into a graph and a state of shapes. Weights
of both models are named by paths: a quantized weight PATH is kept as PATH/TYPE and PATH/scale;
beside an adapter (PATH/lora_a, PATH/lora_b, with DoRA PATH/magnitude) the weight itself, or its
quantized leaves, move to PATH/base.
"""

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
    nnx.split and hold no arrays. ConfigError where a rule or a target takes no weight, or one that
    it cannot serve."""

    def __init__(self, cfg: "Config", errors: "Errors | None" = None):
        """With `errors`, the model computes as the original one does and records the errors that
        its recipe would make."""
        self._cfg, self._errors = cfg, errors
        self.matches: dict[str, RuleMatch] = {}
        self.adapted: dict[str, WeightSpec] = {}
        self.skipped: dict[str, None] = {}
        """Weights that match a target of adapters, but cannot have one."""
        self.graph, self.state = nnx.split(nnx.eval_shape(self._build))
        self._params = {
            "/".join(map(str, path)): param for path, param in nnx.to_flat_state(self.state)
        }

    def count_only(self, real_BT: Array) -> contextlib.AbstractContextManager[None]:
        """Context in which errors are counted at these positions alone."""
        if self._errors is None:
            return contextlib.nullcontext()
        from maxstack.weights.quantization_errors import count_only

        return count_only(real_BT)

    @property
    def replaced(self) -> set[str]:
        """Original weights that are kept as other leaves."""
        return {*self.adapted, *(path for path, match in self.matches.items() if match.kept_low)}

    def initial(self, seed: int) -> Tree:
        """Draw new weights."""
        drawn = initial(self._cfg.model, seed)
        if not self.replaced:
            return drawn
        # Without the barrier XLA fuses the draw's last product into the division by the scale, and
        # some values round to a neighbour.
        return self.apply(jax.lax.optimization_barrier(drawn))

    def apply(self, params: Tree) -> Tree:
        """Turn the weights of the original model, nested dicts of arrays, into this model's."""
        leaves: Tree = {}
        for path, array in nnx.traversals.flatten_mapping(params, sep="/").items():
            leaves |= self.leaves_of(path, array)
        return nnx.traversals.unflatten_mapping(leaves, sep="/")

    def leaves_of(self, path: str, array: Array) -> dict[str, Array]:
        """Return the leaves kept of an original weight; a new adapter is drawn by train.seed."""
        # Weights are rewritten one by one, so that a model can be read and quantized without a
        # whole copy of it in floats.
        match, leaves = self.matches.get(path), {path: array}
        if match and self._errors is not None:
            lead = array.shape[: array.ndim - len(match.spec.shape)]
            layers = jnp.arange(math.prod(lead), dtype=jnp.int32).reshape(lead)
            return {f"{path}/base": array, f"{path}/layer": layers}
        if match and match.kept_low:
            leaves = {f"{path}/{name}": leaf for name, leaf in match.quantize(array).items()}
        leaves = rebase(leaves, self.adapted)
        return leaves | self.new_adapter(path, leaves) if path in self.adapted else leaves

    def new_adapter(self, path: str, leaves: Mapping[str, AnyArray]) -> dict[str, Array]:
        """Draw an adapter for the weight at `path`, of which `leaves` are kept."""
        spec, seed = self.adapted[path], self._cfg.train.seed
        made = {
            # By path and seed, like every weight: neither the mesh nor other adapters change what
            # is drawn.
            f"{path}/{name}": draw(self._params[f"{path}/{name}"], (path, name), seed)
            for name in adapter.LEAVES[:2]
        }
        if f"{path}/magnitude" in self._params:
            base = jnp.asarray(self.base_weight(path, leaves), jnp.float32)
            lead = base.ndim - len(spec.shape)
            # The norms of the base, rounded as it is stored, so that a new adapter changes nothing.
            norms = adapter.column_norms(base, range(lead, lead + spec.contract))
            made[f"{path}/magnitude"] = norms
        return made

    def base_weight(self, path: str, leaves: Mapping[str, AnyArray]) -> AnyArray:
        """Return the original weight that leaves stand for, without its adapter."""
        base = f"{path}/base" if path in self.adapted else path
        match = self.matches.get(path)
        if not match or not match.kept_low:
            return leaves[base]
        below = {name: leaf for name, leaf in leaves.items() if name.startswith(f"{base}/")}
        return match.dequantize(
            {name.removeprefix(f"{base}/"): leaf for name, leaf in below.items()}
        )

    def original(
        self, path: str, leaves: Mapping[str, AnyArray], evaluated: bool = False
    ) -> AnyArray:
        """Return the original weight that leaves stand for, with its adapter merged in float32;
        with `evaluated`, rounded as evaluation rounds it where the mode is qat."""
        base, lora = self.base_weight(path, leaves), self._cfg.lora
        match = self.matches.get(path)
        if evaluated and match and match.mode == "qat":
            # An export of the unrounded weights scored otherwise than the run that had been
            # evaluated.
            base = match.dequantize(match.quantize(jnp.asarray(base)))
        if path not in self.adapted or not lora:
            return base
        spec = self.adapted[path]
        merge = functools.partial(adapter.merge, lora, spec.contract)
        # One vmap for each dimension of a stack, which lies before the contracted ones.
        for _ in range(base.ndim - len(spec.shape)):
            merge = jax.vmap(merge)
        names = [f"{path}/{name}" for name in adapter.LEAVES]
        own = [jnp.asarray(leaves[name]) for name in names if name in self._params]
        return merge(jnp.asarray(base, jnp.float32), *own)

    @property
    def unlike(self) -> list[str]:
        """Describe what evaluation rounds and `original` does not."""
        said = dict[str, None]()
        for match in self.matches.values():
            if match.mode == "qt":
                said["weights before their rounding (quantization mode qt)"] = None
            if match.quant.act:
                said["activations are not rounded (act_qtype)"] = None
        return [*said]

    def _build(self) -> Model:
        cfg, model = self._cfg, model_of(self._cfg.model)(self._cfg.model)
        # Listed before the first substitute is set, since substitutes hold Params of their own.
        owners = {path: (module, name) for path, module, name in _params(model)}
        params = {path: getattr(module, name) for path, (module, name) in owners.items()}
        if cfg.quantization.rules:
            # Imported here, since recipes alone need Qwix.
            from maxstack.weights.recipe import match_rules

            self.matches = match_rules(cfg.quantization, params)
        self.saved = self._find_saved(params)
        self.adapted = {
            path: WeightSpec.of(params[path])
            for path in self._find_targets(params)
            # A weight that is trained whole needs no adapter.
            if path not in self.saved
        }
        self._check_magnitudes()
        for path, (module, name) in owners.items():
            param = params[path]
            if cfg.lora and path not in self.saved:
                # Before the substitute is made: a TrainedWeight copies the metadata.
                param.set_metadata(frozen=True)
            weight: Weight = param
            if path in self.matches:
                weight = self.matches[path].substitute(param, path, self._errors)
            if cfg.lora and path in self.adapted:
                # The adapter wraps the quantized weight: B A is trained in floats beside it
                # (QLoRA).
                weight = adapter.AdaptedWeight(weight, param, path, cfg.lora)
            setattr(module, name, weight)
        return model

    def _check_magnitudes(self) -> None:
        """ConfigError where DoRA needs the norms of columns that are rounded at each use."""
        if not self._cfg.lora or not self._cfg.lora.dora:
            return
        for path in self.adapted:
            match = self.matches.get(path)
            if match and not match.kept_low:
                raise ConfigError(
                    f"lora.dora: {path} is rounded at each use (mode {match.mode}), so its columns "
                    "have no norm of their own; keep it in low precision with mode: ptq, or set "
                    "lora.dora=false"
                )

    def _find_saved(self, params: Mapping[str, nnx.Param]) -> frozenset[str]:
        """Return the paths of weights that are trained whole beside adapters."""
        saved = {path for path, param in params.items() if param.get_metadata()["beside_adapters"]}
        for i, pattern in enumerate(self._cfg.lora.modules_to_save if self._cfg.lora else ()):
            where = f"lora.modules_to_save.{i}: {quoted(pattern)}"
            matching = {path for path in params if matches(pattern, path)}
            if not matching:
                meant = equivalent(f"modules_to_save.{pattern}")
                meant = meant or f"nearest paths: {near(pattern, [*params])}"
                raise ConfigError(f"{where} matches no weight; {meant}")
            for path in sorted(matching & self.matches.keys()):
                if self.matches[path].kept_low:
                    raise ConfigError(
                        f"{where} matches {path}, which is kept in low precision and cannot be "
                        "trained; narrow quantization.rules"
                    )
            saved |= matching
        return frozenset(saved)

    def _find_targets(self, params: Mapping[str, nnx.Param]) -> list[str]:
        """Return the paths of the weights that get adapters."""
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
            # Skipped where the pattern matches projections too, and told at the start.
            others = [path for path in matching if uses[path] in ("experts", "rows", "head")]
            self.skipped |= dict.fromkeys(others)
            if not own:
                meant = equivalent(f"targets.{pattern}")
                meant = meant or f"nearest paths: {near(pattern, matmuls)}"
                why = f"matches no weight; {meant}"
                if matching:
                    why = (
                        f"matches only {', '.join(matching[:3])}: experts, tables, the head "
                        "and what is no matrix take no adapters"
                    )
                raise ConfigError(f"lora.targets.{i}: {quoted(pattern)} {why}")
            targets |= dict.fromkeys(own)
        return [*targets]


def rebase(leaves: Mapping[str, Any], adapted: Collection[str]) -> dict[str, Any]:
    """Rename the leaves of weights with adapters to the paths that they have beside these."""
    moved: dict[str, Any] = {}
    for name, leaf in leaves.items():
        # The leaf is the weight itself, or a leaf PATH/TYPE or PATH/scale of a quantized one.
        path = next((path for path in (name, module_of(name)) if path in adapted), None)
        moved[name if path is None else f"{path}/base{name.removeprefix(path)}"] = leaf
    return moved


def _params(model: nnx.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield the path of every weight, the module that holds it, and its name there."""
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, nnx.Param):
                yield "/".join(map(str, (*path, name))), module, name
