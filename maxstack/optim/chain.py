"""From a checked optimizer configuration and the parameters' shapes to one Optax transformation."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from pydantic_core import PydanticCustomError

from maxstack.config import ConfigError
from maxstack.optim import wrappers
from maxstack.optim.rates import rate_function
from maxstack.schema.optimizer import OptimizerConfig, check_schedules, updates_in
from maxstack.schema.optimizer.arguments import (
    DECAY_MASKS,
    PER_LAYER,
    PER_MATRIX,
    arguments_of,
    as_chain,
    sort_of,
)
from maxstack.schema.optimizer.names import Argument, Signature, signature
from maxstack.schema.optimizer.paths import (
    ParamInfo,
    Selector,
    check_matches,
    check_selectors,
    selected,
)
from maxstack.schema.optimizer.schedules import build_schedule, steps_of

SEQUENTIAL = ("galore", "scale_by_galore")
Params = dict[str, ParamInfo]
Transform: TypeAlias = optax.GradientTransformation


def build(
    cfg: OptimizerConfig, train_steps: int, params_info: Any
) -> optax.GradientTransformationExtraArgs:
    """The transformation that the configuration describes, of the parameters that it trains among
    those of a tree of ParamInfo.

    Its update takes these, None in place of the others, and value=loss and grad=gradients as extra
    arguments. A pattern that matches no parameter, trained or not, is a ConfigError.
    """
    try:
        check_schedules(cfg, train_steps)
    except PydanticCustomError as error:
        found = error.context or {}
        raise ConfigError(f"optimizer.{found['key']}: {found['message']}") from None
    known, chosen = _by_path(params_info), jax.tree.leaves(trained(cfg, params_info))
    for i, group in enumerate(cfg.groups):
        check_matches(check_selectors(group.match, "match"), known, f"groups.{i}.match")
    params = {
        path: info for (path, info), updated in zip(known.items(), chosen, strict=True) if updated
    }
    rest = {path: info for path, info in known.items() if path not in params}
    parts = (
        [_chain(cfg.chain, "chain", _Scope(cfg, params, rest, train_steps))] if cfg.chain else []
    )
    if cfg.groups:
        parts.append(_grouped(cfg, params, rest, train_steps))
    parts = [wrappers.in_float32(part) for part in parts]
    if cfg.ema:
        parts.append(wrappers.weight_ema(cfg.ema.decay, steps_of(cfg.ema.start, train_steps)))
    return optax.with_extra_args_support(optax.chain(*parts))


class _Scope:
    """What the items of one chain act on, and the parameters that are not trained, which patterns
    may name too."""

    def __init__(self, cfg: OptimizerConfig, params: Params, rest: Params, updates: int) -> None:
        self.cfg, self.params, self.rest, self.updates = cfg, params, rest, updates

    def mask(self, selectors: tuple[Selector, ...] | None) -> Callable[[Any], Any]:
        """A tree of flags; without patterns it marks the matrices."""

        def flag(path: str) -> bool:
            return (
                self.params[path].matrix is not None
                if selectors is None
                else selected(selectors, path, self.params[path])
            )

        return lambda tree: jax.tree.map(flag, wrappers.tree_paths(tree))


def trained(cfg: OptimizerConfig, params_info: Any) -> Any:
    """See maxstack.optim.trained."""
    paths, params = wrappers.tree_paths(params_info), _by_path(params_info)
    found = {path: info for path, info in params.items() if not info.carried and not info.frozen}
    for name, keep in (("trainable", True), ("frozen", False)):
        if getattr(cfg, name) is not None:
            selectors = check_selectors(getattr(cfg, name), name)
            check_matches(selectors, params, name)
            found = {
                path: info
                for path, info in found.items()
                if selected(selectors, path, info) == keep
            }
    if cfg.decay is not None:
        check_matches(check_selectors(cfg.decay, "decay"), params, "decay")
    if not found:
        kept = all(info.carried or info.frozen for info in params.values())
        raise ConfigError(
            "quantization.mode: ptq keeps every weight as it is, and none is left to "
            "train; add lora, or use mode: qat"
            if kept
            else "optimizer.frozen: no parameter is left to train; freeze fewer, or make "
            "optimizer.trainable wider"
        )
    return jax.tree.map(lambda path: path in found, paths)


def _by_path(params_info: Any) -> Params:
    return dict(
        zip(
            jax.tree.leaves(wrappers.tree_paths(params_info)),
            jax.tree.leaves(params_info),
            strict=True,
        )
    )


def _grouped(cfg: OptimizerConfig, params: Params, rest: Params, train_steps: int) -> Transform:
    matchers = [check_selectors(group.match, "match") for group in cfg.groups]
    labels: dict[str, str] = {}
    for path, info in params.items():
        found = next(
            (i for i, selectors in enumerate(matchers) if selected(selectors, path, info)), None
        )
        if found is None:
            raise ConfigError(
                f"optimizer.groups: no group matches {path} (ndim {info.ndim}); end with "
                "a group that has match: ['*']"
            )
        labels[path] = f"group_{found}"
    chains: dict[str, Transform] = {}
    for i, group in enumerate(cfg.groups):
        members = {path: params[path] for path, label in labels.items() if label == f"group_{i}"}
        if members:
            chains[f"group_{i}"] = _chain(
                group.chain, f"groups.{i}.chain", _Scope(cfg, members, rest, train_steps)
            )
    return _partition(chains, labels)


def _partition(transforms: Any, labels: dict[str, Any]) -> Transform:
    def label(tree: Any) -> Any:
        return jax.tree.map(labels.__getitem__, wrappers.tree_paths(tree))

    return optax.partition(transforms, label, mask_compatible_extra_args=True)


def _chain(value: Any, key: str, scope: _Scope) -> Transform:
    items = as_chain(value)
    built = [
        _item(item, key if isinstance(value, dict) else f"{key}.{i}", scope)
        for i, item in enumerate(items)
    ]
    return built[0] if len(built) == 1 else optax.chain(*built)


def _item(item: dict[str, Any], key: str, scope: _Scope) -> Transform:
    found = signature(item["kind"])
    assert found is not None
    inside = (
        _Scope(
            scope.cfg, scope.params, scope.rest, updates_in(scope.updates, item["every_k_schedule"])
        )
        if found.name == "MultiSteps"
        else scope
    )
    given = {
        name: _value(found, found[name], value, f"{key}.{name}", inside)
        for name, value in arguments_of(item).items()
    }
    given |= _implied(found, given, item, key, scope)
    try:
        transform = BUILDERS.get(found.name, _from_optax)(found, given, scope)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.{key}: optax refuses these arguments of {found.name}: {error}"
        ) from error
    if found.name in PER_MATRIX:
        transform = wrappers.as_matrices(transform, scope.params)
    if found.name in PER_MATRIX + PER_LAYER:
        transform = wrappers.per_layer(transform, scope.params, sequential=found.name in SEQUENTIAL)
    return transform


def _value(found: Signature, argument: Argument, value: Any, key: str, scope: _Scope) -> Any:
    """The Python value of one given argument."""
    sort = sort_of(argument)
    if value is None:
        return None
    if sort == "transform":
        return _chain(value, key, scope)
    if sort == "rate":
        if argument.name.endswith("learning_rate"):
            return rate_function(scope.cfg, value, scope.updates)
        return build_schedule(value, scope.updates, None) if isinstance(value, dict) else value
    if sort == "mask" and not isinstance(value, bool):
        selectors = check_selectors(value, key)
        check_matches(selectors, scope.params | scope.rest, key)
        return scope.mask(selectors)
    if sort == "skip":
        large = (
            functools.partial(optax.skip_large_updates, max_squared_norm=value["max_squared_norm"])
            if isinstance(value, dict)
            else None
        )
        return large or optax.skip_not_finite
    if sort == "sequence" and isinstance(value, list):
        return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in value)
    return (
        jnp.dtype(value)
        if sort == "dtype"
        else steps_of(value, scope.updates, 1)
        if sort == "steps"
        else value
    )


def _implied(
    found: Signature, given: dict[str, Any], item: dict[str, Any], key: str, scope: _Scope
) -> dict[str, Any]:
    """The arguments that follow from the rest of the configuration or from the parameters."""
    cfg, implied = scope.cfg, {}
    if "learning_rate" in found and "learning_rate" not in given:
        implied["learning_rate"] = rate_function(
            cfg, cfg.learning_rate, scope.updates, sort_of(found["learning_rate"]) != "rate"
        )
    for name in DECAY_MASKS:
        if name in found and name not in given and found.name not in ("masked",):
            implied[name] = scope.mask(
                check_selectors(cfg.decay, "decay") if cfg.decay is not None else None
            )
    if found.name == "muon":
        implied["muon_weight_dimension_numbers"] = wrappers.muon_dimensions(scope.params)
    if found.name == "scale_by_muon":
        others = [path for path, info in scope.params.items() if info.matrix is None]
        if others:
            raise ConfigError(
                f"optimizer.{key}: scale_by_muon takes matrices only, but {others[0]} is "
                "none; put it in a group with "
                "match: [{path: '*', ndim: 2}]"
            )
        implied["weight_dimension_numbers"] = wrappers.muon_dimensions(scope.params)
    return implied


def _from_optax(found: Signature, given: dict[str, Any], scope: _Scope) -> Transform:
    return getattr(optax.contrib if found.package == "optax.contrib" else optax, found.name)(
        **given
    )


def _sam(found: Signature, given: dict[str, Any], scope: _Scope) -> Transform:
    """Its update takes no extra arguments although its type promises it, so the type is taken
    back."""
    sam = optax.contrib.sam(**given)
    return optax.GradientTransformation(sam.init, sam.update)


def _selective(found: Signature, given: dict[str, Any], scope: _Scope) -> Transform:
    frozen = given["freeze_mask"]
    labels = (
        (lambda tree: jax.tree.map(lambda flag: "frozen" if flag else "trained", frozen(tree)))
        if callable(frozen)
        else (lambda tree: jax.tree.map(lambda _: "frozen" if frozen else "trained", tree))
    )
    return optax.partition(
        {"trained": given["optimizer"], "frozen": optax.set_to_zero()},
        labels,
        mask_compatible_extra_args=True,
    )


BUILDERS: dict[str, Callable[[Signature, dict[str, Any], _Scope], Transform]] = {
    "lookahead": lambda found, given, scope: wrappers.lookahead(**given),
    "MultiSteps": lambda found, given, scope: optax.MultiSteps(**given).gradient_transformation(),
    "sam": _sam,
    "selective_transform": _selective,
}
