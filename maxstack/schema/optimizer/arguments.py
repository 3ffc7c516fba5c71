"""Chain items and schedules parsed from what a configuration holds: known kinds, known and
complete arguments, values of the right sort."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import pydantic

from maxstack.config import Section, fault
from maxstack.config.own_kinds import Kind, imported, is_own
from maxstack.config.spelling import did_you_mean
from maxstack.errors import quoted
from maxstack.schema.foreign import equivalent
from maxstack.schema.optimizer.paths import check_selectors
from maxstack.schema.optimizer.schedules import (
    ALIASES,
    Schedule,
    filled,
    peak_argument,
    share,
)
from maxstack.schema.optimizer.signatures import (
    Argument,
    Signature,
    is_other,
    lookup,
    names,
    version_note,
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
"""Transforms that distinguish a tensor's dimensions: each layer is shown to them as a matrix."""
MUON = ("muon", "scale_by_muon")
RESHAPING = ("flatten", "galore", "scale_by_galore")
DECAY_MASKS = ("mask", "weight_decay_mask")


@dataclasses.dataclass(frozen=True)
class Transform:
    """A checked item of a chain."""

    signature: Signature
    arguments: dict[str, Any]
    """Values by Optax's names: transforms as a Chain, schedules as a Schedule, patterns as
    Selectors, all else as the configuration writes it."""
    key: str
    """Dotted path, relative to the optimizer section."""
    every: int
    """Steps of the run between two updates: more than one inside MultiSteps."""
    section: "TransformPart | None" = None
    """That of a transform of one's own."""

    @property
    def inner(self) -> "Chain":
        """The transforms that this one wraps."""
        return tuple(
            item
            for name in self.signature.of_sort("transform")
            for item in self.arguments.get(name) or ()
        )

    def walk(self) -> Iterator["Transform"]:
        """The item and all items inside it."""
        yield self
        for item in self.inner:
            yield from item.walk()

    @property
    def constant_rate(self) -> bool:
        """True where the learning rate cannot be a schedule."""
        return self.signature.arguments["learning_rate"].sort != "rate"


Chain = tuple[Transform, ...]


class TransformPart(Kind, Section):
    """The section of a transform of one's own."""

    PLACES = ("TRANSFORM",)
    TRANSFORM: ClassVar[str] = ""
    """module:function that maps the section, as `section`, to an optax.GradientTransformation."""
    DESCENDS: ClassVar[bool] = False
    """Whether it turns gradients into steps against them; then the function also takes
    `learning_rate`, a number or a function of the step."""


class _Around(NamedTuple):
    """Facts about where an item or schedule stands."""

    every: int = 1
    reshaped: str | None = None
    """The wrapper that hides the parameters' paths and shapes."""
    has_base: bool = False
    """A schedule shapes a learning rate given elsewhere, which its peak defaults to."""


_TOP = _Around()


def transform_kinds() -> list[str]:
    """The kinds of chain items."""
    return sorted(set(names("transform")) - set(REFUSED))


def schedule_kinds() -> list[str]:
    """The kinds of schedules: Optax's names, our own, and the short ones."""
    return sorted({*names("schedule"), *ALIASES})


def parse_chain(value: Any, key: str, around: _Around = _TOP) -> Chain:
    """The chain that a list of items, or a single item, describes."""
    if isinstance(value, dict):
        return (_transform(value, key, around),)
    if not isinstance(value, list | tuple) or not value:
        raise fault(
            key,
            f"got {quoted(value)}, wanted a list of items such as [{{kind: "
            f"clip_by_global_norm, max_norm: 1.0}}, {{kind: adamw}}]",
        )
    return tuple(_transform(item, f"{key}.{i}", around) for i, item in enumerate(value))


def parse_schedule(item: Any, key: str, has_base: bool) -> Schedule:
    """The schedule that a mapping describes; `has_base`: it shapes a learning rate given elsewhere,
    which its peak defaults to."""
    kind = _kind(item, key, "{kind: warmup_cosine, warmup_steps: 2%}")
    signature = lookup("schedule", ALIASES.get(kind, kind))
    if signature is None:
        hint = did_you_mean(kind, schedule_kinds(), 3) or "; warmup_cosine and wsd are two of them"
        raise fault(f"{key}.kind", f"no schedule {quoted(kind)}{hint}{version_note()}")
    peak = peak_argument(signature)
    has_peak = has_base or (is_number(item.get(peak)) and item[peak])
    for name in signature.of_sort("value"):
        if share(item.get(name)) is not None and not has_peak:
            raise fault(
                f"{key}.{name}",
                f"{item[name]} is a share of a learning rate, and none is given here; "
                f"write {peak} as a number",
            )
    supplied = filled(signature) | ({peak} if has_base else set())
    arguments = _arguments(signature, item, key, supplied, _Around(has_base=has_base))
    return Schedule(signature, arguments, key)


def _transform(item: Any, key: str, around: _Around) -> Transform:
    kind = _kind(item, key, "{kind: adamw, b2: 0.95}")
    if is_own(kind):
        return _own_transform(kind, item, key, around)
    if kind in REFUSED:
        raise fault(f"{key}.kind", f"{kind} cannot be used here: {REFUSED[kind]}")
    signature = lookup("transform", kind)
    if signature is None:
        problem = f"no transform {quoted(kind)} in optax or optax.contrib"
        if is_other(kind):
            problem = f"{quoted(kind)} is a public name of Optax but not a transform"
        reference = "; see the API reference of Optax for the names"
        hint = did_you_mean(kind, transform_kinds(), 3) or reference
        raise fault(f"{key}.kind", f"{problem}{hint}{version_note()}")
    wrapped = _wrapped(signature)
    if wrapped != "inner" and {"inner", wrapped} <= item.keys():
        raise fault(f"{key}.inner", f"inner and {wrapped} are the same argument; give one")
    arguments = _arguments(
        signature, item, key, {"learning_rate", *signature.of_sort("dimensions")}, around
    )
    _check_values(signature, arguments, key)
    if around.reshaped:
        _check_reshaped(signature, arguments, key, around.reshaped)
    return Transform(signature, arguments, key, around.every)


def _own_transform(kind: str, item: dict[str, Any], key: str, around: _Around) -> Transform:
    if not (own := imported(kind, TransformPart)):
        raise fault(f"{key}.kind", f"{kind} is no transform; derive it from TransformPart")
    try:
        section: TransformPart = own.model_validate(item)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise fault(".".join([key, *map(str, first["loc"])]), first["msg"]) from None
    rate = {"learning_rate": Argument("rate")} if section.DESCENDS else {}
    return Transform(Signature(kind, section.TRANSFORM, rate), {}, key, around.every, section)


def _kind(item: Any, key: str, example: str) -> str:
    if not isinstance(item, dict) or "kind" not in item:
        raise fault(key, f"got {quoted(item)}, wanted a mapping with a kind, such as {example}")
    if not isinstance(item["kind"], str):
        raise fault(f"{key}.kind", f"got {quoted(item['kind'])}, wanted a name as text")
    return item["kind"]


def _wrapped(signature: Signature) -> str:
    """The argument that holds the transform which this one wraps, "" where there is none; a
    configuration may call it `inner`."""
    return next(iter(signature.of_sort("transform")), "")


def _arguments(
    signature: Signature, item: dict[str, Any], key: str, supplied: set[str], around: _Around
) -> dict[str, Any]:
    """The values of an item by Optax's names; those in `supplied` need not be given."""
    wrapped, allowed = _wrapped(signature), list(signature.arguments)
    for name in item:
        if name not in ("kind", *allowed) and not (name == "inner" and wrapped):
            foreign = equivalent(name)
            hint = did_you_mean(name, allowed) or (f"; {foreign}" if foreign else "")
            raise fault(
                f"{key}.{name}",
                f"{signature.name} has no argument {quoted(name)}; it takes "
                f"{', '.join(allowed) or 'none'}{hint}{version_note()}",
            )
    period = item.get("every_k_schedule") if signature.name == "MultiSteps" else None
    around = around._replace(
        every=around.every * (period if isinstance(period, int) else 1),
        reshaped=around.reshaped or (signature.name if signature.name in RESHAPING else None),
    )
    values, absent = {}, list[str]()
    for name, argument in signature.arguments.items():
        written = "inner" if name == wrapped and "inner" in item else name
        if written in item:
            values[name] = _value(name, argument, item[written], f"{key}.{written}", around)
        elif argument.required and name not in supplied:
            absent.append(f"{name} (or inner)" if name == wrapped else name)
    if absent:
        raise fault(key, f"{signature.name} needs {' and '.join(absent)}")
    return values


def _value(name: str, argument: Argument, value: Any, key: str, around: _Around) -> Any:
    sort = argument.sort
    if value is None:
        if not argument.nullable:
            raise fault(key, f"got null, but {name} cannot be left empty")
        return None
    if sort == "transform":
        return parse_chain(value, key, around)
    if sort == "mask":
        return value if isinstance(value, bool) else check_selectors(value, key)
    if sort == "rate" and isinstance(value, dict):
        return parse_schedule(value, key, has_base=False)
    if sort in ("schedules", "cycles") and isinstance(value, list | tuple):
        parse = _cycle if sort == "cycles" else parse_schedule
        return tuple(parse(item, f"{key}.{i}", around.has_base) for i, item in enumerate(value))
    if sort == "dimensions":
        raise fault(key, f"{name} follows from the parameters' axes and cannot be set")
    if sort == "python":
        raise fault(
            key,
            f"{name} takes a Python function, which a configuration cannot hold; leave it out",
        )
    if sort != "choice":
        return check_sort(sort, value, key)
    if value not in argument.choices:
        raise fault(
            key,
            f"got {quoted(value)}, wanted one of "
            f"{', '.join(argument.choices)}{did_you_mean(value, argument.choices)}",
        )
    return value


def _cycle(item: Any, key: str, has_base: bool) -> Schedule:
    """A cycle of sgdr: the arguments of warmup_cosine."""
    item = {"kind": "warmup_cosine", **item} if isinstance(item, dict) else item
    cycle = parse_schedule(item, key, has_base)
    if "decay_steps" not in item:
        raise fault(key, "a cycle needs decay_steps, its length")
    return cycle


def check_sort(sort: str, value: Any, key: str) -> Any:
    """The value, or a fault that says what an argument of this sort may be."""
    wanted, fits = SORTS[sort]
    if not fits(value):
        raise fault(key, f"got {quoted(value)}, wanted {wanted}")
    return value


def is_number(value: Any) -> bool:
    """True for a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_steps(value: Any) -> bool:
    return share(value) is not None or _is_whole(value)


def _is_scales(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(map(_is_steps, value))
        and all(map(is_number, value.values()))
    )


def _is_skip(value: Any) -> bool:
    if isinstance(value, dict):
        limit = value.get("max_squared_norm")
        wanted = {"kind": "skip_large_updates", "max_squared_norm": limit}
        return value == wanted and is_number(limit)
    return value == "skip_not_finite"


SORTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "number": ("a number", is_number),
    "rate": ("a number or a schedule", is_number),
    "value": (
        "a number, or a share of the learning rate such as '10%'",
        lambda value: share(value) is not None or is_number(value),
    ),
    "whole": ("a whole number", _is_whole),
    "steps": ("a whole number of steps, or a share of train.steps such as '2%'", _is_steps),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("text", lambda value: isinstance(value, str)),
    "sequence": (
        "a list of numbers",
        lambda value: isinstance(value, list | tuple | str) or is_number(value),
    ),
    "dtype": (f"one of {', '.join(DTYPES)}", DTYPES.__contains__),
    "scales": ("a mapping from step to factor", _is_scales),
    "boundaries": (
        "a list of steps or of shares of train.steps",
        lambda value: isinstance(value, list | tuple) and all(map(_is_steps, value)),
    ),
    "schedules": ("a list of schedules", lambda value: False),
    "cycles": ("a list of mappings with the arguments of warmup_cosine", lambda value: False),
    "skip": ("skip_not_finite, or {kind: skip_large_updates, max_squared_norm: ...}", _is_skip),
}
"""Sorts of arguments: the words for what is wanted, and the test of a value. Mappings in place of a
rate and lists of schedules or cycles do not come here."""


def _check_values(signature: Signature, arguments: dict[str, Any], key: str) -> None:
    """Refuses values that Optax takes and a training step does not."""
    if signature.name == "lbfgs" and arguments.get("linesearch", ...) is not None:
        raise fault(
            f"{key}.linesearch", f"lbfgs works here with `linesearch: null` only: {LINESEARCH}"
        )
    if signature.name == "sam" and arguments.get("opaque_mode"):
        raise fault(
            f"{key}.opaque_mode",
            "the opaque mode calls the loss inside the update; without it, the two steps "
            "see consecutive batches",
        )
    if signature.name == "MultiSteps" and arguments.get("every_k_schedule") == 0:
        raise fault(f"{key}.every_k_schedule", "got 0, wanted at least 1")
    if arguments.get("warmup_steps") == 0:
        raise fault(f"{key}.warmup_steps", "got 0, wanted at least 1, or null for no warm-up")


def _check_reshaped(
    signature: Signature, arguments: dict[str, Any], key: str, reshaped: str
) -> None:
    """Refuses what depends on paths and shapes inside a wrapper that hides them."""
    if signature.name in PER_LAYER + PER_MATRIX + MUON:
        raise fault(
            f"{key}.kind",
            f"{signature.name} depends on the parameters' shapes, which {reshaped} hides; "
            f"apply it outside {reshaped}",
        )
    decay = signature.arguments.get("weight_decay")
    decays = arguments.get("weight_decay", decay and decay.default)
    for name in signature.of_sort("mask"):
        selects = isinstance(arguments.get(name), tuple)
        selects_matrices = decays and name in DECAY_MASKS and name not in arguments
        if selects or selects_matrices:
            raise fault(
                f"{key}.{name}",
                f"{reshaped} hides the parameters' paths and shapes, so {signature.name} "
                "cannot choose among them inside it; "
                f"set {name}: null here, or decay weights outside {reshaped}",
            )
