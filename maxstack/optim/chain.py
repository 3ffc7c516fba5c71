"""Build one Optax transformation from a validated optimizer configuration and the parameters'
shapes.

Names and arguments of Optax's transforms were validated before by a table
(schema/optimizer/signatures.json), because a mistake must be reported without importing Optax,
which imports jax; here an item is bound to the installed Optax. Stacked weights [layers, ...] are
shown to transforms that look at whole matrices or whole layers one layer at a time (wrappers.py).
"""

import functools
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformation

from maxstack.errors import ConfigError
from maxstack.optim import wrappers
from maxstack.optim.rates import item_rate, scheduled_rate
from maxstack.schema.optimizer import (
    Optimizer,
    OptimizerConfig,
    Selectors,
    schedule_faults,
    updates_in,
)
from maxstack.schema.optimizer.arguments import (
    DECAY_MASKS,
    MUON,
    PER_LAYER,
    PER_MATRIX,
    Chain,
    Transform,
)
from maxstack.schema.optimizer.paths import ParamInfo, check_matches, selected
from maxstack.schema.optimizer.schedules import Schedule, build_schedule, steps_of

SEQUENTIAL = ("galore", "scale_by_galore")
Params = dict[str, ParamInfo]


def build(
    cfg: OptimizerConfig, train_steps: int, params_info: Any
) -> optax.GradientTransformationExtraArgs:
    """The configured transformation of the trained parameters among those of a tree of ParamInfo.

    Its update takes the trained parameters, None in place of the others, and value=loss and
    grad=gradients as extra arguments. A pattern that matches no parameter is a ConfigError.
    """
    for key, message in schedule_faults(cfg, train_steps):
        raise ConfigError(f"optimizer.{key}: {message}")
    optimizer, params = cfg.parsed, wrappers.leaves_by_path(params_info)
    chosen = wrappers.leaves_by_path(trained_mask(cfg, params_info))
    for i, (selectors, _) in enumerate(optimizer.groups):
        check_matches(selectors, params, f"groups.{i}.match")
    untrained = {path: info for path, info in params.items() if not chosen[path]}
    # What is not trained has no gradient and no state.
    params = {path: info for path, info in params.items() if chosen[path]}
    scope = _Scope(optimizer, params, untrained, train_steps)
    parts = [_chain(optimizer.chain, scope)] if optimizer.chain else []
    if optimizer.groups:
        parts.append(_partition(scope))
    # Around whole chains, so that no item between sees bfloat16.
    parts = [wrappers.in_float32(part) for part in parts]
    if cfg.ema:
        # Last, since it averages the weights after all other items.
        parts.append(wrappers.weight_ema(cfg.ema.decay, steps_of(cfg.ema.start, train_steps)))
    return optax.with_extra_args_support(optax.chain(*parts))


class _Scope(NamedTuple):
    """Parameters that the items of a chain act on."""

    optimizer: Optimizer
    params: Params
    untrained: Params
    """The model's other parameters, which patterns may name too."""
    train_steps: int

    def mask(self, selectors: Selectors | None) -> Callable[[Any], Any]:
        """A function from a tree to its tree of flags; without patterns it marks the matrices."""

        def flag(path: str) -> bool:
            info = self.params[path]
            return info.matrix is not None if selectors is None else selected(selectors, path, info)

        return wrappers.map_paths(flag)


def trained_mask(cfg: OptimizerConfig, params_info: Any) -> Any:
    """A tree of flags: True for a parameter that the optimizer updates. A pattern that matches no
    parameter, or none that is left to train, is a ConfigError."""
    optimizer, params = cfg.parsed, wrappers.leaves_by_path(params_info)
    for name, selectors in (("trainable", optimizer.trainable), ("frozen", optimizer.frozen)):
        if selectors is not None:
            check_matches(selectors, params, name)
    moving = _trainable_paths(optimizer, params)
    # The step moves carried weights by a rule of its own.
    chosen = {path for path in moving if not params[path].carried}
    if optimizer.decay is not None:
        check_matches(optimizer.decay, params, "decay")
    if not chosen:
        untrainable = all(info.carried or info.frozen for info in params.values())
        if untrainable:
            raise ConfigError(
                "quantization.mode: ptq keeps every weight as it is, and none is left to train; "
                "add lora, or use mode: qat"
            )
        raise ConfigError(
            "optimizer.frozen: no parameter is left to train; freeze fewer, or make "
            "optimizer.trainable wider"
        )
    return wrappers.map_paths(chosen.__contains__)(params_info)


def changed_mask(cfg: OptimizerConfig, params_info: Any) -> Any:
    """A tree of flags: True for a parameter that a step changes, by the optimizer or, as a
    selection bias, by a rule of the model."""
    moving = _trainable_paths(cfg.parsed, wrappers.leaves_by_path(params_info))
    return wrappers.map_paths(moving.__contains__)(params_info)


def _trainable_paths(optimizer: Optimizer, params: Params) -> set[str]:
    """Paths of parameters that are not frozen, by the model or by a pattern."""
    return {
        path
        for path, info in params.items()
        if not info.frozen
        and (optimizer.trainable is None or selected(optimizer.trainable, path, info))
        and not (optimizer.frozen and selected(optimizer.frozen, path, info))
    }


def _partition(scope: _Scope) -> GradientTransformation:
    rest = scope.params
    chains: dict[str, GradientTransformation] = {}
    labels: dict[str, str] = {}
    for i, (selectors, chain) in enumerate(scope.optimizer.groups):
        # The first group that matches takes a parameter.
        members = {path: info for path, info in rest.items() if selected(selectors, path, info)}
        rest = {path: info for path, info in rest.items() if path not in members}
        # A group may match weights that are not trained, and none else.
        if members:
            chains[f"group_{i}"] = _chain(chain, scope._replace(params=members))
            labels |= dict.fromkeys(members, f"group_{i}")
    if rest:
        path, info = next(iter(rest.items()))
        raise ConfigError(
            f"optimizer.groups: no group matches {path} (ndim {info.ndim}); end with "
            "a group that has match: ['*']"
        )
    return wrappers.partition(chains, labels)


def _chain(chain: Chain, scope: _Scope) -> GradientTransformation:
    built = [_transformation(item, scope) for item in chain]
    return built[0] if len(built) == 1 else optax.chain(*built)


def _transformation(item: Transform, scope: _Scope) -> GradientTransformation:
    name = item.signature.name
    arguments = {key: _value(item, key, scope) for key in item.arguments} | _implied(item, scope)
    if item.section:
        own = pkgutil.resolve_name(item.signature.package)(section=item.section, **arguments)
        if not isinstance(own, GradientTransformation):
            raise ConfigError(
                f"optimizer.{item.key}: {item.signature.package} returned a {type(own).__name__}, "
                "wanted an optax.GradientTransformation"
            )
        return own
    package = optax.contrib if item.signature.package == "optax.contrib" else optax
    try:
        # Optax checks the values that the table of signatures cannot.
        transformation = (BUILDERS.get(name) or getattr(package, name))(**arguments)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.{item.key}: optax refuses these arguments of {name}: {error}"
        ) from error
    if name in PER_MATRIX:
        # Before `per_layer`, which is around it: a layer
        # is cut out of the stack, then seen as a matrix.
        transformation = wrappers.as_matrices(transformation, scope.params)
    if name in PER_MATRIX + PER_LAYER:
        transformation = wrappers.per_layer(
            transformation, scope.params, sequential=name in SEQUENTIAL
        )
    return transformation


def _value(item: Transform, name: str, scope: _Scope) -> Any:
    """The Python value of an argument that the configuration gives."""
    value, sort = item.arguments[name], item.signature.arguments[name].sort
    updates = updates_in(scope.train_steps, item.every)
    if value is None:
        return None
    if sort == "transform":
        return _chain(value, scope)
    if sort == "rate" and name.endswith("learning_rate"):
        return scheduled_rate(scope.optimizer, value, updates)
    if isinstance(value, Schedule):
        return build_schedule(value, updates, None)
    if sort == "mask" and not isinstance(value, bool):
        # A pattern may name weights of other groups, but must name some weight.
        check_matches(value, scope.params | scope.untrained, f"{item.key}.{name}")
        return scope.mask(value)
    if sort == "skip":
        if value == "skip_not_finite":
            return optax.skip_not_finite
        limit = value["max_squared_norm"]
        return functools.partial(optax.skip_large_updates, max_squared_norm=limit)
    if sort == "sequence" and isinstance(value, list):
        return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in value)
    if sort == "dtype":
        return jnp.dtype(value)
    return steps_of(value, updates, 1) if sort == "steps" else value


def _implied(item: Transform, scope: _Scope) -> dict[str, Any]:
    """Arguments that follow from the rest of the configuration or from the parameters."""
    name, signature = item.signature.name, item.signature.arguments
    implied: dict[str, Any] = {}
    # The shared rate, where the item has none of its own.
    if "learning_rate" in signature and "learning_rate" not in item.arguments:
        implied["learning_rate"] = item_rate(scope.optimizer, item, scope.train_steps)
    for mask in DECAY_MASKS:
        if mask in signature and mask not in item.arguments and name != "masked":
            # Without patterns, matrices alone: decay of norms and biases would pull them to 0.
            implied[mask] = scope.mask(scope.optimizer.decay)
    if name == "scale_by_muon":
        others = [path for path, info in scope.params.items() if info.matrix is None]
        if others:
            raise ConfigError(
                f"optimizer.{item.key}: scale_by_muon takes matrices only, and {others[0]} "
                "is not one; use it in a group with match: [{path: '*', ndim: 2}]"
            )
    if name in MUON:
        for dimensions in item.signature.of_sort("dimensions"):
            implied[dimensions] = wrappers.muon_dimensions(scope.params)
    return implied


def _multi_steps(**arguments: Any) -> GradientTransformation:
    # MultiSteps is a class with the methods of a transformation, not one itself.
    return optax.MultiSteps(**arguments).gradient_transformation()


def _sam(**arguments: Any) -> GradientTransformation:
    """Sharpness-aware minimization as a transformation without extra arguments: its update takes
    none, although its type says so."""
    sam = optax.contrib.sam(**arguments)
    return GradientTransformation(sam.init, sam.update)


def _selective(optimizer: GradientTransformation, freeze_mask: Any) -> GradientTransformation:
    def labels(tree: Any) -> Any:
        flags = freeze_mask if callable(freeze_mask) else wrappers.map_paths(lambda _: freeze_mask)
        return jax.tree.map(lambda frozen: "frozen" if frozen else "trained", flags(tree))

    return optax.partition(
        {"trained": optimizer, "frozen": optax.set_to_zero()},
        labels,
        mask_compatible_extra_args=True,
    )


BUILDERS: dict[str, Callable[..., GradientTransformation]] = {
    "lookahead": wrappers.lookahead,
    "MultiSteps": _multi_steps,
    "sam": _sam,
    "selective_transform": _selective,
}
