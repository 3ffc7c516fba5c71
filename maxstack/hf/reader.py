"""Weights out of a model folder, straight into shards: each process reads only what its devices
hold, one weight at a time."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from maxstack.errors import DataError
from maxstack.hf.binding import Bound, Target, bind
from maxstack.hf.contents import HEAD, VALUE, Contents, check_tensors
from maxstack.hf.tensors import Tensor, check_finite

Index = tuple[slice, ...]
SCORE = "score"
"""Path of a reward model's head."""


def load_params(
    contents: Contents,
    wanted: Mapping[str, Any],
    *,
    progress: bool = True,
    finite: bool = True,
) -> Iterator[tuple[str, jax.Array]]:
    """The weights of a model folder by path, one after the other, as jax.ShapeDtypeStruct with a
    sharding (or none: one device) ask for them; all but those that `pieces_of` leaves out.

    Numbers are cast to the dtype of each leaf. DataError, before anything is read, lists tensors
    that are missing, unknown or of another shape; and, if `finite`, names the first tensor with a
    number that is NaN or infinite after the cast.
    """
    pieces = pieces_of(contents, {path: leaf.shape for path, leaf in wanted.items()})
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
    """A slab of a weight of ours, and the part of a tensor that it is."""

    bound: Bound
    target: Target
    tensor: Tensor

    def fill(self, out: np.ndarray, index: Index) -> None:
        """Write the values at `index`, without the slab's lead, into `out`."""
        if self.bound.experts is None:
            out[...] = self._view(None)[index]
            return
        experts = range(*index[0].indices(self.bound.experts))
        for slab, expert in zip(out, experts, strict=True):
            slab[...] = self._view(expert)[index[1:]]

    def _view(self, expert: int | None) -> np.ndarray:
        return self.bound.row.ours(self.target.part, self.tensor.array(expert), self.bound.sizes)


def pieces_of(contents: Contents, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Piece]]:
    """Our path -> the pieces that make it up. DataError as in load_params. A reward model's score
    has none in the folder of a language model, whose head is left, and an estimate of rewards has
    none in any."""
    shapes = {path: shape for path, shape in shapes.items() if path != VALUE}
    new_head = SCORE in shapes and not contents.model.head.scores
    if new_head:
        shapes = {path: shape for path, shape in shapes.items() if path != SCORE}
    try:
        bound = bind(contents.family, contents.model, shapes)
    except ValueError as error:
        raise DataError(
            f"{contents.folder.path}: holds the weights of another model than the configured one: "
            f"{error}; with `model: {{from: {contents.folder.path}}}` alone, the architecture, "
            "the number of layers and the names of blocks are those of the folder"
        ) from error
    check_tensors(contents, bound, (re.escape(HEAD),) if new_head else ())
    pieces: dict[str, list[Piece]] = {path: [] for path in shapes}
    for tensor in bound:
        for target in () if tensor.row.copy else tensor.targets:
            pieces[target.path].append(Piece(tensor, target, contents.tensors[tensor.name]))
    return pieces


def leading(pieces: Sequence[Piece]) -> int:
    """Number of a weight's first dimensions that are of layers and experts."""
    return len(pieces[0].target.lead) + (pieces[0].bound.experts is not None)


def reading(
    pieces: Sequence[Piece], shape: tuple[int, ...], dtype: np.dtype, finite: bool = True
) -> Callable[[Index], np.ndarray]:
    """index -> the values there, read when asked for; DataError as in load_params."""
    lead = len(pieces[0].target.lead)
    by_lead = {piece.target.lead: piece for piece in pieces}

    def values(index: Index) -> np.ndarray:
        spans = [range(*cut.indices(size)) for cut, size in zip(index, shape, strict=True)]
        out = np.empty([len(span) for span in spans], dtype)
        for indices in np.ndindex(*map(len, spans[:lead])):
            piece = by_lead[tuple(span[i] for span, i in zip(spans, indices, strict=False))]
            slab: Any = (*indices, ...)
            piece.fill(out[slab], index[lead:])
            if finite:
                check_finite(out[slab], piece.tensor.where)
            piece.tensor.forget()
        return out

    return values


def _sharded(pieces: Sequence[Piece], leaf: Any, finite: bool) -> jax.Array:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    values = reading(pieces, leaf.shape, leaf.dtype, finite)
    last: dict[str, np.ndarray] = {}

    def once(index: Index | None) -> np.ndarray:
        """The values, which several devices may ask for in turn."""
        assert index is not None
        key = str(index)
        if key not in last:
            last.clear()
            last[key] = values(index)
        return last[key]

    return jax.make_array_from_callback(leaf.shape, sharding, once).block_until_ready()
