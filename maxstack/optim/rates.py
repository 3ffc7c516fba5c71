"""The learning rates of a configuration's schedules: for metrics, for Optax's items, and to report
a rate that a resumed run changes."""

import math
from collections.abc import Callable
from typing import Any

import pydantic

from maxstack.schema.optimizer import Optimizer, OptimizerConfig, updates_in
from maxstack.schema.optimizer.arguments import Transform
from maxstack.schema.optimizer.schedules import Schedule, build_schedule


def learning_rate_at(cfg: OptimizerConfig, train_steps: int) -> Callable[[Any], Any] | None:
    """The learning rate as a function of the step, for metrics: of the first item that uses
    optimizer.learning_rate, else of the first that takes any; None where no item takes one."""
    # False sorts first: items without a rate of their own use the shared one.
    items = sorted(cfg.parsed.rated(), key=lambda item: "learning_rate" in item.arguments)
    if not items:
        return None
    every, rate = items[0].every, item_rate(cfg.parsed, items[0], train_steps)
    # An item inside MultiSteps sees one update in `every` steps.
    return lambda step: rate(step // every) if callable(rate) else rate


def rates_at(cfg: OptimizerConfig, train_steps: int, updates: int) -> dict[str, float]:
    """The learning rate of every item that takes one, by the item's key, after so many updates of
    the weights."""
    rates = {}
    for item in cfg.parsed.rated():
        rate = item_rate(cfg.parsed, item, train_steps)
        if rate is not None:
            rates[item.key] = float(rate(updates // item.every) if callable(rate) else rate)
    return rates


def describe_rate_change(
    saved: dict[str, Any], cfg: OptimizerConfig, train_steps: int, updates: int
) -> str:
    """A sentence on the next update's learning rate if it differs from that of a saved
    configuration, else ""."""
    try:
        old = rates_at(
            OptimizerConfig.model_validate(saved["optimizer"]), saved["train"]["steps"], updates
        )
    # A checkpoint of another version may name what this
    # one does not know; that is no reason to refuse it.
    except (pydantic.ValidationError, KeyError):
        return (
            "the learning rate by the checkpoint's schedule is not known: another version of "
            "maxstack wrote its optimizer"
        )
    for key, rate in rates_at(cfg, train_steps, updates).items():
        if key in old and not math.isclose(old[key], rate, rel_tol=1e-5, abs_tol=1e-12):
            return (
                f"the learning rate continues at {rate:.4g}; by the checkpoint's schedule it "
                f"would be {old[key]:.4g} (optimizer.{key})"
            )
    return ""


def item_rate(optimizer: Optimizer, item: Transform, train_steps: int) -> Any:
    """The learning rate of an item, its own or the shared one, as Optax takes it."""
    rate = item.arguments.get("learning_rate", optimizer.learning_rate)
    if item.constant_rate:
        return rate
    return scheduled_rate(optimizer, rate, updates_in(train_steps, item.every))


def scheduled_rate(optimizer: Optimizer, rate: Any, updates: int) -> Any:
    """A learning rate as Optax takes it: a number is the peak of optimizer.schedule, or constant
    where there is none."""
    if isinstance(rate, Schedule):
        return build_schedule(rate, updates, None)
    if rate is None or optimizer.schedule is None:
        return rate
    return build_schedule(optimizer.schedule, updates, float(rate))
