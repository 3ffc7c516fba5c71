"""Writer of model folders.

The layout of every safetensors file follows from the shapes alone, so headers are written first and
the files are mapped and filled one weight of ours at a time, whatever tensors it belongs to. The
folder appears under its name only when all of it is written.
"""

import contextlib
import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxstack.config import atomic
from maxstack.data.hub import INDEX, MODEL, SINGLE
from maxstack.errors import ConfigError
from maxstack.hf.binding import BoundTensor, Target
from maxstack.hf.folder import and_more
from maxstack.hf.rows import Shape
from maxstack.hf.safetensors_file import NAMES

Read = Callable[[str], np.ndarray]


class Shard:
    """A safetensors file with its header written, and views of its tensors to fill."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[np.dtype, Shape]], body: str = ""):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts: dict[str, int] = {}
        size = 0
        # The largest items first: with the header's padding every tensor is aligned to its items.
        for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
            dtype, shape = tensors[name]
            starts[name] = size
            size += math.prod(shape) * dtype.itemsize
            header[name.removeprefix(body)] = {
                "dtype": NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [starts[name], size],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        begin = 8 + len(text)
        with path.open("wb+") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            # The file has its full size before anything is in it, so tensors can be filled in any
            # order.
            file.truncate(begin + size)
            self._map = mmap.mmap(file.fileno(), 0)
        self.arrays = {
            name: np.ndarray(shape, dtype, self._map, begin + starts[name])
            for name, (dtype, shape) in tensors.items()
        }
        """Views of the file, by name."""

    def forget(self) -> None:
        """Write what is filled, and let the system reclaim its memory."""
        self._map.flush()
        self._map.madvise(mmap.MADV_DONTNEED)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Context with a folder to fill, which becomes `out` at the end. ConfigError where `out` exists
    or cannot be written."""
    atomic.check_absent(out)
    # The errors of entering alone are about --out; those of the block pass through.
    with contextlib.ExitStack() as ending:
        try:
            unfinished = ending.enter_context(atomic.writing(out))
            unfinished.mkdir()
        except OSError as error:
            raise ConfigError(
                f"--out {out}: cannot be written: {error.strerror or error}"
            ) from error
        yield unfinished


def write_tensors(
    folder: Path,
    bound: Sequence[BoundTensor],
    dtypes: Mapping[str, np.dtype],
    read: Read,
    shard_size: int,
    done: Callable[[int], object],
    stem: str = MODEL,
    body: str = "",
) -> None:
    """Write all tensors into shards of at most `shard_size` bytes, with at least one tensor each,
    and an index for several; file names begin with `stem`, and tensor names lose `body`.

    `read` gives a weight of ours by path and is called once for each; `done` is called with the
    size of each weight written.
    """
    shards = _shards(folder, bound, dtypes, shard_size, stem, body)
    # By weight: a stacked one lies in many tensors, and is read once for all of them.
    by_path: dict[str, list[tuple[BoundTensor, Target]]] = {}
    for tensor in bound:
        for target in tensor.targets:
            by_path.setdefault(target.path, []).append((tensor, target))
    beyond: dict[str, float] = {}
    for path, uses in by_path.items():
        weight = np.asarray(read(path))
        for tensor, target in uses:
            out, slab = shards[tensor.name].arrays[tensor.name], np.asarray(weight[target.lead])
            slabs = [(out, slab)] if tensor.experts is None else zip(out, slab, strict=True)
            for part, values in slabs:
                # Told below by the tensors' names and the largest number, in place of numpy's
                # warning.
                with np.errstate(over="ignore"):
                    tensor.row.write(target.part, values, part, tensor.sizes)
                    largest = np.maximum(values.max(), -values.min())
                    if np.isfinite(largest) and np.isinf(largest.astype(part.dtype)):
                        beyond[tensor.name] = max(beyond.get(tensor.name, 0), float(largest))
        done(weight.size)
        # Pages that were written count as memory of this process until they are given back.
        for shard in {shards[tensor.name] for tensor, _ in uses}:
            shard.forget()
    if beyond:
        names = sorted(beyond)
        raise ConfigError(
            f"{', '.join(names[:5])}{and_more(names, 5)}: numbers up to {max(beyond.values()):g} "
            f"are infinite in {dtypes[names[0]]}; give --dtype bfloat16 or float32"
        )


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def _shards(
    folder: Path,
    bound: Sequence[BoundTensor],
    dtypes: Mapping[str, np.dtype],
    shard_size: int,
    stem: str,
    body: str,
) -> dict[str, Shard]:
    """Make the shards, and the index if there are several; return the shard of each tensor."""
    groups: list[dict[str, tuple[np.dtype, Shape]]] = [{}]
    total = filled = 0
    for tensor in bound:
        dtype = dtypes[tensor.name]
        size = math.prod(tensor.shape) * dtype.itemsize
        # A tensor larger than a shard gets a file of its own.
        if groups[-1] and filled + size > shard_size:
            groups.append({})
            filled = 0
        groups[-1][tensor.name] = (dtype, tensor.shape)
        filled += size
        total += size
    count = len(groups)
    files = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        files = [SINGLE.format(stem)]
    else:
        weight_map = {
            name.removeprefix(body): file
            for file, group in zip(files, groups, strict=True)
            for name in group
        }
        index = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_json(folder / INDEX.format(stem), index)
    shards: dict[str, Shard] = {}
    for file, group in zip(files, groups, strict=True):
        shards |= dict.fromkeys(group, Shard(folder / file, group, body))
    return shards
