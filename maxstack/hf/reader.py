"""Weights read from a model folder straight into shards.

A weight of ours is made of pieces: slabs of tensors in memory-mapped files, viewed in our layout.
jax asks for the index of each shard, and the slabs that it covers are copied into one array, cast
on the way. Each process reads only what its devices hold, one weight at a time, so no more than one
weight is in host memory: importing 4 GB in bfloat16 peaks at 0.47 GiB.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from maxstack.errors import DataError
from maxstack.hf.binding import BoundTensor, Target, bind
from maxstack.hf.contents import Contents, check_tensors
from maxstack.hf.tensors import Tensor, check_finite, with_rows
from maxstack.schema.stack import NewRows, StackConfig

Index = tuple[slice, ...]


def load_params(
    contents: Contents,
    wanted: Mapping[str, Any],
    *,
    model: StackConfig | None = None,
    progress: bool = True,
    finite: bool = True,
) -> Iterator[tuple[str, jax.Array]]:
    """Yield the weights of a model folder by path, as `wanted` describes them: jax.ShapeDtypeStruct
    with a sharding, or none for one device; except those that `pieces_of` leaves out. `model`: the
    model that they are for; None: that of the folder.

    Numbers are cast to the dtype of each leaf. DataError, before anything is read, lists tensors
    that are missing, unknown or of another shape; if `finite`, it names the first tensor with a
    number that is NaN or infinite after the cast.
    """
    pieces = pieces_of(contents, {path: leaf.shape for path, leaf in wanted.items()}, model)
    total = sum(leaf.size for leaf in wanted.values())
    with tqdm(
        total=total,
        unit=" weights",
        unit_scale=True,
        desc="reading",
        disable=not progress or jax.process_index() > 0,
    ) as bar:
        for path, leaf in wanted.items():
            if path in pieces:
                yield path, _sharded(pieces[path], leaf, finite)
            bar.update(leaf.size)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A slab of a weight of ours, as a part of a tensor."""

    bound: BoundTensor
    target: Target
    tensor: Tensor

    def fill(self, out: np.ndarray, index: Index) -> None:
        """Write the values at `index`, without the slab's lead, into `out`."""
        # numpy reads only the pages of the map that the index needs.
        if self.bound.experts is None:
            out[...] = self.view()[index]
            return
        # One expert at a time: of packed weights `array` would otherwise unpack all experts at
        # once.
        experts = range(*index[0].indices(self.bound.experts))
        for slab, expert in zip(out, experts, strict=True):
            slab[...] = self.view(expert)[index[1:]]

    def view(self, expert: int | None = None) -> np.ndarray:
        """Return the slab, or that of an expert, in our layout; a view of the file if possible."""
        return self.bound.row.ours(self.target.part, self.tensor.array(expert), self.bound.sizes)


@dataclasses.dataclass(frozen=True)
class ResizedPositions(Piece):
    """A table of image positions, resized to another image by bicubic interpolation, as in
    transformers' encoders; its first rows, which are no patches, stay."""

    before: int
    """Rows that stay."""
    rows: int
    """Rows in all afterwards."""

    def fill(self, out: np.ndarray, index: Index) -> None:
        # Every new position depends on several old ones, so the whole table is made for any index.
        table = self.view().astype(np.float32)
        before, patches = table[: self.before], table[self.before :]
        sides = (math.isqrt(rows) for rows in (len(patches), self.rows - self.before))
        weights = bicubic(*sides)
        patches = patches.reshape(weights.shape[1], weights.shape[1], -1)
        made = np.einsum("ik,jl,kld->ijd", weights, weights, patches)
        out[...] = np.concatenate([before, made.reshape(-1, made.shape[-1])])[index]


@dataclasses.dataclass(frozen=True)
class ExtendedTable(Piece):
    """A table with rows for new tokens."""

    new: NewRows
    rows: int
    """Rows in all afterwards."""

    def fill(self, out: np.ndarray, index: Index) -> None:
        out[...] = with_rows(self.view(), self.new, self.rows)[index]


def bicubic(old: int, new: int) -> np.ndarray:
    """Return weights float32 [new, old] of cubic convolution with a = -0.75 between the centers of
    pixels, with edges repeated (Keys 1981, doi:10.1109/TASSP.1981.1163711), as in torch."""
    places = (np.arange(new) + 0.5) * old / new - 0.5
    first = np.floor(places).astype(int)
    weights = np.zeros((new, old))
    for tap in range(-1, 3):
        x = np.abs(places - first - tap)
        # (a + 2) x^3 - (a + 3) x^2 + 1 up to a distance of 1, and a (x^3 - 5 x^2 + 8 x - 4) up to
        # 2.
        near = (1.25 * x - 2.25) * x * x + 1
        far = ((-0.75 * x + 3.75) * x - 6) * x + 3
        at = np.clip(first + tap, 0, old - 1)
        # At an edge several taps fall on one pixel: plain indexing would keep the last alone.
        np.add.at(weights, (np.arange(new), at), np.where(x <= 1, near, far))
    return weights.astype(np.float32)


def pieces_of(
    contents: Contents, shapes: Mapping[str, tuple[int, ...]], model: StackConfig | None = None
) -> dict[str, list[Piece]]:
    """Return the pieces of each weight by path. DataError as in load_params. Weights that `model`
    initializes anew have none; positions of images of another size are resized."""
    model = model or contents.model
    fresh, left = model.head_changes(contents.model)
    shapes = {path: shape for path, shape in shapes.items() if path not in fresh}
    places = contents.model.position_rows
    # Rows are bound by the shapes of the folder; pieces then resize to those that are wanted.
    own = dict(shapes)
    if places and "positions" in own:
        own["positions"] = sum(places), *own["positions"][1:]
    longer = model.extended_tables(contents.model)
    own |= {path: longer[path].shape_before(own[path]) for path in longer.keys() & own.keys()}
    try:
        bound = bind(contents.family, contents.model, own)
    except ValueError as error:
        raise DataError(
            f"{contents.folder.named}: holds the weights of another model than the configured one: "
            f"{error}; with `model: {{from: {contents.folder.named}}}` alone, the architecture, "
            "the number of layers and the names of blocks are those of the folder"
        ) from error
    # A head that the run replaces may be there or not.
    heads = [row for row in contents.family.rows if row.paths <= left]
    check_tensors(contents, bound, [re.escape(row.name) for row in heads])
    pieces: dict[str, list[Piece]] = {path: [] for path in shapes}
    for tensor in bound:
        # A copy repeats another tensor and may be absent.
        for target in () if tensor.row.copy else tensor.targets:
            piece = Piece(tensor, target, contents.tensors[tensor.name])
            if places and own[target.path] != shapes[target.path]:
                rows = shapes[target.path][0]
                piece = ResizedPositions(tensor, target, piece.tensor, places[0], rows)
            elif new := longer.get(target.path):
                rows = shapes[target.path][new.dim]
                piece = ExtendedTable(tensor, target, piece.tensor, new, rows)
            pieces[target.path].append(piece)
    return pieces


def leading_dims(pieces: Sequence[Piece]) -> int:
    """Count a weight's leading dimensions of layers and experts."""
    dims = len(pieces[0].target.lead)
    return dims if pieces[0].bound.experts is None else dims + 1


def slab_reader(
    pieces: Sequence[Piece], shape: tuple[int, ...], dtype: np.dtype, finite: bool = True
) -> Callable[[Index], np.ndarray]:
    """Return a function from an index to the values there; DataError as in load_params."""
    lead = len(pieces[0].target.lead)
    by_lead = {piece.target.lead: piece for piece in pieces}

    def values(index: Index) -> np.ndarray:
        spans = [range(*cut.indices(size)) for cut, size in zip(index, shape, strict=True)]
        # Slabs are cast as they are assigned, so a weight never exists in two dtypes.
        out = np.empty([len(span) for span in spans], dtype)
        # A stacked weight has one tensor for each layer, and for experts often one for each of
        # them.
        for indices in np.ndindex(*map(len, spans[:lead])):
            piece = by_lead[tuple(span[i] for span, i in zip(spans, indices, strict=False))]
            slab: Any = (*indices, ...)
            piece.fill(out[slab], index[lead:])
            # After the cast, so that a number too large for the run's dtype is found too, and
            # nothing is read twice.
            if finite:
                check_finite(out[slab], piece.tensor.where)
            # Pages of a map count as memory of this process until they are given back.
            piece.tensor.forget()
        return out

    return values


def _sharded(pieces: Sequence[Piece], leaf: Any, finite: bool) -> jax.Array:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    values = slab_reader(pieces, leaf.shape, leaf.dtype, finite)
    last: dict[str, np.ndarray] = {}

    def once(index: Index | None) -> np.ndarray:
        """Return the values, which several devices may ask for in turn."""
        assert index is not None
        key = str(index)
        # Devices with the same shard ask one after the other. Only the last is kept: all shards
        # together may be the whole weight.
        if key not in last:
            last.clear()
            last[key] = values(index)
        return last[key]

    # Without waiting, the next weight would be read while this one is still in host memory.
    return jax.make_array_from_callback(leaf.shape, sharding, once).block_until_ready()
