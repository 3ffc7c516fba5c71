"""Schedules as data: Optax's by their names, two of our own, shares of the run for steps and shares
of the learning rate for values."""

import fractions
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

from maxstack.config import fault
from maxstack.schema.optimizer.names import Argument, Signature, signature

Schedule = Callable[[Any], Any]
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
STEPS = ("warmup_steps", "decay_steps", "transition_steps", "transition_begin")
VALUES = ("value", "init_value", "peak_value", "end_value")
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


def share(value: Any) -> fractions.Fraction | None:
    """The fraction that text like '2%' stands for; None when it is no such text or above 100%."""
    found = SHARE.fullmatch(value) if isinstance(value, str) else None
    part = fractions.Fraction(found[1]) / 100 if found else None
    return part if part is not None and part <= 1 else None


def steps_of(value: int | str, train_steps: int, least: int = 0) -> int:
    """Steps from a whole number, or from a share of the run: rounded down, so that shares never add
    up to more than it, but `least` at least."""
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

    left = jnp.clip((total - count) / decay_steps, 0.0, 1.0)
    falling = {
        "linear": lambda: left,
        "sqrt": lambda: 1 - jnp.sqrt(1 - left),
        "cosine": lambda: (1 - jnp.cos(math.pi * left)) / 2,
    }[shape]()
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


def schedule_signature(kind: str) -> Signature | None:
    """Signature of the schedule that a configuration calls `kind`; what this module fills in has a
    default here."""
    if kind in OWN:
        arguments = [
            parameter
            for parameter in inspect.signature(OWN[kind]).parameters.values()
            if parameter.name not in ("count", "total")
        ]
        found = tuple(
            Argument(
                p.name,
                "keyword",
                getattr(p.annotation, "__name__", "")
                if isinstance(p.annotation, type)
                else str(p.annotation),
                None if p.default is p.empty else repr(p.default),
            )
            for p in arguments
        )
        return Signature(kind, "maxstack", "schedule", found)
    found_signature = signature(ALIASES.get(kind, kind))
    return found_signature if found_signature and found_signature.role == "schedule" else None


def peak_argument(found: Signature) -> str | None:
    """The argument that stands for the learning rate which the schedule shapes."""
    return next((name for name in ("peak_value", "value", "init_value") if name in found), None)


def filled(found: Signature) -> set[str]:
    """Arguments that need not be given beside the peak: the run's length, and a start at zero
    before a warm-up."""
    return {FILLS_RUN.get(found.name, "")} | (
        {"init_value"} if found.name.startswith("warmup_") else set()
    )


def resolve(
    item: dict[str, Any], train_steps: int, base: float | None, span: int | None = None
) -> tuple[Signature, dict[str, Any]]:
    """Signature and arguments in numbers. `base` is the learning rate that is shaped, `span` the
    steps that this schedule covers in a join."""
    found = schedule_signature(item["kind"])
    assert found is not None, item
    span = train_steps if span is None else span
    given = {name: value for name, value in item.items() if name != "kind"}
    peak = peak_argument(found)
    if peak and peak not in given and base is not None:
        given[peak] = base
    whole = base if base is not None else given.get(peak or "")
    for name in given.keys() & set(VALUES):
        part = share(given[name])
        given[name] = (
            float(part * whole)
            if part is not None and isinstance(whole, int | float)
            else given[name]
        )
    for name in given.keys() & set(STEPS):
        may_be_zero = name == "transition_begin" or (
            name == "warmup_steps" and found.name not in WARM_UP_ONLY
        )
        given[name] = steps_of(given[name], train_steps, 0 if may_be_zero else 1)
    if "init_value" in filled(found):
        given.setdefault("init_value", 0.0)
    if found.name in FILLS_RUN:
        given.setdefault(FILLS_RUN[found.name], max(span - given.get("transition_begin", 0), 1))
    if isinstance(given.get("boundaries"), list | tuple):
        given["boundaries"] = [steps_of(value, train_steps) for value in given["boundaries"]]
    if isinstance(given.get("boundaries_and_scales"), dict):
        given["boundaries_and_scales"] = {
            steps_of(step, train_steps): scale
            for step, scale in given["boundaries_and_scales"].items()
        }
    return found, given


def check_steps(item: dict[str, Any], train_steps: int, key: str, span: int | None = None) -> None:
    """Raises a fault where steps contradict each other or the length of the run."""
    found, given = resolve(item, train_steps, 1.0, span)
    for name, problem in _contradictions(
        found.name, given, train_steps, train_steps if span is None else span
    ):
        raise fault(f"{key}.{name}", problem)
    for i, (inner, covers) in enumerate(_parts(given, train_steps)):
        check_steps(inner, train_steps, f"{key}.schedules.{i}", covers)


def build_schedule(
    item: dict[str, Any], train_steps: int, base: float | None, span: int | None = None
) -> Schedule:
    """The function of the step that a checked mapping describes."""
    import optax

    found, given = resolve(item, train_steps, base, span)
    if found.package == "maxstack":
        own = OWN[found.name]
        total = {"total": train_steps if span is None else span} if found.name == "wsd" else {}
        return lambda count: own(count, **given, **total)
    if found.name == "join_schedules":
        given["schedules"] = [
            build_schedule(inner, train_steps, base, covers)
            for inner, covers in _parts(given, train_steps)
        ]
    if found.name == "sgdr_schedule":
        given["cosine_kwargs"] = [
            resolve({"kind": "warmup_cosine", **cycle}, train_steps, base)[1]
            for cycle in given["cosine_kwargs"]
        ]
    return getattr(optax, found.name)(**given)


def _parts(given: dict[str, Any], train_steps: int) -> list[tuple[dict[str, Any], int]]:
    """The joined schedules, each with the number of steps that it covers; its own count starts at
    its boundary."""
    edges = [0, *given.get("boundaries", []), train_steps]
    return [
        (inner, max(edges[i + 1] - edges[i], 1))
        for i, inner in enumerate(given.get("schedules", []))
    ]


def _contradictions(
    kind: str, given: dict[str, Any], train_steps: int, span: int
) -> Iterator[tuple[str, str]]:
    warmup, decay = given.get("warmup_steps", 0), given.get("decay_steps", 0)
    for name in ("decay_steps", "transition_steps"):
        if given.get(name) is not None and given[name] < 1:
            yield name, f"{name}={given[name]} must be at least 1"
    if warmup > span:
        yield (
            "warmup_steps",
            f"warmup_steps={warmup} is longer than the {span} steps that the schedule "
            f"has (train.steps={train_steps}); try 2%",
        )
    if warmup == 0 and kind in WARM_UP_ONLY:
        yield "warmup_steps", "got 0, but this schedule needs at least 1 step of warm-up"
    if kind == "wsd" and warmup + decay > span:
        yield (
            "decay_steps",
            f"warmup_steps={warmup} and decay_steps={decay} exceed the {span} steps that "
            "the schedule has; try decay_steps: 20%",
        )
    if kind == "warmup_cosine_decay_schedule" and warmup >= decay:
        yield (
            "warmup_steps",
            f"warmup_steps={warmup} is not shorter than decay_steps={decay}, which "
            "counts the warm-up too; try warmup_steps: 2%",
        )
    if "boundaries" in given:
        schedules, boundaries = len(given["schedules"]), given["boundaries"]
        yield from _boundary_problems("boundaries", boundaries, train_steps)
        if schedules != len(boundaries) + 1:
            yield (
                "boundaries",
                f"{schedules} schedules need {schedules - 1} boundaries between them, "
                f"got {len(boundaries)}",
            )
    if given.get("boundaries_and_scales"):
        yield from _boundary_problems(
            "boundaries_and_scales", list(given["boundaries_and_scales"]), train_steps
        )


def _boundary_problems(
    name: str, boundaries: list[int], train_steps: int
) -> Iterator[tuple[str, str]]:
    if any(after <= before for before, after in zip(boundaries, boundaries[1:], strict=False)):
        yield name, f"boundaries {boundaries} must rise"
    if boundaries and not 0 < boundaries[0] <= boundaries[-1] < train_steps:
        yield (
            name,
            f"boundaries {boundaries} must lie after step 0 and before train.steps={train_steps}",
        )
