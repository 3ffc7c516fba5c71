"""The configuration of the mixture of sources."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from maxstack.config import Fault, Items, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from maxstack.errors import quoted

Point = Annotated[tuple[PositiveInt, NonNegativeFloat], Field(strict=False)]
_POINT = TypeAdapter(Point)


def _checked(weight: Any) -> Any:
    """Validate a weight. ValueError names the first entry of a list that is not a point."""
    for point in weight if isinstance(weight, list | tuple) else ():
        try:
            _POINT.validate_python(point)
        except ValidationError:
            raise ValueError(
                f"{quoted(point)} is not a point [step, weight], with a step from 1 and a weight "
                "from 0, as in weight: [[1, 0], [100, 1.5]]"
            ) from None
    return weight


Weight = Annotated[NonNegativeFloat | Items[Point], BeforeValidator(_checked)]
"""A number, or the points of a piecewise linear schedule over steps."""


def weight_at(weight: float | Sequence[Point], step: int) -> float:
    """The weight of a source at a step, from 1: interpolated between two points, constant before
    the first and after the last."""
    if not isinstance(weight, Sequence):
        return weight
    after = bisect.bisect_right(weight, step, key=lambda point: point[0])
    if after in (0, len(weight)):
        return weight[min(after, len(weight) - 1)][1]
    (begin, low), (end, high) = weight[after - 1 : after + 1]
    return low + (high - low) * (step - begin) / (end - begin)


def weight_faults(weights: Sequence[float | Sequence[Point]]) -> Iterator[Fault]:
    """Faults of the weights of all sources."""
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
    """Faults of the names of sources, by which checkpoints keep positions in them."""
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"sources.{index}.name", f"{name} names an earlier source too; choose another"


class UniMaxConfig(Section):
    """Equal shares, limited to a number of epochs of each source; larger sources share the rest
    (Chung et al. 2023, arXiv:2304.09151)."""

    epochs: PositiveFloat = 1.0
    """Maximum number of passes over a source."""
    budget: PositiveInt
    """Length of the whole training in tokens, or in documents with `by: documents`."""


class MixtureConfig(Section):
    """How the weights of data.sources are interpreted."""

    by: Literal["documents", "tokens"] = "documents"
    """Unit of the shares: documents or tokens."""
    temperature: PositiveFloat | None = None
    """Multiply each weight by the source's size to the power of 1/temperature (Arivazhagan et al.
    2019, arXiv:1907.05019): 1 is proportional to sizes, higher is closer to equal shares. null: use
    the weights as given."""
    unimax: UniMaxConfig | None = None
    """Multiply each weight by the source's UniMax share; null: use the weights as given."""

    def own_faults(self) -> Iterator[Fault]:
        if self.temperature and self.unimax:
            yield "unimax", "is another way to weigh sizes than temperature; leave one of them out"


class FillInTheMiddleConfig(Section):
    """Documents reordered as beginning, end, middle, so that a model learns infilling (Bavarian et
    al. 2022, arXiv:2207.14255). They are cut at two random characters, or at two tokens where they
    are stored as tokens, differently in each epoch. Held-out documents are not changed."""

    rate: float = Field(0.5, ge=0, le=1)
    """Fraction of the documents to reorder."""
    spm: float = Field(0.5, ge=0, le=1)
    """Fraction of these in the order end, beginning, middle (SPM), with beginning and middle as one
    text."""
    prefix: str = "<|fim_prefix|>"
    """Token before the beginning, as text."""
    middle: str = "<|fim_middle|>"
    """Token before the middle, as text."""
    suffix: str = "<|fim_suffix|>"
    """Token before the end, as text."""
