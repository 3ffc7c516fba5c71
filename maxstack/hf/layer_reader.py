"""Weights read as inference keeps them: one layer at a time, each laid out on the way.

Training keeps the layers of a stack in one array, as reader.py makes it. A step of inference wants
each layer by itself, and matrices in another order. Made of the stacks, all weights would stand in
memory twice and be moved three times.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from maxstack.hf.contents import Contents
from maxstack.hf.reader import Piece, pieces_of, slab_reader
from maxstack.hf.tensors import check_finite
from maxstack.schema.stack import StackConfig

THREADS = 2
"""Layers that are read at a time: numpy copies on one thread."""
ALIGNED = 64
"""Bytes: where an array begins at a multiple of these, jax reads it in place."""
BLOCK = 1 << 24
"""Bytes that are read before the file's pages are given back."""


class Kept(NamedTuple):
    """A weight as it is kept."""

    shape: tuple[int, ...]
    """Of the stack of its layers, or of itself."""
    dtype: np.dtype
    stacked: bool
    lay: Callable[[np.ndarray], np.ndarray] | None
    """Returns a layer in the order that is kept; None: as it is."""


def load_layers(
    contents: Contents,
    wanted: Mapping[str, Kept],
    sharding: Any,
    *,
    model: StackConfig,
    finite: bool = True,
) -> dict[str, Any]:
    """Return the weights of a model folder by path, of stacks a tuple of layers. DataError as in
    `reader.load_params`, of the first number that is not finite wherever it is kept."""
    pieces = pieces_of(contents, {path: kept.shape for path, kept in wanted.items()}, model)
    parts: dict[tuple[str, int | None], list[Piece]] = {}
    for path, kept in wanted.items():
        for piece in pieces.get(path, ()):
            layer = piece.target.lead[0] if kept.stacked else None
            parts.setdefault((path, layer), []).append(piece)
    # Tensors are bound in the order of the files.
    order = sorted(parts, key=lambda part: part[1] or 0)
    total = sum(math.prod(kept.shape) for kept in wanted.values())
    with (
        tqdm(total=total, unit=" weights", unit_scale=True, desc="reading", disable=None) as bar,
        ThreadPoolExecutor(THREADS, "reader") as pool,
    ):

        def load(part: tuple[str, int | None]) -> jax.Array:
            path, layer = part
            array = _read(parts[part], wanted[path], layer, finite)
            return jax.device_put(array, sharding, may_alias=True)

        loaded: dict[str, Any] = {}
        for (path, layer), array in zip(order, pool.map(load, order), strict=True):
            bar.update(array.size)
            loaded[path] = array if layer is None else (*loaded.get(path, ()), array)
    return loaded


def _read(pieces: list[Piece], kept: Kept, layer: int | None, finite: bool) -> np.ndarray:
    """Return a weight, or one layer of a stack, from its pieces."""
    first = pieces[0]
    whole = len(pieces) == 1 and type(first) is Piece and first.bound.experts is None
    if whole:
        # A view of the file, so that numbers are moved once.
        values = first.view().astype(kept.dtype, copy=False)
    else:
        # Checks each piece, and names the one with a number that is not finite.
        read = slab_reader(pieces, kept.shape, kept.dtype, finite)
        rest = [slice(None)] * len(kept.shape)
        if layer is None:
            values = read(tuple(rest))
        else:
            values = read((slice(layer, layer + 1), *rest[1:]))[0]
    laid = kept.lay(values) if kept.lay else values
    array = _aligned(laid.shape, kept.dtype)
    rows, from_rows = np.atleast_1d(array), np.atleast_1d(laid)
    count = max(1, BLOCK * len(rows) // max(1, rows.nbytes))
    for begin in range(0, len(rows), count):
        some = slice(begin, begin + count)
        rows[some] = from_rows[some]
        for piece in pieces:
            # Pages of a map count as memory of this process until they are given back.
            piece.tensor.forget()
    if finite and whole:
        check_finite(array, first.tensor.where)
    return array


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    data = np.empty(size + ALIGNED, np.uint8)
    first = -data.ctypes.data % ALIGNED
    return data[first : first + size].view(dtype).reshape(shape)
