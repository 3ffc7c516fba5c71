"""Cost of training on a number of tokens, at a plan's speed bound and at a given MFU: steps, days,
chip-hours and money."""

import argparse
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from maxstack.errors import ConfigError
from maxstack.hardware.chips import by_kind

if TYPE_CHECKING:
    from maxstack.plan.report import Plan
    from maxstack.plan.topology import Topology

SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclasses.dataclass(frozen=True)
class CostRequest:
    """Values of --tokens, --mfu and --price."""

    tokens: int
    mfu: float | None
    """Causal, as training measures it: a share of the chips' dense bfloat16 peak."""
    price: float | None
    """Price of an hour of one chip, in any currency."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """A whole run at one speed."""

    steps: int
    days: float
    chip_hours: float
    price: float | None


def request(args: argparse.Namespace) -> CostRequest | None:
    """Parse the request in a command's arguments; None without --tokens."""
    if args.tokens is None:
        for option, value in (("--mfu", args.mfu), ("--price", args.price)):
            if value is not None:
                raise ConfigError(
                    f"{option} {value}: needs --tokens, as in --tokens 15T {option} {value}"
                )
        return None
    # float() alone would take 1_000, nan and infinity too.
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", args.tokens)
    tokens = round(float(number[1]) * SUFFIXES[number[2]]) if number else 0
    if tokens < 1:
        raise ConfigError(
            f"--tokens {args.tokens}: is not a number of tokens; give 1 or more, with K, M, B or T "
            "for "
            "thousands to trillions, such as 15T"
        )
    return CostRequest(
        tokens,
        _number("--mfu", args.mfu, 1.0, "a share of the peak between 0 and 1, such as 0.4"),
        _number("--price", args.price, math.inf, "the price of a chip-hour, above 0, such as 2.5"),
    )


def check_chip(asked: CostRequest | None, where: "Topology") -> None:
    """ConfigError if a cost is asked for on a device that chips.yml does not have."""
    if asked and where.chip is None:
        raise ConfigError(
            f"--tokens {asked.tokens}: needs a speed bound, and this device has no figures in "
            "chips.yml; give --topology, such as --topology v5p:8x8x8"
        )


def _number(option: str, text: str | None, most: float, meaning: str) -> float | None:
    if text is None:
        return None
    value = float(text) if re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", text) else 0.0
    if not 0 < value <= most or math.isinf(value):
        raise ConfigError(f"{option} {text}: must be {meaning}")
    return value


def costs(plan: "Plan", asked: CostRequest) -> dict[str, Cost]:
    """Return `bound`, the least that the tokens cost, and `mfu`, their cost at that MFU if the
    bound allows it. Empty for a plan without a bound."""
    rate = plan.tokens_per_second
    bound = plan.mfu()
    if not rate:
        return {}
    rows = {"bound": _cost(plan, asked, rate)}
    if asked.mfu and bound and asked.mfu <= bound:
        # FLOPs per token are fixed, so speed is proportional to MFU.
        rows["mfu"] = _cost(plan, asked, rate * asked.mfu / bound)
    return rows


def _cost(plan: "Plan", asked: CostRequest, rate: float) -> Cost:
    """Compute the cost of whole steps at `rate` tokens/s of all devices."""
    chip = by_kind(plan.chip)
    # Chips are paid, devices compute: chips of two devices must not be paid twice.
    chips = plan.devices / (chip.devices if chip else 1)
    # A part of a step is a whole step, and whole steps take the time.
    steps = math.ceil(asked.tokens / plan.tokens)
    seconds = steps * plan.tokens / rate
    hours = chips * seconds / 3600
    return Cost(steps, seconds / 86400, hours, asked.price and hours * asked.price)


def lines(plan: "Plan", asked: CostRequest) -> Iterator[str]:
    """Yield the lines of the screen."""
    rows = costs(plan, asked)
    if not rows:
        yield f"{asked.tokens:,} tokens: the step does not fit, so there is no speed bound to use"
        return
    yield f"{asked.tokens:,} tokens are {rows['bound'].steps:,} steps"
    yield f"at the speed bound, which real runs do not reach: at least {_words(rows['bound'])}"
    if asked.mfu:
        beyond = f"impossible, the bound is {plan.mfu():.1%}"
        words = _words(rows["mfu"]) if "mfu" in rows else beyond
        yield f"at an MFU of {asked.mfu:.1%} causal: {words}"


def _words(cost: Cost) -> str:
    money = "" if cost.price is None else f", {_amount(cost.price)} in the currency of --price"
    return f"{_amount(cost.days)} days, {_amount(cost.chip_hours)} chip-hours{money}"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def json(plan: "Plan", asked: CostRequest | None) -> dict[str, Any]:
    """Return the key `cost` of the plan's JSON; empty without --tokens."""
    if asked is None:
        return {}
    rows = {name: dataclasses.asdict(cost) for name, cost in costs(plan, asked).items()}
    return {"cost": dataclasses.asdict(asked) | rows}
