"""Documents of a source, as tokens or texts, and which of them are held out."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from maxstack.data.files import File, digest, one_line
from maxstack.errors import DataError
from maxstack.schema.data import ImageRecord, LatentsRecord, Record

Split = Literal["train", "eval", "all"]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Tokens(NamedTuple):
    """A document stored as tokens."""

    ids: np.ndarray
    """int32 [N]."""
    sizes: np.ndarray | None
    """int64 [K, 2]: (index in ids, bytes of text) of the tokens that stand for another number of
    bytes than the vocabulary says; None: not known."""


class Picture(NamedTuple):
    """A document that is a picture."""

    content: bytes | np.ndarray
    """A file, or pixels uint8 [H, W] or [H, W, C]."""
    label: int
    """Its class."""


Document = bytes | np.ndarray | Tokens | Picture
"""UTF-8 text as bytes, token ids, int32 [N] of no text, or a picture."""


class Documents(ABC):
    """A source as a sequence with random access, as Grain uses it. It is pickled into workers, so
    files are opened at first use."""

    name: str = ""
    files: Sequence[File] = ()
    record: Record | None = None
    """The kind of record that each document is, as the text of a JSON object."""
    classes: tuple[str, ...] = ()
    """Names of the classes of pictures, by number, where folders name them."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of documents."""

    @abstractmethod
    def __getitem__(self, index: int) -> Document:
        """Return a document. DataError, naming the file and record, if it cannot be read."""

    def where(self, index: int) -> str:
        """Return a document's file and record, for messages."""
        return f"{self.name} document {index}"

    def place(self, index: int) -> str:
        """Return a document's place as `where` does, without reading the file up to there."""
        return self.where(index)

    def paths(self) -> list[str]:
        """Paths of the source's files."""
        return [file.path for file in self.files]

    def by_file(self) -> tuple[list[str], np.ndarray] | None:
        """Return a mark of each file, and the file of each document, int64 [N]; None if documents
        are not from files."""
        return None

    def hashes(self) -> np.ndarray:
        """Return a uint64 hash of each document's key, the same on every machine."""
        # Not of the identity: more documents must not move those that are there.
        return record_hashes(np.uint64(text_hash(type(self).__qualname__)), len(self))

    @abstractmethod
    def identity(self) -> str:
        """Return a hash that changes when documents are added, removed or renamed."""


class Selection(Documents):
    """Another source's documents at `indices`."""

    def __init__(self, documents: Documents, indices: np.ndarray):
        self.name, self.files = documents.name, documents.files
        self.record, self.classes = documents.record, documents.classes
        self._documents, self._indices = documents, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Document:
        return self._documents[int(self._indices[index])]

    def where(self, index: int) -> str:
        return self._documents.where(int(self._indices[index]))

    def place(self, index: int) -> str:
        return self._documents.place(int(self._indices[index]))

    def by_file(self) -> tuple[list[str], np.ndarray] | None:
        found = self._documents.by_file()
        return (found[0], found[1][self._indices]) if found else None

    def hashes(self) -> np.ndarray:
        return self._documents.hashes()[self._indices]

    def identity(self) -> str:
        return digest(self._indices.tobytes() + self._documents.identity().encode())


def file_hashes(files: Sequence[File]) -> np.ndarray:
    """Return the uint64 hash of each file's key."""
    return np.array([text_hash(file.key) for file in files], np.uint64)


def mark_files(files: Sequence[File], counts: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return `Documents.by_file` of files with these numbers of documents. A mark is a hash of key,
    number of documents, size, and at URLs the version; not of the time of a local file, which
    changes when the file is copied."""
    marks = []
    for file, count in zip(files, counts, strict=True):
        marks.append(f"{text_hash(f'{file.key} {count} {file.pin()}'):016x}")
    return marks, np.repeat(np.arange(len(files)), counts)


def find_part(ends: np.ndarray, index: int) -> tuple[int, int]:
    """Return (part, index within it) of an index into parts that follow each other and end at
    `ends`."""
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)


def text_hash(text: str) -> int:
    """Return a hash of 64 bits, the same on every machine."""
    return content_hash(text.encode())


def content_hash(content: bytes | np.ndarray) -> int:
    """Return a hash of 64 bits of bytes, or of an array's elements."""
    data = content.tobytes() if isinstance(content, np.ndarray) else content
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def record_hashes(file: np.uint64, count: int) -> np.ndarray:
    """Return the uint64 hashes of a file's records 0..count-1 (splitmix64, Steele et al. 2014,
    seeded by the file's hash)."""
    with np.errstate(over="ignore"):
        x = file + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def read_picture(row: Mapping[str, Any], record: ImageRecord | LatentsRecord) -> Picture:
    """Return the picture, or the latents, of a row of Parquet or a tf.train.Example. DataError if a
    column is missing or holds none."""
    where = record.image if isinstance(record, ImageRecord) else record.latents
    for name in (where, record.label):
        if name not in row:
            raise DataError(f"no column '{name}'; it has {one_line(', '.join(map(repr, row)))}")
    content, label = row[where], read_class(row[record.label], f"'{record.label}'")
    if isinstance(record, LatentsRecord):
        of_bytes = isinstance(content, bytes)
        return Picture(
            np.frombuffer(content, "<f2") if of_bytes else np.asarray(content, np.float16), label
        )
    if isinstance(content, Mapping):
        content = content.get("bytes")
    if not isinstance(content, bytes):
        raise DataError(
            f"'{record.image}' is a {type(content).__name__}, not the bytes of a picture"
        )
    return Picture(content, label)


def read_class(value: Any, of: str) -> int:
    """Return a class. DataError if it is no whole number."""
    try:
        return int(value)
    except (TypeError, ValueError):
        raise DataError(f"{of} is {one_line(repr(value))}, not the number of a class") from None
