"""Rows: a tensor of a file and the weights of ours that it holds, with the layout of both; and what
follows from a row, both ways.

A row is `NAME | OURS | LAYOUT`. In NAME, {layer} is a block's name, {e} an expert's number, and [e]
at the end an index into the tensor's first dimension; our weight then has a leading dimension of
experts. OURS is a path, within the block where NAME has {layer}. LAYOUT is `THEIRS -> OURS` in
einops' language, or one of the two where they are the same. Where a tensor holds several weights,
OURS lists them as `PATH: AXES`, and LAYOUT has a + where each one's axes stand, one weight after
the other; `PATH: AXES -> LAYOUT` gives a weight its own layout of ours. A path in parentheses,
`(PATH: AXES)`, is no part: the row is only for blocks that have it, and it tells the sizes of axes.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import einops
import numpy as np

Axes = tuple[str | tuple[str, ...], ...]
Shape = tuple[int, ...]


class Part(NamedTuple):
    """A weight of ours in a tensor."""

    path: str
    axes: str
    """What stands for + in the layout."""
    ours: str
    """Layout of the weight."""

    @property
    def dims(self) -> int:
        """Dimensions of the weight."""
        return len(_parse(self.ours))


@dataclasses.dataclass(frozen=True)
class Row:
    """A tensor and its parts; see the module."""

    name: str
    parts: tuple[Part, ...]
    theirs: str
    """Layout of the tensor, or of one expert's part of it."""
    hints: tuple[Part, ...] = ()
    """Weights that a block must have for the row to apply, and that tell sizes."""
    copy: bool = False
    """Another tensor holds the same; a file may leave it out."""
    axes: tuple[str, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "axes", tuple(self.theirs.replace("(", " ").replace(")", " ").split())
        )

    @property
    def experts(self) -> bool:
        """Whether our weights have a leading dimension of experts."""
        return "{e}" in self.name or self.indexed

    @property
    def indexed(self) -> bool:
        """Whether all experts are in one tensor, along its first dimension."""
        return self.name.endswith("[e]")

    def sizes(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """The size of every axis, by the shapes of our weights without leading dimensions;
        ValueError where they contradict the row."""
        known: dict[str, int] = {"1": 1}
        fits = [
            (_parse(part.ours), _fit(part, shapes[part.path]))
            for part in (*self.parts, *self.hints)
        ]
        pairs = [
            (axis, size) for axes, shape in fits for axis, size in zip(axes, shape, strict=True)
        ]
        for axis, size in sorted(pairs, key=lambda pair: isinstance(pair[0], tuple)):
            if isinstance(axis, tuple):
                unknown = [name for name in axis if name not in known]
                rest = math.prod(known[name] for name in axis if name in known)
                if len(unknown) > 1 or size % rest:
                    raise ValueError(f"{self.name}: {axis} of {size} does not divide")
                known |= {name: size // rest for name in unknown}
            elif known.setdefault(axis, size) != size:
                raise ValueError(f"{self.name}: axis {axis} is both {known[axis]} and {size}")
        return known

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        """Of the tensor, or of one expert's part."""
        known = {**sizes, "+": sum(self._widths(sizes))}
        return tuple(
            math.prod(known[name] for name in (axis if isinstance(axis, tuple) else (axis,)))
            for axis in _parse(self.theirs)
        )

    def ours(self, part: Part, tensor: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """The part of a tensor in our layout: a view where both layouts are made of the same
        axes."""
        inner = " ".join(self.axes).replace("+", _joined(part.axes))
        return einops.rearrange(
            self._cut(part, tensor, sizes), f"{inner} -> {part.ours}", **_used(sizes, inner)
        )

    def place(
        self, part: Part, weight: np.ndarray, tensor: np.ndarray, sizes: Mapping[str, int]
    ) -> None:
        """Write a weight of ours into its part of a tensor."""
        inner = " ".join(self.axes).replace("+", _joined(part.axes))
        view = self._cut(part, tensor, sizes)
        assert np.shares_memory(view, tensor)
        view[...] = einops.rearrange(
            weight, f"{part.ours} -> {inner}", **_used(sizes, part.ours + " " + inner)
        )

    def _cut(self, part: Part, tensor: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        widths = self._widths(sizes)
        outer, flat = self.theirs.replace("+", "plus"), " ".join(self.axes).replace("+", "plus")
        view = einops.rearrange(
            tensor, f"{outer} -> {flat}", **_used({**sizes, "plus": sum(widths)}, flat)
        )
        if "+" not in self.axes:
            return view
        place = self.parts.index(part)
        begin = sum(widths[:place])
        return view[(slice(None),) * self.axes.index("+") + (slice(begin, begin + widths[place]),)]

    def _widths(self, sizes: Mapping[str, int]) -> list[int]:
        return [math.prod(sizes[name] for name in part.axes.split()) for part in self.parts]


def rows(text: str) -> tuple[Row, ...]:
    """The rows of a table, one a line; `copy` as a fourth column marks a tensor that another one
    holds too."""
    return tuple(_row(line) for line in text.strip().splitlines())


def only(where: str, table: tuple[Row, ...]) -> tuple[Row, ...]:
    """Rows for those blocks alone that have the weight `PATH: AXES`."""
    path, _, axes = (side.strip() for side in where.partition(":"))
    return tuple(
        dataclasses.replace(row, hints=(*row.hints, Part(path, "", axes))) for row in table
    )


def named(row: Row, layer: str, expert: int | None = None) -> str:
    """The tensor's name for a block and an expert."""
    return (
        row.name.removesuffix("[e]")
        .replace("{layer}", layer)
        .replace("{further}", layer)
        .replace("{e}", str(expert))
    )


def _row(line: str) -> Row:
    name, ours, layout, *more = (column.strip() for column in line.split("|"))
    theirs, _, default = (side.strip() for side in layout.partition("->"))
    if "->" not in layout:
        default = theirs
    parts, hints = [], []
    for item in (item.strip() for item in ours.split(",")):
        path, _, rest = (side.strip() for side in item.removeprefix("(").partition(":"))
        axes, _, own = (side.strip() for side in rest.partition("->"))
        if item.startswith("("):
            hints.append(Part(path, "", axes.removesuffix(")")))
        else:
            parts.append(
                Part(path, axes or "1", own or default.replace("+", "" if axes == "1" else axes))
            )
    return Row(name, tuple(parts), theirs, tuple(hints), more == ["copy"])


def axes_in(layout: str) -> list[tuple[str, ...]]:
    """The names of the axes in each dimension of a layout."""
    return [axis if isinstance(axis, tuple) else (axis,) for axis in _parse(layout)]


def _parse(layout: str) -> Axes:
    return tuple(
        tuple(group.split()) if group else atom
        for group, atom in re.findall(r"\(([^)]*)\)|(\S+)", layout)
    )


def _fit(part: Part, shape: Shape) -> Sequence[int]:
    if len(_parse(part.ours)) != len(shape):
        raise ValueError(f"{part.path}: shape {shape} does not fit layout {part.ours!r}")
    return shape


def _joined(axes: str) -> str:
    return f"({axes})" if " " in axes else axes


def _used(sizes: Mapping[str, int], pattern: str) -> dict[str, int]:
    words = {*pattern.replace("(", " ").replace(")", " ").replace("->", " ").split()}
    return {name: sizes[name] for name in words if name in sizes and name.isidentifier()}
