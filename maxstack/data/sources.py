"""Sources of documents: random access by index, a stable hash of each document's key for the
holdout. Many documents a file: records.py."""

import hashlib
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import numpy as np

from maxstack.data import DataError
from maxstack.data.config import (
    AnySource,
    ArrayRecordSource,
    DataConfig,
    SyntheticSource,
    TextSource,
)
from maxstack.data.files import File, matched, read, text_of

Split = Literal["train", "eval", "all"]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Tokens(NamedTuple):
    """A document that was kept as tokens."""

    ids: np.ndarray
    """int32 [N]."""
    sizes: np.ndarray | None
    """int64 [K, 2]: a place in ids, and how many bytes of text that token stands for where these
    are not the vocabulary's; None: not known."""


Document = bytes | np.ndarray | Tokens
"""UTF-8 text as bytes, or token ids, int32 [N] if there never was a text."""


class Documents(ABC):
    """A source as a random-access sequence, as grain wants it. Pickled into workers, so files open
    at first use."""

    name: str = ""

    @abstractmethod
    def __len__(self) -> int:
        """How many documents."""

    @abstractmethod
    def __getitem__(self, index: int) -> Document:
        """A document. DataError, naming the file and record, if it cannot be read."""

    @abstractmethod
    def where(self, index: int) -> str:
        """The document's file and record, for messages."""

    @abstractmethod
    def paths(self) -> list[str]:
        """The files behind it."""

    @abstractmethod
    def hashes(self) -> np.ndarray:
        """A uint64 hash of each document's key, the same on every machine."""

    @abstractmethod
    def identity(self) -> str:
        """Changes when documents are added, removed or renamed."""


class Selection(Documents):
    """Some of another source's documents."""

    def __init__(self, documents: Documents, indices: np.ndarray):
        self.name = documents.name
        self._documents, self._indices = documents, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Document:
        return self._documents[int(self._indices[index])]

    def where(self, index: int) -> str:
        return self._documents.where(int(self._indices[index]))

    def paths(self) -> list[str]:
        return self._documents.paths()

    def hashes(self) -> np.ndarray:
        return self._documents.hashes()[self._indices]

    def identity(self) -> str:
        return hashlib.blake2b(
            self._indices.tobytes() + self._documents.identity().encode(), digest_size=16
        ).hexdigest()


class WholeFiles(Documents):
    """Each file is a document."""

    def __init__(self, cfg: TextSource):
        self._cfg, self._files = cfg, matched(cfg)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> bytes:
        path = self._files[index].path
        return text_of(read(path), self._cfg, path)

    def where(self, index: int) -> str:
        return self._files[index].path

    def paths(self) -> list[str]:
        return [file.path for file in self._files]

    def hashes(self) -> np.ndarray:
        return file_hashes(self._files)

    def identity(self) -> str:
        return hashlib.blake2b(
            "\0".join(file.key for file in self._files).encode(), digest_size=16
        ).hexdigest()


class Synthetic(Documents):
    """Uniformly random tokens; document i depends on i alone."""

    def __init__(self, cfg: SyntheticSource):
        self._cfg = cfg

    def __len__(self) -> int:
        return self._cfg.documents

    def __getitem__(self, index: int) -> np.ndarray:
        random = np.random.Generator(np.random.PCG64(index))
        length = (
            int(random.integers(1, self._cfg.length, endpoint=True))
            if self._cfg.ragged
            else self._cfg.length
        )
        return random.integers(0, self._cfg.vocab, length, np.int32)

    def where(self, index: int) -> str:
        return f"synthetic document {index}"

    def paths(self) -> list[str]:
        return []

    def hashes(self) -> np.ndarray:
        return record_hashes(np.uint64(0), len(self))

    def identity(self) -> str:
        return repr(self._cfg)


def open_source(cfg: AnySource, place: int = 0, split: Split = "train") -> Documents:
    """A source's documents of one split. DataError if the source, or what the split leaves of it,
    is empty."""
    from maxstack.data import records

    kinds = {
        "jsonl": records.Jsonl,
        "parquet": records.Parquet,
        "array_record": records.ArrayRecords,
        "bagz": records.Bagz,
        "synthetic": Synthetic,
    }
    kind = (
        (WholeFiles if cfg.separator is None else records.Separated)
        if isinstance(cfg, TextSource)
        else kinds[cfg.kind]
    )
    documents: Documents = kind(cfg)  # type: ignore[abstract, operator]
    documents.name = cfg.name or f"{cfg.kind}-{place}"
    if not len(documents):
        files = f" ({', '.join(cfg.files)})" if not isinstance(cfg, SyntheticSource) else ""
        raise DataError(f"source {documents.name}{files}: no document in it; every file is empty")
    if split == "all" or (split == "train" and not cfg.holdout):
        return documents
    held = (documents.hashes() >> np.uint64(11)).astype(np.float64) * 2.0**-53 < cfg.holdout
    indices = np.flatnonzero(held if split == "eval" else ~held)
    if not len(indices):
        side = (
            "falls into the holdout; raise it"
            if split == "eval"
            else "is left for training; lower it"
        )
        raise DataError(
            f"source {documents.name}: with holdout={cfg.holdout} none of its "
            f"{len(held)} documents {side}"
        )
    return Selection(documents, indices)


def open_sources(cfg: DataConfig, evaluation: bool = False, whole: bool = False) -> list[Documents]:
    """All sources of `cfg` for training, or what they hold out; `whole`: also all of the sources
    that hold nothing out."""
    from maxstack.data.shards import check_tokenizer, refuse_held_out

    for source in cfg.sources:
        if isinstance(source, ArrayRecordSource) and source.content == "tokens":
            paths = [file.path for file in matched(source)]
            check_tokenizer(paths, cfg.tokenizer)
            if not evaluation:
                refuse_held_out(paths)
    if not evaluation:
        return [open_source(source, place) for place, source in enumerate(cfg.sources)]
    opened = [
        open_source(source, place, "eval" if source.holdout else "all")
        for place, source in enumerate(cfg.sources)
        if source.holdout or whole
    ]
    if not opened:
        raise DataError(
            "nothing to evaluate on: no source holds documents out; set `holdout` in one "
            "of data.sources, or give eval.data"
        )
    return opened


def file_hashes(files: list[File]) -> np.ndarray:
    """The uint64 hash of each file's key."""
    digests = b"".join(hashlib.blake2b(file.key.encode(), digest_size=8).digest() for file in files)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def record_hashes(file: np.uint64, count: int) -> np.ndarray:
    """The uint64 hashes of a file's records 0..count-1 (splitmix64, Steele et al. 2014, seeded by
    the file's hash)."""
    with np.errstate(over="ignore"):
        x = file + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
