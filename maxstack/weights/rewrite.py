"""What a run does to the weights of a model: which are multiplied or kept in low precision, and
which have adapters. Models know nothing of it."""

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxstack.config import ConfigError, nearest, quoted
from maxstack.layers.weight import Weight, draw
from maxstack.models import decoder
from maxstack.models.model import abstract, initial
from maxstack.weights import adapter
from maxstack.weights.spec import WeightSpec

if TYPE_CHECKING:
    from maxstack.schema.config import Config
    from maxstack.weights.observe import Errors
    from maxstack.weights.recipe import RuleMatch

Tree = dict[str, Any]
Array = jax.Array | np.ndarray


class Rewrite:
    """The model of `cfg` with substitutes for some weights: `graph` and `state` are those of
    nnx.split, and hold no arrays. ConfigError where a rule or a target takes nothing, or what it
    cannot serve."""

    def __init__(self, cfg: "Config", errors: "Errors | None" = None):
        """With `errors` the model computes as original, and tells them what its recipe would
        change."""
        self._cfg, self._errors = cfg, errors
        self.matches: dict[str, RuleMatch] = {}
        self.adapted: dict[str, WeightSpec] = {}
        self.passed: dict[str, None] = {}
        """What else the targets of adapters match, and gets none."""
        self.graph, self.state = nnx.split(nnx.eval_shape(self._built))
        self._params = {
            "/".join(map(str, path)): param for path, param in nnx.to_flat_state(self.state)
        }

    def counting(self, real_BT: jax.Array) -> contextlib.AbstractContextManager[None]:
        """Inside, errors are of these positions alone."""
        if self._errors is None:
            return contextlib.nullcontext()
        from maxstack.weights.observe import counting

        return counting(real_BT)

    @property
    def replaced(self) -> set[str]:
        """Paths of the weights of the original model in whose place the rewritten one keeps
        others."""
        return {*self.adapted, *(path for path, use in self.matches.items() if use.mode == "ptq")}

    def initial(self, seed: int) -> Tree:
        """Fresh weights: those of the original model, rewritten."""
        drawn = initial(self._cfg.model, seed)
        return (
            drawn if not self.replaced else self.applied(jax.lax.optimization_barrier(drawn))
        )  # else XLA rounds what it draws in another way

    def applied(self, params: Tree) -> Tree:
        """Nested dicts of arrays: weights of the original model -> those of the rewritten one."""
        found: Tree = {}
        for path, array in nnx.traversals.flatten_mapping(params, sep="/").items():
            found |= self.kept(path, array)
        return nnx.traversals.unflatten_mapping(found, sep="/")

    def kept(self, path: str, array: jax.Array) -> dict[str, jax.Array]:
        """What the rewritten model keeps of one weight of the original one, by path; a new adapter
        is drawn by train.seed."""
        use, found = self.matches.get(path), {path: array}
        if use and self._errors is not None:
            lead = array.shape[: array.ndim - len(use.spec.shape)]
            return {
                f"{path}/base": array,
                f"{path}/layer": jnp.arange(math.prod(lead), dtype=jnp.int32).reshape(lead),
            }
        if use and use.mode == "ptq":
            found = {f"{path}/{name}": leaf for name, leaf in use.stored(array).items()}
        found = self.under_adapters(found)
        return found | self.adapters(path, found) if path in self.adapted else found

    def under_adapters(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Weights in float or low precision, by the paths that they have where some of them get
        adapters."""
        found: dict[str, Any] = {}
        for name, leaf in kept.items():
            path = next(
                (path for path in (name, name.rpartition("/")[0]) if path in self.adapted), None
            )
            found[name if path is None else f"{path}/base{name.removeprefix(path)}"] = leaf
        return found

    def adapters(self, path: str, kept: Mapping[str, Array]) -> dict[str, jax.Array]:
        """A fresh adapter beside the weight at a path, of which `kept` is what is kept."""
        place = self.adapted[path]
        found = {
            f"{path}/{name}": draw(
                self._params[f"{path}/{name}"], (path, name), self._cfg.train.seed
            )
            for name in ("lora_a", "lora_b")
        }
        if f"{path}/magnitude" in self._params:
            whole = jnp.asarray(self.floats(path, kept), jnp.float32)
            lead = whole.ndim - len(place.shape)
            found[f"{path}/magnitude"] = adapter.column_lengths(
                whole, range(lead, lead + place.contract)
            )
        return found

    def floats(self, path: str, kept: Mapping[str, Array]) -> Array:
        """The weight of the original model that what is kept of it at `path` stands for, without
        its adapter."""
        base = f"{path}/base" if path in self.adapted else path
        use = self.matches.get(path)
        if not use or use.mode != "ptq":
            return kept[base]
        return use.floats(
            {
                name.rpartition("/")[2]: leaf
                for name, leaf in kept.items()
                if name.startswith(f"{base}/")
            }
        )

    def merged(self, kept: Mapping[str, Array]) -> dict[str, Array]:
        """The weights of the original model, by path, that the rewritten one's stand for; adapters
        are merged into theirs, in float32."""
        plain = nnx.to_flat_state(abstract(self._cfg.model)[1])
        return {
            name: self.original(name, kept)
            for name in ("/".join(map(str, path)) for path, _ in plain)
        }

    def original(self, path: str, kept: Mapping[str, Array]) -> Array:
        """One of them."""
        whole = self.floats(path, kept)
        if not (place := self.adapted.get(path)):
            return whole
        lora = self._cfg.lora
        assert lora
        one = functools.partial(adapter.merged, lora, place.contract)
        for _ in range(whole.ndim - len(place.shape)):
            one = jax.vmap(one)
        leaves = (
            kept[f"{path}/{name}"]
            for name in ("lora_a", "lora_b", *(("magnitude",) if lora.dora else ()))
        )
        return one(jnp.asarray(whole, jnp.float32), *map(jnp.asarray, leaves))

    def _built(self) -> decoder.Decoder:
        cfg, model = self._cfg, decoder.Decoder(self._cfg.model)
        params = {path: getattr(module, name) for path, module, name in _params(model)}
        if cfg.quantization.rules:
            from maxstack.weights.recipe import match_rules

            self.matches = match_rules(cfg.quantization, params)
        self.adapted = {path: WeightSpec.of(params[path]) for path in self._targets(params)}
        if (
            cfg.lora
            and cfg.lora.dora
            and (
                rounded := [
                    path
                    for path in self.adapted
                    if path in self.matches and self.matches[path].mode != "ptq"
                ]
            )
        ):
            raise ConfigError(
                f"lora.dora: {rounded[0]} is rounded as it is used (mode "
                f"{self.matches[rounded[0]].mode}), so its columns have no length "
                "of their own; keep it in low precision with mode: ptq, or set lora.dora=false"
            )
        for path, module, name in list(_params(model)):
            param = params[path]
            if cfg.lora:
                param.set_metadata(frozen=True)
            weight: Weight = param
            if path in self.matches:
                weight = self.matches[path].substitute(param, path, self._errors)
            if path in self.adapted:
                assert cfg.lora
                weight = adapter.Adapted(weight, param, path, cfg.lora)
            setattr(module, name, weight)
        return model

    def _targets(self, params: Mapping[str, nnx.Param]) -> list[str]:
        """Paths of the weights that get adapters."""
        uses = {path: param.get_metadata()["use"] for path, param in params.items()}
        found: dict[str, None] = {}
        for i, pattern in enumerate(self._cfg.lora.targets if self._cfg.lora else ()):
            matching = [
                path
                for path in params
                if re.fullmatch(pattern, path) or re.fullmatch(pattern, path.rpartition("/")[0])
            ]
            mine = [path for path in matching if uses[path] == "matmul"]
            self.passed |= dict.fromkeys(
                path for path in matching if uses[path] in ("experts", "rows", "head")
            )
            if not mine:
                modules = {
                    part
                    for path, use in uses.items()
                    if use == "matmul"
                    for part in (path, path.rpartition("/")[0])
                }
                why = (
                    f"matches only {', '.join(matching[:3])}: experts, tables, the head "
                    "and what is no matrix take no adapters"
                    if matching
                    else "matches no weight; nearest paths: "
                    f"{', '.join(nearest(pattern, modules, 3) or sorted(modules)[:6])}"
                )
                raise ConfigError(f"lora.targets.{i}: {quoted(pattern)} {why}")
            found |= dict.fromkeys(mine)
        return [*found]


def _params(model: nnx.Module) -> Iterator[tuple[str, Any, str]]:
    """(path, the module that holds it, its name there) of every weight."""
    for path, module in nnx.iter_modules(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.Param):
                yield "/".join(map(str, (*path, name))), module, name
