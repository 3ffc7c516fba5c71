"""The optimizer's configuration: an Optax chain as data, with masks and groups by parameter path.
Checked without importing jax."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import pydantic
from pydantic import Field

from maxstack.config import Items, Section, fault, quoted
from maxstack.schema.optimizer.arguments import (
    arguments_of,
    as_chain,
    check_chain,
    check_schedule,
    check_steps_value,
    is_number,
    schedule_kinds,
    sort_of,
    transform_kinds,
    walk,
)
from maxstack.schema.optimizer.names import signature
from maxstack.schema.optimizer.paths import check_selectors
from maxstack.schema.optimizer.schedules import check_steps, steps_of

Mapping = dict[str, Any]


_PATTERN = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "path": {"type": "string"},
                "ndim": {"type": "integer"},
                "optional": {"type": "boolean"},
            },
        },
    ]
}


class _KindSchema:
    """The JSON schema of a mapping with a kind, whose names are read from Optax when a schema is
    written and not before."""

    def __init__(self, kinds: Callable[[], list[str]], wrap: Callable[[Mapping], Mapping]) -> None:
        self._kinds, self._wrap = kinds, wrap

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> Mapping:
        return self._wrap(
            {
                "type": "object",
                "required": ["kind"],
                "properties": {"kind": {"enum": self._kinds()}},
            }
        )


Rate = Annotated[
    Any, _KindSchema(schedule_kinds, lambda item: {"anyOf": [{"type": "number"}, item]})
]


Shape = Annotated[
    Any, _KindSchema(schedule_kinds, lambda item: {"anyOf": [item, {"type": "null"}]})
]


Chain = Annotated[Any, _KindSchema(transform_kinds, lambda item: {"type": "array", "items": item})]


Patterns = Annotated[
    Any,
    pydantic.WithJsonSchema({"anyOf": [{"type": "array", "items": _PATTERN}, {"type": "null"}]}),
]


Steps = Annotated[
    Any,
    pydantic.WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\d+(\.\d+)?%$"},
            ]
        }
    ),
]


CLIP: Mapping = {"kind": "clip_by_global_norm", "max_norm": 1.0}


ADAMW: Mapping = {"kind": "adamw", "b1": 0.9, "b2": 0.95, "weight_decay": 0.1}


WARMUP_COSINE: Mapping = {"kind": "warmup_cosine", "warmup_steps": "2%", "end_value": "10%"}


ASCENDING = ("scale_by_rprop",)


DESCENDING = ("polyak_sgd", "scale_by_cocob", "set_to_zero")


class GroupConfig(Section):
    """Parameters that share a chain of their own."""

    match: Patterns
    """Patterns over parameter paths, such as 'blocks/*' or {path: 'blocks/*', ndim: 2}; a leading !
    excludes. Layers do not count in ndim, and heads x head_dim count as one; optional: true allows
    a pattern to match nothing. What is kept of a weight in low precision, and its adapter, are
    matched by the weight's path (blocks/global/mlp/gate) and by their own (*/lora_b)."""
    chain: Chain
    """Optax transforms, applied in order, as in optimizer.chain."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "GroupConfig":
        check_selectors(self.match, "match")
        check_chain(self.chain, "chain")
        return self


class EmaConfig(Section):
    """An exponential moving average of the weights, kept in the optimizer's state."""

    decay: float = Field(0.999, gt=0, lt=1)
    """The share of itself that the average keeps at each step."""
    start: Steps = 0
    """Until this step, a whole number or a share of train.steps such as 10%, the average is the
    weights themselves."""
    eval: bool = True
    """Evaluate with the average instead of the weights."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "EmaConfig":
        check_steps_value(self.start, "start")
        return self


class OptimizerConfig(Section):
    """How weights follow from gradients: Optax transforms by their own names, arguments checked
    against their signatures."""

    learning_rate: Rate = 3e-4
    """Peak learning rate of every chain item that takes one and sets none; or a whole schedule, and
    then `schedule` is null."""
    schedule: Shape = WARMUP_COSINE
    """Shape of every learning rate that is given as a number, which is its peak; by kind: any Optax
    schedule, wsd or inverse_sqrt; null: constant. Steps may be shares of train.steps such as 2%,
    start and end values shares of the peak such as 10%. Without a kind, the given arguments replace
    those of the default."""
    chain: Chain = [CLIP, ADAMW]
    """Optax transforms by kind, applied in order to all trainable parameters. With groups it runs
    before them, and defaults to the clipping alone."""
    groups: Items[GroupConfig] = ()
    """Chains for some parameters each; the first group that matches a parameter takes it, and every
    parameter needs one."""
    decay: Patterns = None
    """Patterns of the parameters that weight decay acts on, in the transforms that take a mask;
    null: matrices, so neither norms nor biases."""
    trainable: Patterns = None
    """Patterns of the parameters that are trained; null: all."""
    frozen: Patterns = None
    """Patterns of the parameters that never change and have no optimizer state; null: none."""
    ema: EmaConfig | None = None
    """Keep an average of the weights; null: none."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("learning_rate"), dict):
            data = {"schedule": None, **data}
        if isinstance(data, dict) and data.get("groups"):
            data = {"chain": [CLIP], **data}
        if (
            isinstance(data, dict)
            and isinstance(data.get("schedule"), dict)
            and "kind" not in data["schedule"]
        ):
            data = data | {"schedule": WARMUP_COSINE | data["schedule"]}
        return data

    @pydantic.model_validator(mode="after")
    def _check(self) -> "OptimizerConfig":
        if isinstance(self.learning_rate, dict):
            check_schedule(self.learning_rate, "learning_rate", has_base=False)
            if self.schedule is not None:
                raise fault(
                    "schedule",
                    "learning_rate is a whole schedule already; set schedule: null, or "
                    "learning_rate to the peak as a number",
                )
        elif not is_number(self.learning_rate) or self.learning_rate < 0:
            raise fault(
                "learning_rate",
                f"got {quoted(self.learning_rate)}, wanted a number >= 0 such as 3e-4, "
                "or a schedule",
            )
        if self.schedule is not None:
            check_schedule(self.schedule, "schedule", has_base=True)
        if self.chain != [] or not self.groups:
            check_chain(self.chain, "chain")
        for name in ("decay", "trainable", "frozen"):
            if getattr(self, name) is not None:
                check_selectors(getattr(self, name), name)
        self._check_rates()
        return self

    def _check_rates(self) -> None:
        """Every parameter must be moved against its gradient, once, by a learning rate that its
        transform can take."""
        shared = next((i for i, item in enumerate(as_chain(self.chain)) if _descends(item)), None)
        if self.groups and shared is not None:
            raise fault(
                f"chain.{shared}",
                "applies the learning rate, and the groups do so again; move this item into them",
            )
        for where, chain in [
            (f"groups.{i}.chain", group.chain) for i, group in enumerate(self.groups)
        ] or [("chain", self.chain)]:
            if not any(_descends(item) for item in as_chain(chain)):
                raise fault(
                    where,
                    "no item moves weights against their gradients; end the chain with "
                    "{kind: scale_by_learning_rate}",
                )
        for use in rate_uses(self):
            if use.base and use.fixed and (self.schedule or isinstance(self.learning_rate, dict)):
                raise fault(
                    use.key,
                    f"{use.item['kind']} takes a constant learning rate only; set "
                    "optimizer.schedule: null with a number in "
                    "optimizer.learning_rate, or give this item its own learning_rate",
                )


class RateUse(NamedTuple):
    """A chain item that takes a learning rate."""

    item: Mapping
    key: str
    every: int
    """Steps of the run between two updates of the item: more than one inside MultiSteps."""
    base: bool
    """It sets no learning rate, so optimizer.learning_rate holds."""
    fixed: bool
    """Its learning rate cannot be a schedule."""


def rate_uses(cfg: OptimizerConfig) -> Iterator[RateUse]:
    """The items that take a learning rate, in the order of the configuration."""
    for item, key, every in _items(cfg):
        found = signature(item["kind"])
        if found and "learning_rate" in found:
            yield RateUse(
                item,
                key,
                every,
                "learning_rate" not in item,
                sort_of(found["learning_rate"]) != "rate",
            )


def check_schedules(cfg: OptimizerConfig, train_steps: int) -> None:
    """Checks every schedule against the run's length; raises a fault whose key is relative to the
    optimizer section."""
    for item, key, every in _items(cfg):
        found = signature(item["kind"])
        assert found is not None
        for name, value in arguments_of(item).items():
            if sort_of(found[name]) == "rate" and isinstance(value, dict):
                check_steps(value, updates_in(train_steps, every), f"{key}.{name}")
            if (
                name == "warmup_steps"
                and value is not None
                and steps_of(value, updates_in(train_steps, every)) > updates_in(train_steps, every)
            ):
                raise fault(
                    f"{key}.{name}",
                    f"warmup_steps={value} is longer than train.steps={train_steps}; try 2%",
                )
    shape, name = (
        (cfg.schedule, "schedule")
        if cfg.schedule is not None
        else (cfg.learning_rate, "learning_rate")
    )
    for every in sorted({use.every for use in rate_uses(cfg)}) if isinstance(shape, dict) else ():
        check_steps(shape, updates_in(train_steps, every), name)
    if cfg.ema and steps_of(cfg.ema.start, train_steps) >= train_steps:
        raise fault(
            "ema.start", f"the average would start after the last step; train.steps={train_steps}"
        )


def updates_in(train_steps: int, every: int) -> int:
    """Updates in the run of an item that acts only `every` steps."""
    return max(train_steps // every, 1)


def _items(cfg: OptimizerConfig) -> Iterator[tuple[Mapping, str, int]]:
    yield from walk(cfg.chain, "chain")
    for i, group in enumerate(cfg.groups):
        yield from walk(group.chain, f"groups.{i}.chain")


def _descends(item: Mapping) -> bool:
    """Whether the item turns gradients into steps against them."""
    found, given = signature(item["kind"]), arguments_of(item)
    assert found is not None
    if found.name == "scale":
        return given["step_size"] < 0
    if found.name == "scale_by_schedule":
        values = (
            given["step_size_fn"].values()
            if isinstance(given["step_size_fn"], dict)
            else [given["step_size_fn"]]
        )
        return any(isinstance(value, int | float) and value < 0 for value in values)
    if "learning_rate" in found and found.name not in ASCENDING:
        return given.get("flip_sign", True)
    inner = [
        given[argument.name]
        for argument in found.arguments
        if sort_of(argument) == "transform" and given.get(argument.name)
    ]
    return found.name in DESCENDING or any(
        _descends(nested) for value in inner for nested in as_chain(value)
    )
