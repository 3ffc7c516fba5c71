"""Reader of untrusted safetensors files: the header is checked, and tensors are views of a memory
map.

The header is read within limits, each description is checked by itself, and then all in the order
of their offsets: they must fill the file without a hole or an overlap. The safetensors package's
own reader (0.8.0) names neither the tensor nor the two sizes where a header is wrong, accepts names
that are paths, copies every tensor (512 MiB took 512 MiB of memory), and has no float8 for numpy.
"""

import math
import mmap
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from maxstack import strict_json
from maxstack.errors import DataError, quoted
from maxstack.regular_file import open_regular

_KINDS: dict[str, Any] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
DTYPES = {name: np.dtype(kind) for name, kind in _KINDS.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000
LONGEST_NAME = 1024
MOST_DIMS = 16
PATH = re.compile(r"[/\\~]|[^/\\]*:|(.*[/\\])?\.\.([/\\]|$)")
"""A path that is absolute, of a home or a drive, or has a step up."""


class Entry(NamedTuple):
    """A tensor of a file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    """Its position in the file, in bytes."""


class SafetensorsFile:
    """The tensors of one file. DataError with file, tensor and reason where it does not follow the
    format."""

    def __init__(self, path: Path):
        self.path = path
        try:
            # The map outlives the file's descriptor.
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                self.entries: Mapping[str, Entry] = _entries(path, file, size)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error

    def array(self, name: str) -> np.ndarray:
        """Return a read-only view of the file; pages are read when they are touched."""
        entry = self.entries[name]
        return np.ndarray(entry.shape, entry.dtype, self._map, entry.start)

    def forget(self) -> None:
        """Let the system reclaim the pages that have been read."""
        # The map is read-only, so its pages are clean and nothing is lost.
        self._map.madvise(mmap.MADV_DONTNEED)


def check_name(name: str, where: str) -> None:
    """DataError for a tensor name that could be a path out of a folder, or could not be printed."""
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable() or PATH.match(name):
        raise DataError(
            f"{where}: tensor name {quoted(name)} is none that a model has (empty, a "
            f"path, unprintable, over {LONGEST_NAME} characters)"
        )


def _entries(path: Path, file: Any, size: int) -> dict[str, Entry]:
    header = _header(path, file, size)
    begin = file.tell()
    for name, spec in header.items():
        # All descriptions first: sorting below needs their offsets to be numbers.
        check_name(name, str(path))
        _check_spec(f"{path}: tensor {name}", spec)
    entries = {}
    end = 0
    before = "the header"
    # In order of offsets one comparison finds overlaps and another holes.
    for name, spec in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        where, dtype = f"{path}: tensor {name}", DTYPES[spec["dtype"]]
        start, stop = spec["data_offsets"]
        wanted = math.prod(spec["shape"]) * dtype.itemsize
        if not start <= stop <= size - begin:
            raise DataError(
                f"{where}: data_offsets {start}..{stop} lie outside the {size - begin:,} bytes of "
                "data"
            )
        if stop - start != wanted:
            raise DataError(
                f"{where}: {spec['dtype']} {spec['shape']} takes {wanted:,} bytes, but its "
                f"data_offsets span {stop - start:,}"
            )
        if start < end:
            raise DataError(f"{where} overlaps {before}")
        if start > end:
            raise DataError(f"{where} leaves {start - end:,} unused bytes after {before}")
        entries[name] = Entry(dtype, tuple(spec["shape"]), begin + start)
        end = stop
        before = f"tensor {name}"
    if begin + end != size:
        raise DataError(f"{path}: {size - begin - end:,} bytes after {before} belong to no tensor")
    return entries


def _check_spec(where: str, spec: Any) -> None:
    """DataError where a tensor's description has other keys or types than the format."""
    # By hand: pydantic collects every error before it tells the first, and took 72 s instead of 6
    # for 400,000 broken entries.
    if not isinstance(spec, dict) or spec.keys() != {"dtype", "shape", "data_offsets"}:
        raise DataError(f"{where}: must have exactly dtype, shape and data_offsets")
    dtype, shape = spec["dtype"], spec["shape"]
    offsets = spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DataError(f"{where}: dtype {quoted(dtype)}; known are {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > MOST_DIMS:
        raise DataError(f"{where}: shape {quoted(shape)} is no list of at most {MOST_DIMS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise DataError(f"{where}: data_offsets {quoted(offsets)} are not two whole numbers")


def _are_sizes(value: Any) -> bool:
    # Not isinstance: True is an int.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**48 for n in value)


def _header(path: Path, file: Any, size: int) -> dict[str, Any]:
    """Return the unchecked descriptions of the tensors by name."""
    if size < 8:
        raise DataError(f"{path}: {size} bytes, too short for a safetensors file")
    length = int.from_bytes(file.read(8), "little")
    # Checked before reading, which would allocate as much memory as a hostile length says.
    if length > min(LARGEST_HEADER, size - 8):
        raise DataError(
            f"{path}: the header claims {length:,} bytes; the file has {size - 8:,} "
            f"after its length and {LARGEST_HEADER:,} are allowed"
        )
    header = strict_json.parse(file.read(length), f"{path}: header")
    if not isinstance(header, dict):
        raise DataError(f"{path}: the header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise DataError(f"{path}: __metadata__ is not a mapping of text to text")
    return header
