"""How sources are mixed, as a configuration says it."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from maxstack.config import Fault, Items, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from maxstack.errors import quoted

Point = Annotated[tuple[PositiveInt, NonNegativeFloat], Field(strict=False)]
_POINT = TypeAdapter(Point)


def _checked(weight: Any) -> Any:
    """ValueError, which names the first entry of a list that is no point."""
    for point in weight if isinstance(weight, list | tuple) else ():
        try:
            _POINT.validate_python(point)
        except ValidationError:
            raise ValueError(
                f"{quoted(point)} is no point [step, weight], with a step from 1 and a weight from "
                "0, as in weight: [[1, 0], [100, 1.5]]"
            ) from None
    return weight


Weight = Annotated[NonNegativeFloat | Items[Point], BeforeValidator(_checked)]
"""A number, or the points of a line over steps."""


def weight_at(weight: float | Sequence[Point], step: int) -> float:
    """The weight of a source in the batch of a step, from 1: on the straight line between two
    points, and that of the first or last point before and after them."""
    if not isinstance(weight, Sequence):
        return weight
    after = bisect.bisect_right(weight, step, key=lambda point: point[0])
    if after in (0, len(weight)):
        return weight[min(after, len(weight) - 1)][1]
    (begin, low), (end, high) = weight[after - 1 : after + 1]
    return low + (high - low) * (step - begin) / (end - begin)


def weight_faults(weights: Sequence[float | Sequence[Point]]) -> Iterator[Fault]:
    """What is wrong with the weights of all sources."""
    steps = {1}
    for index, weight in enumerate(weights):
        if not isinstance(weight, Sequence):
            continue
        own = [step for step, _ in weight]
        steps |= {*own, *(step - 1 for step in own if step > 1)}
        if not own or own != sorted({*own}):
            yield f"sources.{index}.weight", "must have points [step, weight] in the order of steps"
            return
    for step in sorted(steps):
        if not sum(weight_at(weight, step) for weight in weights):
            yield "sources", f"no source has a weight above 0 at step {step}; give one of them some"
            return


def name_faults(names: Sequence[str]) -> Iterator[Fault]:
    """What is wrong with the names of sources, by which positions in them are kept."""
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"sources.{index}.name", f"{name} names an earlier source too; choose another"


class UniMaxConfig(Section):
    """Equal shares, but of no source more than some epochs; what it cannot give, the larger ones
    share (Chung et al. 2023, arXiv:2304.09151)."""

    epochs: PositiveFloat = 1.0
    """Passes over a source at the most."""
    budget: PositiveInt
    """Tokens of the whole training, or with `by: documents` documents."""


class MixtureConfig(Section):
    """How the weights of data.sources count."""

    by: Literal["documents", "tokens"] = "documents"
    """What the weights are shares of: documents, or tokens."""
    temperature: PositiveFloat | None = None
    """Multiply each weight by the source's size to the power of 1/temperature (Arivazhagan et al.
    2019, arXiv:1907.05019): 1 is in proportion to sizes, and more is nearer to equal shares. null:
    weights are as they are given."""
    unimax: UniMaxConfig | None = None
    """Multiply each weight by the share that UniMax gives the source; null: weights are as they are
    given."""

    def own_faults(self) -> Iterator[Fault]:
        if self.temperature and self.unimax:
            yield "unimax", "is another way to weigh sizes than temperature; leave one of them out"


class FillInTheMiddleConfig(Section):
    """Documents in the order beginning, end, middle, so that a model learns to fill in (Bavarian et
    al. 2022, arXiv:2207.14255). They are cut at two characters, or where they are stored as tokens
    at two tokens, drawn anew in each epoch. Held-out documents stay as they are."""

    rate: float = Field(0.5, ge=0, le=1)
    """Share of the documents that are cut."""
    spm: float = Field(0.5, ge=0, le=1)
    """Share of these that are written end, beginning, middle, the latter two as one text."""
    prefix: str = "<|fim_prefix|>"
    """Token, by its text, before the beginning."""
    middle: str = "<|fim_middle|>"
    """Token before the middle."""
    suffix: str = "<|fim_suffix|>"
    """Token before the end."""
