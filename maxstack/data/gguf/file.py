"""Reader of untrusted GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):
metadata, and tensors as views of a memory map.

A file is a header (magic, version, two counts), then keys with typed values, then a description of
each tensor, then, aligned, the tensors. Counts and lengths are held against the bytes that are left
before anything is allocated. The gguf package's own reader (0.19) makes numpy views of every text:
1.7 s for the 49,000 tokens of SmolLM2, where this one takes 0.05 s. Only its arithmetic of
quantized blocks is used, and it is imported for that alone.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from maxstack.errors import ConfigError, DataError, installing, quoted
from maxstack.regular_file import open_regular

V = TypeVar("V")
MAGIC, VERSIONS = b"GGUF", (2, 3)
LARGEST_HEADER = 100_000_000
MOST_DIMS, LONGEST_NAME = 4, 1024
TEXT, ARRAY = 8, 9
AT_ONCE = 1 << 18
"""Numbers that are dequantized at a time."""
_NUMBERS = {
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
NUMBERS = {code: np.dtype(kind) for code, kind in _NUMBERS.items()}
"""Types of metadata that are numbers."""
FLOATS = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 30: np.dtype(ml_dtypes.bfloat16)}
"""Types of tensors that are floats; others are quantized."""


class Entry(NamedTuple):
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """As in numpy, the last dimension contiguous."""
    kind: int
    """Number of its type in ggml."""
    start: int
    """Its position in the file, in bytes."""


class GgufFile:
    """The metadata and tensors of one file. DataError with key or tensor and reason where it does
    not follow the format."""

    def __init__(self, path: Path):
        self.path = path
        try:
            # The map outlives the file's descriptor.
            with open_regular(path) as file:
                start = file.read(4)
                # Before the map, which an empty file cannot have.
                if start != MAGIC:
                    raise DataError(f"{path}: begins with {quoted(start)}, so it is no GGUF file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        self._at = 4
        self.metadata: Mapping[str, Any]
        """Key -> a number, a text, a list of texts, or an array of numbers."""
        self.entries: Mapping[str, Entry]
        try:
            self.metadata, self.entries = self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise DataError(f"{path}: byte {self._at:,} of the header: {error}") from error

    def value(self, key: str, kind: type[V], default: V | None = None) -> V | None:
        """Return a value of the metadata. DataError where it is of another kind."""
        value = self.metadata.get(key, default)
        # Not isinstance: True is no number.
        if value is not None and type(value) is not kind:
            raise DataError(f"{self.path}: {key}={quoted(value)}: must be of type {kind.__name__}")
        return value

    def floats(self, entry: Entry, index: int | None = None) -> np.ndarray:
        """Return a tensor, or one index of its first dimension: a view of the file where it holds
        floats, else dequantized to float32."""
        rows = self.rows(entry)
        return self.dequantize(entry, rows if index is None else rows[index])

    def rows(self, entry: Entry) -> np.ndarray:
        """Return a view of a tensor's floats, or of the bytes of its blocks, row by row."""
        if entry.kind in FLOATS:
            return np.ndarray(entry.shape, FLOATS[entry.kind], self._map, entry.start)
        size, width = self._block(entry)
        shape = *entry.shape[:-1], entry.shape[-1] // size * width
        return np.ndarray(shape, np.uint8, self._map, entry.start)

    def dequantize(self, entry: Entry, rows: np.ndarray) -> np.ndarray:
        """Return rows of a tensor as floats. ConfigError for a type that the gguf package cannot
        dequantize."""
        if entry.kind in FLOATS:
            return rows
        gguf = _package(self.where(entry))
        kind = gguf.GGMLQuantizationType(entry.kind)
        size, width = gguf.GGML_QUANT_SIZES[kind]
        out = np.empty((*rows.shape[:-1], rows.shape[-1] // width * size), np.float32)
        flat, floats = rows.reshape(-1, rows.shape[-1]), out.reshape(-1, out.shape[-1])
        step = max(1, AT_ONCE // out.shape[-1])
        try:
            # The package makes several arrays of the size of what it is given: of SmolLM2's
            # embedding, of 108 MiB, whole, 240 MiB.
            for begin in range(0, len(flat), step):
                part = slice(begin, begin + step)
                floats[part] = gguf.quants.dequantize(flat[part], kind)
            return out
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.where(entry)}: is quantized as {kind.name}, which the gguf package cannot "
                "dequantize; use another quantization of the model"
            ) from error

    def kind_name(self, entry: Entry) -> str:
        """Return the name of a tensor's type."""
        return _package(self.where(entry)).GGMLQuantizationType(entry.kind).name

    def where(self, entry: Entry) -> str:
        """File and name, for messages."""
        return f"{self.path}: tensor {entry.name}"

    def forget(self) -> None:
        """Let the system reclaim the pages that have been read."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def check_sizes(self) -> None:
        """DataError where a tensor lies outside of the file or in another; ConfigError where its
        type is unknown, or the gguf package that knows it is not installed."""
        end, before = 0, ""
        for entry in sorted(self.entries.values(), key=lambda entry: entry.start):
            size, width = self._block(entry)
            if entry.shape[-1] % size:
                raise DataError(
                    f"{self.where(entry)}: rows of {entry.shape[-1]} numbers are no whole blocks "
                    f"of {size}"
                )
            if entry.start < end:
                raise DataError(f"{self.where(entry)} overlaps tensor {before}")
            end = entry.start + math.prod(entry.shape) // size * width
            if end > len(self._map):
                raise DataError(
                    f"{self.where(entry)} {list(entry.shape)}: ends at byte {end:,}, and the file "
                    f"at {len(self._map):,}; get the file again"
                )
            before = entry.name

    def _block(self, entry: Entry) -> tuple[int, int]:
        """Return the numbers of a block and its bytes."""
        if entry.kind in FLOATS:
            return 1, FLOATS[entry.kind].itemsize
        gguf = _package(self.where(entry))
        sizes = {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
        if entry.kind not in sizes:
            raise ConfigError(
                f"{self.where(entry)}: has ggml type {entry.kind}, which the gguf package does "
                "not know; update it, or use another quantization of the model"
            )
        return sizes[entry.kind]

    def _read_header(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        (version,) = self._unpack("<I")
        if version not in VERSIONS:
            raise DataError(f"{self.path}: GGUF version {version}; read are 2 and 3, little-endian")
        tensors, keys = self._unpack("<QQ")
        # The shortest description takes 24 bytes, the shortest key with its value 13.
        self._check_room(tensors * 24 + keys * 13, f"{tensors:,} tensors and {keys:,} keys")
        metadata = dict[str, Any]()
        for _ in range(keys):
            key = self._text()
            if key in metadata:
                raise DataError(f"{self.path}: key {quoted(key)} is there twice")
            metadata[key] = self._value(key)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise DataError(f"{self.path}: general.alignment={quoted(alignment)}: is no size")
        described = [self._description() for _ in range(tensors)]
        begin = -(-self._at // alignment) * alignment
        entries = dict[str, Entry]()
        for name, shape, kind, offset in described:
            if name in entries:
                raise DataError(f"{self.path}: tensor {name} is there twice")
            entries[name] = Entry(name, shape, kind, begin + offset)
        return metadata, entries

    def _description(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        (dims,) = self._unpack("<I")
        if not name.isprintable() or not 0 < len(name) <= LONGEST_NAME or not 0 < dims <= MOST_DIMS:
            raise DataError(f"{self.path}: tensor {quoted(name)} of {dims} dimensions: is none")
        sizes = self._unpack(f"<{dims}Q")
        kind, offset = self._unpack("<IQ")
        if not all(0 < size < 1 << 48 for size in sizes) or offset >= 1 << 60:
            raise DataError(f"{self.path}: tensor {name}: has sizes {[*sizes]} at {offset}")
        # The format writes the contiguous dimension first.
        return name, sizes[::-1], kind, offset

    def _value(self, key: str) -> Any:
        (kind,) = self._unpack("<I")
        if kind == TEXT:
            return self._text()
        if kind in NUMBERS:
            number = self._array(NUMBERS[kind], 1)[0]
            # The shortest that is this float32: 1e-05, not 9.999999747378752e-06.
            return float(str(number)) if number.dtype == np.float32 else number.item()
        if kind != ARRAY:
            raise DataError(f"{self.path}: key {quoted(key)}: has the unknown type {kind}")
        kind, count = self._unpack("<IQ")
        if kind != TEXT and kind not in NUMBERS:
            raise DataError(f"{self.path}: key {quoted(key)}: is an array of the type {kind}")
        width = 8 if kind == TEXT else NUMBERS[kind].itemsize
        self._check_room(count * width, f"key {quoted(key)} with {count:,} values")
        if kind in NUMBERS:
            return self._array(NUMBERS[kind], count)
        return self._texts(count)

    def _array(self, dtype: np.dtype, count: int) -> np.ndarray:
        self._check_room(count * dtype.itemsize, "a value")
        array = np.ndarray(count, dtype, self._map, self._at)
        self._at += array.nbytes
        return array

    def _text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        data, texts = self._map, list[str]()
        at = self._at
        # A flat loop: a tokenizer has up to 700,000 texts, and each takes 0.6 us here.
        for _ in range(count):
            start = at + 8
            size = int.from_bytes(data[at:start], "little")
            self._at, at = at, start + size
            if at > LARGEST_HEADER or at > len(data):
                self._check_room(8 + size, f"a text of {size:,} bytes")
            texts.append(data[start:at].decode())
        self._at = at
        return texts

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._map, self._at)
        self._at += struct.calcsize(form)
        return values

    def _check_room(self, size: int, what: str) -> None:
        """DataError where so many bytes of the header cannot follow."""
        left = min(len(self._map), LARGEST_HEADER) - self._at
        if size > left:
            raise DataError(
                f"{self.path}: byte {self._at:,}: claims {what}, {size:,} bytes at least, where "
                f"{left:,} of the file or of the {LARGEST_HEADER:,} allowed for a header are left"
            )


def _package(where: str) -> Any:
    """Import the gguf package; ConfigError where it is absent."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise ConfigError(
            f"{where}: is quantized, and numbers of GGUF files are read by the gguf package: "
            f"{installing('gguf')}"
        ) from None
    return gguf
