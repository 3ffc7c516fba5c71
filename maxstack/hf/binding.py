"""Rows applied to one model: which tensor of a file holds which weight of ours, with the sizes of
all axes.

A row stands for one tensor a block. It applies where a block has the row's weights; a block without
any of them (another kind of mixer) has no such tensor. Afterwards every weight must be in exactly
one tensor, or the family cannot hold the model.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from maxstack.hf.family import Family
from maxstack.hf.rows import Part, Row, Shape
from maxstack.schema.stack import StackConfig


@dataclasses.dataclass(frozen=True)
class Target:
    """A part of a tensor in our weights."""

    part: Part
    path: str
    lead: tuple[int, ...]
    """Indices into our leading dimensions: the repetition of the pattern, the expert."""


@dataclasses.dataclass(frozen=True)
class BoundTensor:
    """A tensor of a file, and our weights in it."""

    name: str
    row: Row
    sizes: Mapping[str, int]
    targets: tuple[Target, ...]
    experts: int | None
    """Length of the tensor's first dimension where that is the experts; `lead` then lacks the
    expert's index."""

    @property
    def paths(self) -> set[str]:
        """Paths of our weights in it."""
        return {target.path for target in self.targets}

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        return (() if self.experts is None else (self.experts,)) + self.row.shape(self.sizes)


class _Block(NamedTuple):
    """A block of ours."""

    path: str
    lead: tuple[int, ...]
    """Its repetition if it is stacked."""
    name: str
    """Name of the block in a file."""


def bind(family: Family, model: StackConfig, shapes: Mapping[str, Shape]) -> list[BoundTensor]:
    """Return every tensor of the model. ValueError where a weight of ours is in no row: the family
    cannot hold this model."""
    bound: list[BoundTensor] = []
    for row in family.rows:
        for block in _blocks(row, family, model):
            bound += _of_block(row, block, shapes)
    # A weight with leading dimensions (layers, experts) is whole only if every index of these came
    # from one tensor.
    held: collections.Counter[str] = collections.Counter()
    wanted = dict.fromkeys(shapes, 1)
    for tensor in bound:
        for target in tensor.targets:
            dims = len(target.lead)
            if tensor.experts is not None:
                dims += 1
            wanted[target.path] = math.prod(shapes[target.path][:dims])
            # A copy must not count: it may be absent, and repeats what another tensor holds.
            if not tensor.row.copy:
                held[target.path] += tensor.experts or 1
    for path, count in wanted.items():
        if held[path] != count:
            tensors = f"{held[path]} of {count}" if path in held else "no"
            raise ValueError(
                f"{family.architecture} has {tensors} tensors for {path} {list(shapes[path])}"
            )
    return bound


def _of_block(row: Row, block: _Block, shapes: Mapping[str, Shape]) -> Iterator[BoundTensor]:
    """Yield the tensors of a row for one block; none where the block lacks the row's weights."""
    stacked = len(block.lead)
    skip = stacked + 1 if row.experts else stacked
    paths = [block.path + part.path for part in row.parts]
    absent = [
        path
        for path, part in zip(paths, row.parts, strict=True)
        # A path with other dimensions is another kind of layer: a dense mlp/gate has none of
        # experts.
        if len(shapes.get(path, ())) != skip + part.dims
    ]
    # All absent: the row is of another kind of block. Some absent: the family cannot hold the
    # model.
    if len(absent) == len(paths) or any(block.path + hint.path not in shapes for hint in row.hints):
        return
    if any(block.path + path in shapes for path in row.absent):
        return
    if absent:
        raise ValueError(
            f"{row.name} holds {', '.join(paths)}, but the model has no {', '.join(absent)}"
        )
    # Hints have no dimension of experts; parts lose theirs.
    inner = {hint.path: shapes[block.path + hint.path][stacked:] for hint in row.hints}
    inner |= {part.path: shapes[block.path + part.path][skip:] for part in row.parts}
    count = shapes[paths[0]][stacked] if row.experts else None
    sizes = row.sizes(inner)
    # A tensor for each expert, or one for all with the expert as its first index.
    each = range(count) if count is not None and not row.indexed else (None,)
    for expert in each:
        lead = block.lead if expert is None else (*block.lead, expert)
        yield BoundTensor(
            row.tensor_name(block.name, expert),
            row,
            sizes,
            tuple(Target(part, path, lead) for part, path in zip(row.parts, paths, strict=True)),
            count if row.indexed else None,
        )


def _blocks(row: Row, family: Family, model: StackConfig) -> Iterator[_Block]:
    """Yield the blocks that a row may apply to; one without a name for tensors outside of
    blocks."""
    depth = model.mtp_depth if family.further else 0
    first = model.layers if family.further_after else 0
    # Numbered from 0, or on from the last layer (DeepSeek V3).
    further = [family.further.format(first + i) for i in range(depth)]
    if "{further}" in row.name:
        for i, name in enumerate(further):
            # A copy in such a module repeats the model's own embedding or head.
            yield _Block("" if row.copy else f"mtp/{i}/", (), name)
    elif "{layer}" not in row.name:
        yield _Block("", (), "")
    else:
        for layer in range(model.layers):
            path, lead = location(model, layer)
            yield _Block(f"{path}/", lead, family.layer.format(layer))
        yield from (_Block(f"mtp/{i}/block/", (), name) for i, name in enumerate(further))


def location(model: StackConfig, layer: int) -> tuple[str, tuple[int, ...]]:
    """Return the path of a layer's block, and its repetition where it is in a stack."""
    first, keys = len(model.prefix), [*model.stacks]
    if layer < first:
        return f"prefix/{layer}", ()
    repetition, index = divmod(layer - first, len(keys))
    if repetition == model.repetitions:
        return f"rest/{index}", ()
    return f"blocks/{keys[index]}", (repetition,)
