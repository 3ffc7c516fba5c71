"""Rows applied to one model: which tensor of a file holds which weight of ours, with the sizes of
all axes."""

import dataclasses
from collections.abc import Iterator, Mapping

from maxstack.hf.family import Family
from maxstack.hf.rows import Part, Row, Shape, named
from maxstack.schema.decoder import DecoderConfig

GLOBAL = ""


@dataclasses.dataclass(frozen=True)
class Target:
    """A part of a tensor in our weights."""

    part: Part
    path: str
    lead: tuple[int, ...]
    """Indices into our leading dimensions: the repetition of the pattern, the expert."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """A tensor of a file and our weights that it holds."""

    name: str
    row: Row
    sizes: Mapping[str, int]
    targets: tuple[Target, ...]
    experts: int | None
    """Length of the tensor's first dimension where that is the experts; their index is then the
    last of the lead, and left out of it."""

    @property
    def shape(self) -> Shape:
        """The tensor's."""
        return (() if self.experts is None else (self.experts,)) + self.row.shape(self.sizes)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A block of ours: its path, its repetition if it is stacked, and its name in a file."""

    path: str
    lead: tuple[int, ...]
    name: str


def bind(family: Family, model: DecoderConfig, shapes: Mapping[str, Shape]) -> list[Bound]:
    """Every tensor of the model. ValueError where a weight of ours is in no row: the family cannot
    hold this model."""
    bound = [found for row in family.rows for found in _of_row(row, family, model, shapes)]
    held: dict[str, int] = {}
    for tensor in bound:
        for target in () if tensor.row.copy else tensor.targets:
            held[target.path] = held.get(target.path, 0) + (tensor.experts or 1)
    for path, shape in shapes.items():
        lead = _leading(path, shape, bound)
        if held.get(path, 0) != lead:
            raise ValueError(
                f"{family.architecture} has "
                f"{'no' if path not in held else f'{held[path]} of {lead}'} tensors for "
                f"{path} {list(shape)}"
            )
    return bound


def _leading(path: str, shape: Shape, bound: list[Bound]) -> int:
    """How many tensors, or parts of one, a weight of ours comes in."""
    for tensor in bound:
        for target in tensor.targets:
            if target.path == path:
                size = 1
                for n in shape[: len(target.lead) + (tensor.experts is not None)]:
                    size *= n
                return size
    return 1


def _of_row(
    row: Row, family: Family, model: DecoderConfig, shapes: Mapping[str, Shape]
) -> Iterator[Bound]:
    for place in _places(row, family, model):
        paths = [place.path + part.path for part in row.parts]
        skip = len(place.lead) + row.experts
        present = [
            path
            for path, part in zip(paths, row.parts, strict=True)
            if path in shapes and len(shapes[path]) == skip + part.dims
        ]
        if not present or any(place.path + hint.path not in shapes for hint in row.hints):
            continue
        if len(present) < len(paths):
            raise ValueError(
                f"{row.name} holds {', '.join(paths)}, but the model has only {', '.join(present)}"
            )
        inner = {part.path: shapes[place.path + part.path][skip:] for part in row.parts}
        inner |= {
            hint.path: shapes[place.path + hint.path][len(place.lead) :] for hint in row.hints
        }
        sizes = row.sizes(inner)
        count = shapes[paths[0]][len(place.lead)] if row.experts else None
        for expert in range(count) if count is not None and not row.indexed else (None,):
            lead = place.lead if expert is None else (*place.lead, expert)
            targets = tuple(
                Target(part, path, lead) for part, path in zip(row.parts, paths, strict=True)
            )
            yield Bound(
                named(row, place.name, expert), row, sizes, targets, count if row.indexed else None
            )


def _places(row: Row, family: Family, model: DecoderConfig) -> Iterator[_Place]:
    depth = model.mtp.depth if model.mtp and family.further else 0
    further = [
        family.further.format(model.layers + i if family.further_after else i) for i in range(depth)
    ]
    if "{further}" in row.name:
        for i, name in enumerate(further):
            yield _Place("" if row.copy else f"mtp/{i}/", (), name)
    elif "{layer}" not in row.name:
        yield _Place(GLOBAL, (), "")
    else:
        for layer in range(model.layers):
            path, lead = location(model, layer)
            yield _Place(f"{path}/", lead, family.layer.format(layer))
        yield from (_Place(f"mtp/{i}/block/", (), name) for i, name in enumerate(further))


def location(model: DecoderConfig, layer: int) -> tuple[str, tuple[int, ...]]:
    """The path of a layer's block, and its repetition where it is one of a stack."""
    first, period = len(model.prefix), model.period
    if layer < first:
        return f"prefix/{layer}", ()
    repeats, at = (model.layers - first) // len(period), layer - first
    if at >= repeats * len(period):
        return f"rest/{at - repeats * len(period)}", ()
    name = period[at % len(period)]
    key = name if period.count(name) == 1 else f"{name}_{period[: at % len(period)].count(name)}"
    return f"blocks/{key}", (at // len(period),)
