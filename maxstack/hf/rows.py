"""Rows: each describes a tensor of a file and our weights in it, and converts both ways.

A row is `NAME | OURS | LAYOUT`. In NAME, {layer} is a block's name, {e} an expert's number, and [e]
at the end an index into the tensor's first dimension; our weight then has a leading dimension of
experts. OURS is a path, within the block where NAME has {layer}. LAYOUT is `THEIRS -> OURS` in
einops' language, or one of the two where they are the same. Where a tensor holds several weights,
OURS lists them as `PATH: AXES`, and LAYOUT has a + where each one's axes stand, one weight after
the other; `PATH: AXES -> LAYOUT` gives a weight its own layout of ours.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import einops
import numpy as np

Shape = tuple[int, ...]


class Part(NamedTuple):
    """A weight of ours in a tensor."""

    path: str
    axes: str
    """Replaces + in the layout."""
    ours: str
    """Layout of the weight."""

    @property
    def dims(self) -> int:
        """Dimensions of the weight."""
        return len(axes_in(self.ours))


@dataclasses.dataclass(frozen=True)
class Row:
    """A tensor and its parts; see the module."""

    name: str
    parts: tuple[Part, ...]
    theirs: str
    """Layout of the tensor, or of one expert's part of it."""
    hints: tuple[Part, ...] = ()
    """Weights that a block must have for the row to apply; they give sizes too."""
    absent: tuple[str, ...] = ()
    """Weights that a block must not have for the row to apply."""
    copy: bool = False
    """Another tensor holds the same; a file may leave it out."""

    @property
    def paths(self) -> set[str]:
        """Paths of the parts."""
        return {part.path for part in self.parts}

    @property
    def axes(self) -> list[str]:
        """The tensor's axes without grouping."""
        return [*itertools.chain(*axes_in(self.theirs))]

    @property
    def inputs_first(self) -> bool:
        """True where their matrix begins with the inputs, as ours do; torch's modules are [outputs,
        inputs]."""
        return axes_in(self.theirs)[0][0] == axes_in(self.parts[0].ours)[0][0]

    @property
    def experts(self) -> bool:
        """True where our weights have a leading dimension of experts."""
        return "{e}" in self.name or self.indexed

    @property
    def indexed(self) -> bool:
        """True where all experts are in one tensor, along its first dimension."""
        return self.name.endswith("[e]")

    def tensor_name(self, layer: str, expert: int | None = None) -> str:
        """Return the tensor's name for a block and an expert."""
        name = self.name.removesuffix("[e]").replace("{e}", str(expert))
        return name.replace("{layer}", layer).replace("{further}", layer)

    def sizes(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """Return the size of every axis, by the shapes of our weights without leading dimensions.
        ValueError where they contradict the row."""
        sizes = {"1": 1}
        pairs: list[tuple[tuple[str, ...], int]] = []
        for part in (*self.parts, *self.hints):
            # Sizes come from our weights: the file's shapes are checked against the result.
            pairs += zip(axes_in(part.ours), shapes[part.path], strict=True)
        # Dimensions of a single axis come first: they give the sizes by which grouped ones are
        # divided.
        for names, size in sorted(pairs, key=lambda pair: len(pair[0])):
            unknown = [name for name in names if name not in sizes]
            product = math.prod(sizes.get(name, 1) for name in names)
            if len(unknown) > 1 or size % product or (not unknown and size != product):
                raise ValueError(f"{self.name}: {names} of {size} contradicts {sizes}")
            sizes |= dict.fromkeys(unknown, size // product)
        return sizes

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        """Return the shape of the tensor, or of one expert's part."""
        # The parts lie one after the other along +.
        size_of = {**sizes, "+": sum(self._widths(sizes))}.__getitem__
        return tuple(math.prod(map(size_of, names)) for names in axes_in(self.theirs))

    def ours(self, part: Part, tensor: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Return a part of a tensor in our layout; a view where possible."""
        # A transposition stays a view, so that only the shard that is wanted is read from the file.
        layout = f"{self._layout(part)} -> {part.ours}"
        return einops.rearrange(self._cut(part, tensor, sizes), layout, **_used(sizes, layout))

    def write(
        self, part: Part, weight: np.ndarray, tensor: np.ndarray, sizes: Mapping[str, int]
    ) -> None:
        """Write a weight of ours into its part of a tensor."""
        layout = f"{part.ours} -> {self._layout(part)}"
        view = self._cut(part, tensor, sizes)
        # Reshaping an array that is not contiguous copies it, and the weight would be written
        # nowhere.
        assert np.shares_memory(view, tensor)
        view[...] = einops.rearrange(weight, layout, **_used(sizes, layout))

    def _layout(self, part: Part) -> str:
        """Return the layout of a part as `_cut` gives it."""
        return " ".join(self.axes).replace("+", f"({part.axes})")

    def _cut(self, part: Part, tensor: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Return a view of a part, with a dimension for each axis."""
        widths = self._widths(sizes)
        # By reshape and split: einops has no layout for parts of unequal widths.
        whole = tensor.reshape([sizes.get(axis, sum(widths)) for axis in self.axes])
        if "+" not in self.axes:
            return whole
        views = np.split(whole, np.cumsum(widths[:-1]), axis=self.axes.index("+"))
        return views[self.parts.index(part)]

    def _widths(self, sizes: Mapping[str, int]) -> list[int]:
        return [math.prod(map(sizes.__getitem__, part.axes.split())) for part in self.parts]


def rows(text: str) -> tuple[Row, ...]:
    """Return the rows of a table, one in each line; `copy` as a fourth column marks a tensor that
    repeats another one."""
    return tuple(_row(line) for line in text.splitlines() if line.strip())


def modules(text: str) -> tuple[Row, ...]:
    """Return the rows of modules with a weight and a bias: `NAME | OURS | LAYOUT` of the weight;
    for a norm LAYOUT is one axis."""
    table = ""
    for line in filter(str.strip, text.splitlines()):
        name, ours, layout = (column.strip() for column in line.split("|"))
        if "->" in layout:
            # A bias has the axes of the outputs, the first dimension of a weight in torch.
            (out,) = re.findall(r"^(?:\([^)]*\)|\S+)", layout)
            biases = re.sub(r"[\w/]+(?=:|$)", r"\g<0>_bias", ours)
            weight, bias = f"{ours} | {layout}", f"{biases} | {out} -> {out.strip('()')}"
        else:
            weight, bias = f"{ours}/scale | {layout}", f"{ours}/bias | {layout}"
        table += f"{name}.weight | {weight}\n{name}.bias | {bias}\n"
    return rows(table)


def only(where: str, table: tuple[Row, ...]) -> tuple[Row, ...]:
    """Limit rows to blocks that have the weight `PATH: AXES`."""
    path, axes = where.split(": ")
    return tuple(
        dataclasses.replace(row, hints=(*row.hints, Part(path, "", axes))) for row in table
    )


def without(path: str, table: tuple[Row, ...]) -> tuple[Row, ...]:
    """Limit rows to blocks that do not have the weight at `path`."""
    return tuple(dataclasses.replace(row, absent=(*row.absent, path)) for row in table)


@functools.cache
def axes_in(layout: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of the axes in each dimension of a layout."""
    dimensions = re.findall(r"\(([^)]*)\)|(\S+)", layout)
    return tuple(tuple((group or atom).split()) for group, atom in dimensions)


def _row(line: str) -> Row:
    name, weights, layout, *more = (column.strip() for column in line.split("|"))
    theirs, arrow, ours = (side.strip() for side in layout.partition("->"))
    ours = ours if arrow else theirs
    parts = []
    for weight in weights.split(","):
        path, _, rest = (side.strip() for side in weight.partition(":"))
        axes, _, own = (side.strip() for side in rest.partition("->"))
        # A part one wide (gate and up in turn) has no axis in our layout.
        parts.append(Part(path, axes or "1", own or ours.replace("+", "" if axes == "1" else axes)))
    return Row(name, tuple(parts), theirs, copy=more == ["copy"])


def _used(sizes: Mapping[str, int], layout: str) -> dict[str, int]:
    """Return the sizes of the axes in a layout, as einops wants them."""
    # einops refuses the size of an axis that the layout lacks.
    return {name: sizes[name] for name in re.findall(r"[a-z]\w*", layout) if name in sizes}
