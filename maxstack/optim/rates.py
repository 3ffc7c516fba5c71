"""The learning rates that a configuration's schedules give, step by step."""

import math
from collections.abc import Callable
from typing import Any

import pydantic

from maxstack.schema.optimizer import OptimizerConfig, rate_uses, updates_in
from maxstack.schema.optimizer.schedules import build_schedule


def learning_rate_at(cfg: OptimizerConfig, train_steps: int) -> Callable[[Any], Any] | None:
    """The learning rate as a function of the step, for metrics: of the first item that uses
    optimizer.learning_rate, else of the first that takes any; None when no item takes one."""
    uses = sorted(rate_uses(cfg), key=lambda use: not use.base)
    if not uses:
        return None
    rate = uses[0].item.get("learning_rate", cfg.learning_rate)
    found = rate_function(cfg, rate, updates_in(train_steps, uses[0].every), uses[0].fixed)
    return lambda step: found(step // uses[0].every) if callable(found) else found


def rates_at(cfg: OptimizerConfig, train_steps: int, updates: int) -> dict[str, float]:
    """The learning rate of every item that takes one, by the item's key, after so many updates of
    the weights."""
    found = {}
    for use in rate_uses(cfg):
        given = use.item.get("learning_rate", cfg.learning_rate)
        rate = rate_function(cfg, given, updates_in(train_steps, use.every), use.fixed)
        if rate is not None:
            found[use.key] = float(rate(updates // use.every) if callable(rate) else rate)
    return found


def moved_rate(saved: dict[str, Any], cfg: OptimizerConfig, train_steps: int, updates: int) -> str:
    """What the schedules of a saved configuration and of this one say of the next update, "" where
    it is the same."""
    try:
        old = rates_at(
            OptimizerConfig.model_validate(saved["optimizer"]), saved["train"]["steps"], updates
        )
    except (pydantic.ValidationError, KeyError):
        return (
            "the learning rate by the checkpoint's schedule is not known: another version of "
            "maxstack wrote its optimizer"
        )
    for key, now in rates_at(cfg, train_steps, updates).items():
        if key in old and not math.isclose(old[key], now, rel_tol=1e-5, abs_tol=1e-12):
            return (
                f"the learning rate goes on at {now:.4g}; by the checkpoint's schedule it "
                f"would be {old[key]:.4g} (optimizer.{key})"
            )
    return ""


def rate_function(cfg: OptimizerConfig, rate: Any, updates: int, fixed: bool = False) -> Any:
    """A learning rate as Optax takes it: a mapping is a schedule, a number is the peak of
    optimizer.schedule, or constant where there is none."""
    if isinstance(rate, dict):
        return build_schedule(rate, updates, None)
    return (
        rate
        if fixed or rate is None or cfg.schedule is None
        else build_schedule(cfg.schedule, updates, float(rate))
    )
