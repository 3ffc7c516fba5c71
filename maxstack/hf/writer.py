"""A model folder out of weights: safetensors files whose places are known beforehand, filled one
weight of ours at a time."""

import contextlib
import json
import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxstack.config import ConfigError, atomic
from maxstack.hf.binding import Bound, Target
from maxstack.hf.folder import INDEX, SINGLE
from maxstack.hf.rows import Shape
from maxstack.hf.safetensors_file import NAMES

Read = Callable[[str], np.ndarray]


class Shard:
    """A safetensors file that is being written: its header is, and its tensors are views to be
    filled."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[np.dtype, Shape]]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at, places = 0, {}
        for name, (dtype, shape) in sorted(
            tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])
        ):
            size = math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [at, at + size],
            }
            places[name] = (dtype, shape, at)
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + at)
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)
        self._places = {
            name: (dtype, shape, begin + 8 + len(text))
            for name, (dtype, shape, begin) in places.items()
        }

    def array(self, name: str) -> np.ndarray:
        """A view of the tensor in the file."""
        dtype, shape, begin = self._places[name]
        count = math.prod(shape)
        return (
            np.frombuffer(self._map, dtype, count, begin).reshape(shape)
            if count
            else np.zeros(shape, dtype)
        )

    def forget(self) -> None:
        """Write what is filled, and let the system take its memory back."""
        self._map.flush()
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """All of it on disk."""
        self._map.flush()
        self._file.close()


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which appears as `out` only when all of it is there. ConfigError where
    something is there already, or it cannot be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: is there already; choose another name, or delete it")
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
    bound: Sequence[Bound],
    dtypes: Mapping[str, np.dtype],
    read: Read,
    shard_size: int,
    done: Callable[[int], object],
) -> None:
    """Write all tensors into shards of at most `shard_size` bytes (one tensor at least) and, where
    there are several, their index.

    `read` gives a weight of ours by its path and is called once for each; `done` is told the
    numbers in each weight that is written.
    """
    shards, where = _open(folder, bound, dtypes, shard_size)
    by_path: dict[str, list[tuple[Bound, Target]]] = {}
    for tensor in bound:
        for target in tensor.targets:
            by_path.setdefault(target.path, []).append((tensor, target))
    for path, uses in by_path.items():
        weight = np.asarray(read(path))
        for tensor, target in uses:
            out = where[tensor.name].array(tensor.name)
            for index, slab in _slabs(tensor, target, weight):
                tensor.row.place(
                    target.part, slab, out if index is None else out[index], tensor.sizes
                )
        done(weight.size)
        for shard in {id(where[tensor.name]): where[tensor.name] for tensor, _ in uses}.values():
            shard.forget()
    for shard in shards:
        shard.close()


def _slabs(
    tensor: Bound, target: Target, weight: np.ndarray
) -> Iterator[tuple[int | None, np.ndarray]]:
    slab = np.asarray(weight[target.lead])
    yield from ((None, slab),) if tensor.experts is None else enumerate(slab)


def _open(
    folder: Path, bound: Sequence[Bound], dtypes: Mapping[str, np.dtype], shard_size: int
) -> tuple[list[Shard], dict[str, Shard]]:
    groups: list[dict[str, tuple[np.dtype, Shape]]] = [{}]
    sizes, filled = (
        {tensor.name: math.prod(tensor.shape) * dtypes[tensor.name].itemsize for tensor in bound},
        0,
    )
    for tensor in bound:
        if groups[-1] and filled + sizes[tensor.name] > shard_size:
            groups.append({})
            filled = 0
        groups[-1][tensor.name] = (dtypes[tensor.name], tensor.shape)
        filled += sizes[tensor.name]
    names = (
        [SINGLE]
        if len(groups) == 1
        else [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    )
    if len(groups) > 1:
        weight_map = {
            tensor: name for name, group in zip(names, groups, strict=True) for tensor in group
        }
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    shards = [Shard(folder / name, group) for name, group in zip(names, groups, strict=True)]
    return shards, {
        tensor: shard for shard, group in zip(shards, groups, strict=True) for tensor in group
    }
