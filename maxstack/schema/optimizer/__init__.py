"""The optimizer's configuration: an Optax chain as data, with masks and groups by parameter path.
Checked without importing jax."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, WithJsonSchema

from maxstack.config import Fault, Items, Section, fault
from maxstack.errors import quoted
from maxstack.schema.optimizer.arguments import (
    Chain,
    Transform,
    check_sort,
    is_number,
    parse_chain,
    parse_schedule,
    schedule_kinds,
    transform_kinds,
)
from maxstack.schema.optimizer.paths import Selector, check_selectors
from maxstack.schema.optimizer.schedules import Schedule, step_faults, steps_of


def _kind_schema(kinds: list[str]) -> dict[str, Any]:
    """The JSON schema of a mapping with a kind."""
    return {"type": "object", "required": ["kind"], "properties": {"kind": {"enum": kinds}}}


_SCHEDULE = _kind_schema(schedule_kinds())
_PATTERN = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "path": {"type": "string"},
        "ndim": {"type": "integer"},
        "optional": {"type": "boolean"},
    },
}
_PATTERNS = {"type": "array", "items": {"anyOf": [{"type": "string"}, _PATTERN]}}
_SHARE = {"type": "string", "pattern": r"^\d+(\.\d+)?%$"}
RateValue = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "number"}, _SCHEDULE]})]
ScheduleValue = Annotated[Any, WithJsonSchema({"anyOf": [_SCHEDULE, {"type": "null"}]})]
ChainValue = Annotated[
    Any, WithJsonSchema({"type": "array", "items": _kind_schema(transform_kinds())})
]
Patterns = Annotated[Any, WithJsonSchema({"anyOf": [_PATTERNS, {"type": "null"}]})]
Steps = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, _SHARE]})]
CLIP: dict[str, Any] = {"kind": "clip_by_global_norm", "max_norm": 1.0}
ADAMW: dict[str, Any] = {"kind": "adamw", "b1": 0.9, "b2": 0.95, "weight_decay": 0.1}
WARMUP_COSINE: dict[str, Any] = {"kind": "warmup_cosine", "warmup_steps": "2%", "end_value": "10%"}
ASCENDING = ("scale_by_rprop",)
DESCENDING = ("polyak_sgd", "scale_by_cocob", "set_to_zero")


class GroupConfig(Section):
    """A group of parameters with a chain of its own."""

    match: Patterns
    """Patterns over parameter paths, such as 'blocks/*' or {path: 'blocks/*', ndim: 2}; a leading !
    excludes. ndim leaves out the dimension of stacked layers, and counts heads x head_dim as one;
    optional: true allows a pattern to match nothing. Parts of a weight in low precision, and
    adapters, match by the weight's path (blocks/global/mlp/gate) and by their own (*/lora_b)."""
    chain: ChainValue
    """Optax transforms, applied in order, as in optimizer.chain."""


class EmaConfig(Section):
    """Exponential moving average of the weights, kept in the optimizer state."""

    decay: float = Field(0.999, gt=0, lt=1)
    """Decay of the average per step."""
    start: Steps = 0
    """Step at which averaging starts, a whole number or a share of train.steps such as 10%; until
    then the average equals the weights."""
    eval: bool = True
    """Evaluate with the average instead of the weights."""

    def own_faults(self) -> tuple[Fault, ...]:
        check_sort("steps", self.start, "start")
        return ()


Selectors = tuple[Selector, ...]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The optimizer section, checked and parsed."""

    learning_rate: float | Schedule
    schedule: Schedule | None
    chain: Chain
    groups: tuple[tuple[Selectors, Chain], ...]
    decay: Selectors | None = None
    trainable: Selectors | None = None
    frozen: Selectors | None = None

    def items(self) -> Iterator[Transform]:
        """Every item of every chain, those inside others too, in the order of the configuration."""
        for chain in (self.chain, *(chain for _, chain in self.groups)):
            for item in chain:
                yield from item.walk()

    def rated(self) -> list[Transform]:
        """The items that take a learning rate."""
        return [item for item in self.items() if "learning_rate" in item.signature.arguments]


class OptimizerConfig(Section):
    """How gradients update weights: Optax transforms by their own names, with arguments checked
    against their signatures."""

    learning_rate: RateValue = 3e-4
    """Peak learning rate for every chain item that takes a learning rate and does not set its own;
    or a whole schedule, with `schedule` null."""
    schedule: ScheduleValue = WARMUP_COSINE
    """Schedule for every learning rate that is given as a number, which is then its peak. The kind
    is any Optax schedule, wsd or inverse_sqrt; null: a constant rate. Steps may be shares of
    train.steps, such as 2%; start and end values may be shares of the peak, such as 10%. Without a
    kind, the given arguments override those of the default."""
    chain: ChainValue = [CLIP, ADAMW]
    """Optax transforms by kind, applied in order to all trainable parameters. With groups it runs
    before them, and defaults to gradient clipping."""
    groups: Items[GroupConfig] = ()
    """Chains for parts of the parameters; the first group that matches a parameter applies, and
    every parameter must match one."""
    decay: Patterns = None
    """Patterns of the parameters to apply weight decay to, in transforms that take a mask; null:
    matrices, so neither norms nor biases."""
    trainable: Patterns = None
    """Patterns of the parameters to train; null: all."""
    frozen: Patterns = None
    """Patterns of the parameters that never change and have no optimizer state; null: none."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of bfloat16 weights (model.param_dtype) after an update. stochastic: randomly up or
    down, so that updates below the last bit count on average."""
    ema: EmaConfig | None = None
    """Moving average of the weights; null: none."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if isinstance(data.get("learning_rate"), dict):
            data = {"schedule": None, **data}
        if data.get("groups"):
            data = {"chain": [CLIP], **data}
        shape = data.get("schedule")
        if isinstance(shape, dict) and "kind" not in shape:
            data = data | {"schedule": WARMUP_COSINE | shape}
        return data

    def own_faults(self) -> Iterator[Fault]:
        """Every parameter must be moved against its gradient, once, by a learning rate that its
        transform can take."""
        optimizer = self.parsed
        for item in optimizer.chain if self.groups else ():
            if _descends(item):
                yield (
                    item.key,
                    "applies the learning rate, and the groups do so again; move this item into "
                    "them",
                )
        last = {f"groups.{i}.chain": chain for i, (_, chain) in enumerate(optimizer.groups)}
        for key, chain in (last or {"chain": optimizer.chain}).items():
            if not any(map(_descends, chain)):
                yield (
                    key,
                    "no item moves weights against their gradients; end the chain with "
                    "{kind: scale_by_learning_rate}",
                )
        varies = optimizer.schedule or isinstance(optimizer.learning_rate, Schedule)
        for item in optimizer.rated():
            if varies and item.constant_rate and "learning_rate" not in item.arguments:
                yield (
                    item.key,
                    f"{item.signature.name} takes a constant learning rate only; set "
                    "optimizer.schedule: null with a number in "
                    "optimizer.learning_rate, or give this item its own learning_rate",
                )

    @functools.cached_property
    def parsed(self) -> Optimizer:
        """The optimizer that this section describes. Raises a fault for a mistake."""
        patterns = {
            name: check_selectors(given, name)
            for name in ("decay", "trainable", "frozen")
            if (given := getattr(self, name)) is not None
        }
        return Optimizer(
            learning_rate=self._parsed_rate(),
            schedule=None
            if self.schedule is None
            else parse_schedule(self.schedule, "schedule", True),
            chain=() if self.groups and self.chain == [] else parse_chain(self.chain, "chain"),
            groups=tuple(
                (
                    check_selectors(group.match, f"groups.{i}.match"),
                    parse_chain(group.chain, f"groups.{i}.chain"),
                )
                for i, group in enumerate(self.groups)
            ),
            **patterns,
        )

    def model_copy(self, *, update: Any = None, deep: bool = False) -> "OptimizerConfig":
        """A copy, parsed again: pydantic's would keep what was parsed before the update."""
        return OptimizerConfig(**self.model_dump() | (update or {}))

    def _parsed_rate(self) -> float | Schedule:
        if isinstance(self.learning_rate, dict):
            rate = parse_schedule(self.learning_rate, "learning_rate", has_base=False)
            if self.schedule is not None:
                raise fault(
                    "schedule",
                    "learning_rate is a whole schedule already; set schedule: null, or "
                    "learning_rate to the peak as a number",
                )
            return rate
        if not is_number(self.learning_rate) or self.learning_rate < 0:
            raise fault(
                "learning_rate",
                f"got {quoted(self.learning_rate)}, wanted a number >= 0 such as 3e-4, "
                "or a schedule",
            )
        return self.learning_rate


def schedule_faults(cfg: OptimizerConfig, train_steps: int) -> Iterator[Fault]:
    """Schedules that do not go with the run's length; keys are relative to the optimizer
    section."""
    optimizer = cfg.parsed
    for item in optimizer.items():
        updates = updates_in(train_steps, item.every)
        for name, value in item.arguments.items():
            if isinstance(value, Schedule):
                yield from step_faults(value, updates)
            if name == "warmup_steps" and value and steps_of(value, updates) > updates:
                yield (
                    f"{item.key}.{name}",
                    f"warmup_steps={value} is longer than train.steps={train_steps}; try 2%",
                )
    shape = optimizer.schedule or optimizer.learning_rate
    if isinstance(shape, Schedule):
        for every in sorted({item.every for item in optimizer.rated()}):
            yield from step_faults(shape, updates_in(train_steps, every))
    if cfg.ema and steps_of(cfg.ema.start, train_steps) >= train_steps:
        yield (
            "ema.start",
            f"the average would start after the last step; train.steps={train_steps}",
        )


def updates_in(train_steps: int, every: int) -> int:
    """Updates in the run of an item that acts only `every` steps."""
    return max(train_steps // every, 1)


def _descends(item: Transform) -> bool:
    """True for an item that turns gradients into steps against them."""
    name, arguments = item.signature.name, item.arguments
    if name == "scale":
        return arguments["step_size"] < 0
    if name == "scale_by_schedule":
        step_size = arguments["step_size_fn"]
        values = step_size.arguments.values() if isinstance(step_size, Schedule) else [step_size]
        return any(isinstance(value, int | float) and value < 0 for value in values)
    if "learning_rate" in item.signature.arguments and name not in ASCENDING:
        return arguments.get("flip_sign", True)
    return name in DESCENDING or any(map(_descends, item.inner))
