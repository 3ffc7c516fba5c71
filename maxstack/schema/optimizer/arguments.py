"""Checks of the transforms and schedules that a configuration names: known kinds, known and
complete arguments, values of the right sort."""

import ast
import math
import re
from collections.abc import Iterator
from typing import Any

from maxstack.config import did_you_mean, fault, quoted
from maxstack.schema.foreign import equivalent
from maxstack.schema.optimizer.names import Argument, Signature, names, signature
from maxstack.schema.optimizer.paths import check_selectors
from maxstack.schema.optimizer.schedules import (
    ALIASES,
    OWN,
    STEPS,
    VALUES,
    filled,
    peak_argument,
    schedule_signature,
    share,
)

PYTHON = "it takes a Python function, which a configuration cannot hold"
LINESEARCH = (
    "its line search evaluates the loss several times in one update, but the training step "
    "computes loss and gradients once"
)
PER_EXAMPLE = (
    "it needs the gradient of each example, but the training step computes the gradient of "
    "the batch"
)
REFUSED = {
    "chain": "a list of items is a chain already; write its items one after the other",
    "named_chain": "a list of items is a chain already",
    "partition": "write optimizer.groups instead",
    "multi_transform": "write optimizer.groups instead",
    "inject_hyperparams": "schedules are arguments already",
    "inject_stateful_hyperparams": "schedules are arguments already",
    "with_extra_args_support": "every chain has it already",
    "scale_by_zoom_linesearch": LINESEARCH,
    "scale_by_backtracking_linesearch": LINESEARCH,
    "sophia": "it differentiates the loss again to estimate curvature, but the training step hands "
    "over only the loss's value and gradients",
    "hutchinson_estimator_diag_hessian": "it is part of sophia, which differentiates the loss "
    "again inside the update",
    "dpsgd": PER_EXAMPLE,
    "differentially_private_aggregate": PER_EXAMPLE,
    "conditionally_mask": PYTHON,
    "conditionally_transform": PYTHON,
    "stateless": PYTHON,
    "stateless_with_tree_map": PYTHON,
    "snapshot": PYTHON,
    "monitor": PYTHON,
    "measure_with_ema": PYTHON,
}
DTYPES = ("float32", "bfloat16", "float16")
PER_LAYER = (
    "clip_by_block_rms",
    "fromage",
    "lamb",
    "lars",
    "novograd",
    "scale_by_distance_over_gradients",
    "scale_by_novograd",
    "scale_by_param_block_norm",
    "scale_by_param_block_rms",
    "scale_by_sm3",
    "scale_by_trust_ratio",
    "sm3",
)
"""Transforms that take norms or statistics over a whole tensor: each layer of a stacked weight is a
tensor."""
PER_MATRIX = (
    "adafactor",
    "adaptive_grad_clip",
    "centralize",
    "galore",
    "scale_by_factored_rms",
    "scale_by_galore",
)
"""Transforms that tell a tensor's dimensions apart: each layer is shown to them as a matrix."""
MUON = ("muon", "scale_by_muon")
RESHAPING = ("flatten", "galore", "scale_by_galore")
DECAY_MASKS = ("mask", "weight_decay_mask")


def sort_of(argument: Argument) -> str:
    """What a configuration writes for an argument, judged by its name and annotation."""
    name, text = argument.name, argument.annotation
    special = {
        "schedules": "schedules",
        "boundaries": "boundaries",
        "boundaries_and_scales": "scales",
        "cosine_kwargs": "cycles",
        "should_skip_update_fn": "skip",
        "every_k_schedule": "whole",
        "key": "whole",
    }
    rules = (
        ("dimensions", name.endswith("weight_dimension_numbers")),
        (special.get(name, ""), name in special),
        ("mask", name.endswith("mask")),
        ("transform", "GradientTransformation" in text),
        ("rate", "Schedule" in text),
        ("dtype", "dtype" in name),
        ("python", "Callable" in text),
        ("steps", name in STEPS),
        ("value", name in VALUES),
        ("flag", text == "bool"),
        ("sequence", "uple[" in text or "equence[" in text),
        ("choice", "Literal[" in text),
        ("text", text == "str"),
        ("whole", text in ("int", "Optional[int]", "int | None")),
    )
    return next((sort for sort, holds in rules if holds), "number")


def transform_kinds() -> list[str]:
    """The kinds of chain items."""
    return sorted(set(names("transform")) - set(REFUSED))


def schedule_kinds() -> list[str]:
    """The kinds of schedules: Optax's names, our own, and the short ones."""
    return sorted({*names("schedule"), *OWN, *ALIASES})


def wrapped_argument(found: Signature) -> str | None:
    """The argument that holds the transform which this one wraps; `inner` is another name for it in
    a configuration."""
    return next(
        (argument.name for argument in found.arguments if sort_of(argument) == "transform"), None
    )


def arguments_of(item: dict[str, Any]) -> dict[str, Any]:
    """A chain item without its kind, with `inner` under the name that Optax gives it."""
    found = signature(item["kind"])
    slot = wrapped_argument(found) if found else None
    return {
        slot if name == "inner" and slot else name: value
        for name, value in item.items()
        if name != "kind"
    }


def as_chain(value: Any) -> list[dict[str, Any]]:
    """One item or a list of items, as a list."""
    return [value] if isinstance(value, dict) else list(value)


def walk(value: Any, key: str, every: int = 1) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Every item of a checked chain and of the chains inside it, with its key and the steps between
    two of its updates."""
    for i, item in enumerate(as_chain(value)):
        where = key if isinstance(value, dict) else f"{key}.{i}"
        yield item, where, every
        found, given = signature(item["kind"]), arguments_of(item)
        assert found is not None
        for argument in found.arguments:
            if sort_of(argument) == "transform" and given.get(argument.name):
                name = (
                    "inner"
                    if "inner" in item and argument.name == wrapped_argument(found)
                    else argument.name
                )
                yield from walk(
                    given[argument.name],
                    f"{where}.{name}",
                    every * (given["every_k_schedule"] if found.name == "MultiSteps" else 1),
                )


def check_chain(value: Any, key: str, reshaped: str | None = None) -> None:
    """Checks one item or a list of items; `reshaped` names the wrapper that hides the parameters'
    paths and shapes, if one does."""
    if isinstance(value, dict):
        return check_transform(value, key, reshaped)
    if not isinstance(value, list | tuple) or not value:
        raise fault(
            key,
            f"got {quoted(value)}, wanted a list of items such as [{{kind: "
            f"clip_by_global_norm, max_norm: 1.0}}, {{kind: adamw}}]",
        )
    for i, item in enumerate(value):
        check_transform(item, f"{key}.{i}", reshaped)


def check_transform(item: Any, key: str, reshaped: str | None = None) -> None:
    """Checks a chain item against the signature of the Optax transform that its kind names."""
    kind = _kind(item, key, "{kind: adamw, b2: 0.95}")
    if kind in REFUSED:
        raise fault(f"{key}.kind", f"{kind} cannot be used here: {REFUSED[kind]}")
    found = signature(kind)
    if found is None or found.role != "transform":
        what = (
            f"{quoted(kind)} is a public name of Optax but not a transform"
            if found
            else f"no transform {quoted(kind)} in optax or optax.contrib"
        )
        hint = (
            did_you_mean(kind, transform_kinds(), 3)
            or "; see the API reference of Optax for the names"
        )
        raise fault(f"{key}.kind", f"{what}{hint}")
    given = arguments_of(item)
    if "inner" in item and len(given) + 1 < len(item):
        raise fault(
            f"{key}.inner", f"inner and {wrapped_argument(found)} are the same argument; give one"
        )
    supplied = {
        argument.name
        for argument in found.arguments
        if argument.name == "learning_rate" or sort_of(argument) == "dimensions"
    }
    _check_arguments(found, given, key, supplied, reshaped)
    _check_special(found, given, key, reshaped)


def check_schedule(item: Any, key: str, has_base: bool) -> None:
    """Checks a schedule; `has_base` says that it shapes a learning rate given elsewhere, which its
    peak then defaults to."""
    kind = _kind(item, key, "{kind: warmup_cosine, warmup_steps: 2%}")
    found = schedule_signature(kind)
    if found is None:
        hint = did_you_mean(kind, schedule_kinds(), 3) or "; warmup_cosine and wsd are two of them"
        raise fault(f"{key}.kind", f"no schedule {quoted(kind)}{hint}")
    given = {name: value for name, value in item.items() if name != "kind"}
    peak = peak_argument(found)
    for name in (name for name in VALUES if share(given.get(name)) is not None):
        if not has_base and (
            name == peak or not is_number(given.get(peak or "")) or not given[peak or ""]
        ):
            raise fault(
                f"{key}.{name}",
                f"{given[name]} is a share of a learning rate, and none is given here; "
                f"write {peak} as a number",
            )
    _check_arguments(
        found, given, key, filled(found) | ({peak or ""} if has_base else set()), None, has_base
    )


def _kind(item: Any, key: str, example: str) -> str:
    if not isinstance(item, dict) or "kind" not in item:
        raise fault(key, f"got {quoted(item)}, wanted a mapping with a kind, such as {example}")
    if not isinstance(item["kind"], str):
        raise fault(f"{key}.kind", f"got {quoted(item['kind'])}, wanted a name as text")
    return item["kind"]


def _check_arguments(
    found: Signature,
    given: dict[str, Any],
    key: str,
    supplied: set[str],
    reshaped: str | None,
    has_base: bool = False,
) -> None:
    known = [argument.name for argument in found.arguments]
    inside = reshaped or (found.name if found.name in RESHAPING else None)
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or (
                f"; {foreign}" if (foreign := equivalent(name)) else ""
            )
            raise fault(
                f"{key}.{name}",
                f"{found.name} has no argument {quoted(name)}; it takes "
                f"{', '.join(known) or 'none'}{hint}",
            )
    for argument in found.arguments:
        if argument.name in given:
            _check_value(argument, given[argument.name], f"{key}.{argument.name}", inside, has_base)
        elif argument.default is None and argument.name not in supplied:
            alias = " (or inner)" if argument.name == wrapped_argument(found) else ""
            raise fault(key, f"{found.name} needs {argument.name}{alias}")


def _check_value(
    argument: Argument, value: Any, key: str, reshaped: str | None, has_base: bool
) -> None:
    sort = sort_of(argument)
    if value is None:
        if argument.default != "None" and not re.search(r"None|Optional", argument.annotation):
            raise fault(key, f"got null, but {argument.name} cannot be left empty")
    elif sort == "transform":
        check_chain(value, key, reshaped)
    elif sort == "mask":
        if not isinstance(value, bool):
            check_selectors(value, key)
    elif sort == "rate" and isinstance(value, dict):
        check_schedule(value, key, has_base=False)
    elif sort == "schedules" and isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            check_schedule(inner, f"{key}.{i}", has_base)
    elif sort == "cycles" and isinstance(value, list | tuple):
        for i, cycle in enumerate(value):
            check_schedule(
                {"kind": "warmup_cosine", **cycle} if isinstance(cycle, dict) else cycle,
                f"{key}.{i}",
                has_base,
            )
            if "decay_steps" not in cycle:
                raise fault(f"{key}.{i}", "a cycle needs decay_steps, its length")
    elif sort == "choice":
        listed = re.search(r"Literal\[(.*?)\]", argument.annotation)
        assert listed
        allowed = ast.literal_eval(f"[{listed[1]}]")
        if value not in allowed:
            raise fault(
                key,
                f"got {quoted(value)}, wanted one of "
                f"{', '.join(allowed)}{did_you_mean(value, allowed)}",
            )
    elif sort == "dimensions":
        raise fault(key, f"{argument.name} follows from the parameters' axes and cannot be set")
    elif sort == "python":
        raise fault(
            key,
            f"{argument.name} takes a Python function, which a configuration cannot "
            "hold; leave it out",
        )
    elif not _fits(sort, value):
        raise fault(key, f"got {quoted(value)}, wanted {WANTED[sort]}")


WANTED = {
    "number": "a number",
    "rate": "a number or a schedule",
    "value": "a number, or a share of the learning rate such as '10%'",
    "whole": "a whole number",
    "steps": "a whole number of steps, or a share of train.steps such as '2%'",
    "flag": "true or false",
    "text": "text",
    "sequence": "a list of numbers",
    "dtype": f"one of {', '.join(DTYPES)}",
    "scales": "a mapping from step to factor",
    "boundaries": "a list of steps or of shares of train.steps",
    "schedules": "a list of schedules",
    "cycles": "a list of mappings with the arguments of warmup_cosine",
    "skip": "skip_not_finite, or {kind: skip_large_updates, max_squared_norm: ...}",
}


def check_steps_value(value: Any, key: str) -> None:
    """Refuses what is neither a number of steps nor a share of train.steps."""
    if not _is_steps(value):
        raise fault(key, f"got {quoted(value)}, wanted {WANTED['steps']}")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_steps(value: Any) -> bool:
    return share(value) is not None or (
        isinstance(value, int) and not isinstance(value, bool) and value >= 0
    )


def _fits(sort: str, value: Any) -> bool:
    if sort == "skip":
        large = (
            isinstance(value, dict)
            and value.get("kind") == "skip_large_updates"
            and set(value) == {"kind", "max_squared_norm"}
        )
        return value == "skip_not_finite" or (large and is_number(value["max_squared_norm"]))
    checks = {
        "number": is_number,
        "rate": is_number,
        "value": lambda v: is_number(v) or share(v) is not None,
        "steps": _is_steps,
        "whole": lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0,
        "flag": lambda v: isinstance(v, bool),
        "text": lambda v: isinstance(v, str),
        "dtype": lambda v: v in DTYPES,
        "sequence": lambda v: isinstance(v, list | tuple | str) or is_number(v),
        "boundaries": lambda v: isinstance(v, list | tuple) and all(map(_is_steps, v)),
        "scales": lambda v: (
            isinstance(v, dict) and all(map(_is_steps, v)) and all(map(is_number, v.values()))
        ),
    }
    return sort in checks and checks[sort](value)


def _check_special(found: Signature, given: dict[str, Any], key: str, reshaped: str | None) -> None:
    if found.name == "lbfgs" and given.get("linesearch", ...) is not None:
        raise fault(
            f"{key}.linesearch", f"lbfgs works here with `linesearch: null` only: {LINESEARCH}"
        )
    if found.name == "sam" and given.get("opaque_mode"):
        raise fault(
            f"{key}.opaque_mode",
            "the opaque mode calls the loss inside the update; without it, the two steps "
            "see consecutive batches",
        )
    if found.name == "MultiSteps" and given.get("every_k_schedule") == 0:
        raise fault(f"{key}.every_k_schedule", "got 0, wanted at least 1")
    if given.get("warmup_steps") == 0:
        raise fault(f"{key}.warmup_steps", "got 0, wanted at least 1, or null for no warm-up")
    if reshaped:
        _check_reshaped(found, given, key, reshaped)


def _check_reshaped(found: Signature, given: dict[str, Any], key: str, reshaped: str) -> None:
    """Inside a wrapper that hides paths and shapes, nothing can depend on them."""
    if found.name in PER_LAYER + PER_MATRIX + MUON:
        raise fault(
            f"{key}.kind",
            f"{found.name} depends on the parameters' shapes, which {reshaped} hides; "
            f"apply it outside {reshaped}",
        )
    decays = given.get(
        "weight_decay",
        ast.literal_eval(found["weight_decay"].default or "None")
        if "weight_decay" in found
        else None,
    )
    for name in (argument.name for argument in found.arguments if sort_of(argument) == "mask"):
        if isinstance(given.get(name), list | tuple) or (
            decays and name in DECAY_MASKS and name not in given
        ):
            raise fault(
                f"{key}.{name}",
                f"{reshaped} hides the parameters' paths and shapes, so {found.name} "
                "cannot choose among them inside it; "
                f"set {name}: null here, or decay weights outside {reshaped}",
            )
