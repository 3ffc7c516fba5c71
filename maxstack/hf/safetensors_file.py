"""A safetensors file, its header checked before anything is believed, its tensors read through a
memory map."""

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from maxstack.config import quoted
from maxstack.config.errors import DataError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER, LONGEST_NAME, MOST_DIMS = 100_000_000, 1024, 16


class Entry(NamedTuple):
    """A tensor of a file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the file."""
    stop: int
    """The byte after the last."""


class SafetensorsFile:
    """The tensors of one file; DataError, with the file, tensor and reason, where the file is not
    what the format asks for."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.entries: Mapping[str, Entry] = _entries(path, file, size)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error

    def array(self, name: str) -> np.ndarray:
        """A read-only view of the file; pages are read as they are touched."""
        entry = self.entries[name]
        count = math.prod(entry.shape)
        return (
            np.frombuffer(self._map, entry.dtype, count, entry.start).reshape(entry.shape)
            if count
            else np.zeros(entry.shape, entry.dtype)
        )

    def forget(self) -> None:
        """Let the system take back the pages that have been read."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def read_json(text: bytes, where: str) -> Any:
    """The value of untrusted JSON: bounded depth, no duplicate keys, no NaN; DataError
    otherwise."""
    if len(text) > LARGEST_HEADER:
        raise DataError(
            f"{where}: {len(text):,} bytes of JSON; at most {LARGEST_HEADER:,} are read"
        )
    try:
        return json.loads(
            text,
            object_pairs_hook=lambda pairs: _unique(pairs, where),
            parse_constant=lambda word: _no_constant(word, where),
        )
    except RecursionError:
        raise DataError(f"{where}: nested deeper than any model's") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error


def check_name(name: str, where: str) -> None:
    """DataError for a tensor name that could be a path out of a folder, or could not be printed."""
    parts = name.replace("\\", "/").split("/")
    if (
        not name
        or len(name) > LONGEST_NAME
        or not name.isprintable()
        or ".." in parts
        or name.startswith(("/", "\\", "~"))
        or ":" in parts[0]
    ):
        raise DataError(
            f"{where}: tensor name {quoted(name)} is none that a model has (empty, a "
            f"path, unprintable, over {LONGEST_NAME} characters)"
        )


def _entries(path: Path, file: Any, size: int) -> dict[str, Entry]:
    if size < 8:
        raise DataError(f"{path}: {size} bytes, too short for a safetensors file")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(LARGEST_HEADER, size - 8):
        raise DataError(
            f"{path}: the header claims {length:,} bytes; the file has {size - 8:,} "
            f"after its length and {LARGEST_HEADER:,} are allowed"
        )
    header = read_json(file.read(length), f"{path}: header")
    if not isinstance(header, dict):
        raise DataError(f"{path}: the header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise DataError(f"{path}: __metadata__ is not a mapping of text to text")
    begin, found = 8 + length, {}
    for name, spec in header.items():
        check_name(name, str(path))
        found[name] = _entry(f"{path}: tensor {name}", spec, begin, size)
    _contiguous(path, found, begin, size)
    return found


def _entry(where: str, spec: Any, begin: int, size: int) -> Entry:
    if not isinstance(spec, dict) or spec.keys() != {"dtype", "shape", "data_offsets"}:
        raise DataError(f"{where}: must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DataError(f"{where}: dtype {quoted(str(dtype))}; known are {', '.join(DTYPES)}")
    if (
        not isinstance(shape, list)
        or len(shape) > MOST_DIMS
        or not all(type(n) is int and 0 <= n < 2**48 for n in shape)
    ):
        raise DataError(f"{where}: shape {str(shape)[:80]} is no list of at most {MOST_DIMS} sizes")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(n) is int and n >= 0 for n in offsets)
    ):
        raise DataError(f"{where}: data_offsets {str(offsets)[:80]} are not two whole numbers")
    start, stop = offsets
    wanted = math.prod(shape) * DTYPES[dtype].itemsize
    if not start <= stop <= size - begin:
        raise DataError(
            f"{where}: data_offsets {start}..{stop} lie outside the {size - begin:,} bytes of data"
        )
    if stop - start != wanted:
        raise DataError(
            f"{where}: {dtype} {shape} takes {wanted:,} bytes, but its data_offsets span "
            f"{stop - start:,}"
        )
    return Entry(DTYPES[dtype], tuple(shape), begin + start, begin + stop)


def _contiguous(path: Path, found: Mapping[str, Entry], begin: int, size: int) -> None:
    at, before = begin, "the header"
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            what = (
                "overlaps"
                if entry.start < at
                else f"leaves {entry.start - at:,} unused bytes after"
            )
            raise DataError(f"{path}: tensor {name} {what} {before}")
        at, before = entry.stop, f"tensor {name}"
    if at != size:
        raise DataError(f"{path}: {size - at:,} bytes after {before} belong to no tensor")


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise DataError(f"{where}: key {quoted(key)} is given twice")
        found[key] = value
    return found


def _no_constant(word: str, where: str) -> Any:
    raise DataError(f"{where}: {word} is not JSON")
