"""Schedules as data: Optax's by their names, two of our own, shares of the run for steps and shares
of the learning rate for values."""

import dataclasses
import fractions
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

from maxstack.config import Fault
from maxstack.schema.optimizer.signatures import Signature

ALIASES = {
    "constant": "constant_schedule",
    "linear": "linear_schedule",
    "polynomial": "polynomial_schedule",
    "cosine": "cosine_decay_schedule",
    "exponential": "exponential_decay",
    "warmup_constant": "warmup_constant_schedule",
    "warmup_cosine": "warmup_cosine_decay_schedule",
    "warmup_exponential": "warmup_exponential_decay_schedule",
    "onecycle": "cosine_onecycle_schedule",
    "join": "join_schedules",
    "sgdr": "sgdr_schedule",
    "piecewise_constant": "piecewise_constant_schedule",
    "piecewise_interpolate": "piecewise_interpolate_schedule",
}
SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
WARM_UP_ONLY = ("warmup_constant_schedule", "inverse_sqrt")
FILLS_RUN = {
    "cosine_decay_schedule": "decay_steps",
    "warmup_cosine_decay_schedule": "decay_steps",
    "linear_schedule": "transition_steps",
    "polynomial_schedule": "transition_steps",
    "cosine_onecycle_schedule": "transition_steps",
    "linear_onecycle_schedule": "transition_steps",
}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A checked schedule of the configuration."""

    signature: Signature
    arguments: dict[str, Any]
    """Values by the function's names, shares as text; schedules inside are Schedules."""
    key: str
    """Dotted path, relative to the optimizer section."""


def share(value: Any) -> fractions.Fraction | None:
    """The fraction in text such as '2%'; None for anything else, and above 100%."""
    match = SHARE.fullmatch(value) if isinstance(value, str) else None
    part = fractions.Fraction(match[1]) / 100 if match else None
    return part if part is not None and part <= 1 else None


def steps_of(value: int | str, train_steps: int, least: int = 0) -> int:
    """Steps from a whole number, or from a share of the run: `least` or more, and rounded down, so
    that shares never add up to more than the run."""
    part = share(value)
    return int(value) if part is None else max(int(part * train_steps), least)


def wsd(
    count: Any,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    init_value: float = 0.0,
    end_value: float = 0.0,
    shape: Literal["linear", "sqrt", "cosine"] = "linear",
    *,
    total: int,
) -> Any:
    """Warm-up, stable, decay: linear warm-up, then constant, then decay over the last decay_steps
    of total (MiniCPM, Hu et al. 2024, arXiv:2404.06395; shape sqrt is the 1-sqrt decay of Haegele
    et al. 2024, arXiv:2405.18392)."""
    import jax.numpy as jnp

    falling = jnp.clip((total - count) / decay_steps, 0.0, 1.0)
    if shape == "sqrt":
        falling = 1 - jnp.sqrt(1 - falling)
    elif shape == "cosine":
        falling = (1 - jnp.cos(math.pi * falling)) / 2
    warm = init_value + (peak_value - init_value) * count / max(warmup_steps, 1)
    return jnp.where(count < warmup_steps, warm, end_value + (peak_value - end_value) * falling)


def inverse_sqrt(count: Any, peak_value: float, warmup_steps: int, init_value: float = 0.0) -> Any:
    """Linear warm-up, then peak_value * sqrt(warmup_steps / step) (Vaswani et al. 2017,
    arXiv:1706.03762, section 5.3)."""
    import jax.numpy as jnp

    warm = init_value + (peak_value - init_value) * count / warmup_steps
    return jnp.where(
        count < warmup_steps,
        warm,
        peak_value * jnp.sqrt(warmup_steps / jnp.maximum(count, warmup_steps)),
    )


OWN: dict[str, Callable[..., Any]] = {"wsd": wsd, "inverse_sqrt": inverse_sqrt}


def peak_argument(schedule: Signature) -> str:
    """The argument that is the learning rate which the schedule shapes; "" where there is none."""
    peaks = ("peak_value", "value", "init_value")
    return next((name for name in peaks if name in schedule.arguments), "")


def filled(schedule: Signature) -> set[str]:
    """Arguments that need not be given beside the peak: the run's length, and a start at zero
    before a warm-up."""
    start = {"init_value"} if schedule.name.startswith("warmup_") else set()
    return {FILLS_RUN.get(schedule.name, "")} | start


def resolve(
    schedule: Schedule, updates: int, base: float | None, span: int | None = None
) -> dict[str, Any]:
    """Arguments in numbers, for a run of `updates`. `base` is the learning rate that is shaped,
    `span` the updates that this schedule covers in a join."""
    signature, numbers = schedule.signature, dict(schedule.arguments)
    peak = peak_argument(signature)
    if peak and base is not None:
        numbers.setdefault(peak, base)
    whole: Any = numbers.get(peak) if base is None else base
    for name, value in numbers.items():
        sort, part = signature.arguments[name].sort, share(value)
        if sort == "value" and part is not None:
            numbers[name] = float(part * whole)
        elif sort == "steps":
            may_be_zero = name == "transition_begin" or (
                name == "warmup_steps" and signature.name not in WARM_UP_ONLY
            )
            numbers[name] = steps_of(value, updates, 0 if may_be_zero else 1)
        elif sort == "boundaries":
            numbers[name] = [steps_of(step, updates) for step in value]
        elif sort == "scales" and value:
            numbers[name] = {steps_of(step, updates): scale for step, scale in value.items()}
    if "init_value" in filled(signature):
        numbers.setdefault("init_value", 0.0)
    if signature.name in FILLS_RUN:
        begin = numbers.get("transition_begin", 0)
        numbers.setdefault(FILLS_RUN[signature.name], max((span or updates) - begin, 1))
    return numbers


def step_faults(schedule: Schedule, updates: int, span: int | None = None) -> Iterator[Fault]:
    """The first place where steps contradict each other or the length of the run."""
    numbers = resolve(schedule, updates, 1.0, span)
    name = schedule.signature.name
    for key, problem in _contradictions(name, numbers, updates, span or updates):
        yield f"{schedule.key}.{key}", problem
        return
    for inner, covers in _joined(numbers, updates):
        yield from step_faults(inner, updates, covers)


def build_schedule(
    schedule: Schedule, updates: int, base: float | None, span: int | None = None
) -> Callable[[Any], Any]:
    """The function of the update's number that a schedule describes."""
    import optax

    name, numbers = schedule.signature.name, resolve(schedule, updates, base, span)
    if name in OWN:
        total = {"total": span or updates} if name == "wsd" else {}
        return lambda count: OWN[name](count, **numbers, **total)
    if name == "join_schedules":
        numbers["schedules"] = [
            build_schedule(inner, updates, base, covers)
            for inner, covers in _joined(numbers, updates)
        ]
    if name == "sgdr_schedule":
        numbers["cosine_kwargs"] = [
            resolve(cycle, updates, base) for cycle in numbers["cosine_kwargs"]
        ]
    return getattr(optax, name)(**numbers)


def _joined(numbers: dict[str, Any], updates: int) -> Iterator[tuple[Schedule, int]]:
    """The schedules of a join, each with the number of updates that it covers; its own count starts
    at its boundary."""
    edges = [0, *numbers.get("boundaries", []), updates]
    for i, schedule in enumerate(numbers.get("schedules", [])):
        yield schedule, max(edges[i + 1] - edges[i], 1)


def _contradictions(
    schedule: str, numbers: dict[str, Any], updates: int, span: int
) -> Iterator[Fault]:
    warmup, decay = numbers.get("warmup_steps", 0), numbers.get("decay_steps", 0)
    for name in ("decay_steps", "transition_steps"):
        if numbers.get(name, 1) < 1:
            yield name, f"{name}={numbers[name]} must be at least 1"
    if warmup > span:
        yield (
            "warmup_steps",
            f"warmup_steps={warmup} is longer than the {span} steps that the schedule "
            f"has (train.steps={updates}); try 2%",
        )
    if warmup == 0 and schedule in WARM_UP_ONLY:
        yield "warmup_steps", "got 0, but this schedule needs at least 1 step of warm-up"
    if schedule == "wsd" and warmup + decay > span:
        yield (
            "decay_steps",
            f"warmup_steps={warmup} and decay_steps={decay} exceed the {span} steps that "
            "the schedule has; try decay_steps: 20%",
        )
    if schedule == "warmup_cosine_decay_schedule" and warmup >= decay:
        yield (
            "warmup_steps",
            f"warmup_steps={warmup} is not shorter than decay_steps={decay}, which "
            "counts the warm-up too; try warmup_steps: 2%",
        )
    for name in ("boundaries", "boundaries_and_scales"):
        boundaries = list(numbers.get(name) or ())
        if any(after <= before for before, after in itertools.pairwise(boundaries)):
            yield name, f"boundaries {boundaries} must rise"
        if boundaries and not 0 < boundaries[0] <= boundaries[-1] < updates:
            yield (
                name,
                f"boundaries {boundaries} must lie after step 0 and before train.steps={updates}",
            )
    if "schedules" in numbers:
        count, given = len(numbers["schedules"]), len(numbers["boundaries"])
        if count != given + 1:
            yield (
                "boundaries",
                f"{count} schedules need {count - 1} boundaries between them, got {given}",
            )
