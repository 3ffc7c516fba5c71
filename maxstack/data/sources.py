"""Sources of documents, and their splits into training and held-out documents.

A document is held out if a hash of its file's key and its number, scaled to [0, 1), is below
`holdout`. This reads nothing and does not change when other files are added. Copies of a document
may then lie on both sides, so `holdout_by: content` hashes what documents hold instead, after
reading all of them once. Files of many documents each: records.py.
"""

import functools
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from maxstack.config import storage
from maxstack.config.annotations import listed
from maxstack.config.own_kinds import last_name, resolve
from maxstack.data.copies import read_file
from maxstack.data.documents import (
    Documents,
    Selection,
    Split,
    content_hash,
    file_hashes,
    mark_files,
    record_hashes,
    text_hash,
)
from maxstack.data.files import clean_text, digest, match_files
from maxstack.errors import ConfigError, DataError, StoreError
from maxstack.report.progress import progress
from maxstack.schema.data import (
    AnySource,
    ArrayRecordSource,
    DataConfig,
    Files,
    FunctionSource,
    GrainSource,
    SyntheticSource,
    TextSource,
)

MOST = 1 << 48
"""Elements of a dataset that ends."""


class WholeFiles(Documents):
    """Each file is a document."""

    def __init__(self, cfg: TextSource):
        self._cfg, self.files = cfg, match_files(cfg)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> bytes:
        file = self.files[index]
        return clean_text(read_file(file, self._cfg.max_bytes), self._cfg, file.path)

    def where(self, index: int) -> str:
        return self.files[index].path

    def by_file(self) -> tuple[list[str], np.ndarray]:
        return mark_files(self.files, np.ones(len(self.files), np.int64))

    def hashes(self) -> np.ndarray:
        return file_hashes(self.files)

    def identity(self) -> str:
        keys = "\0".join(file.key for file in self.files)
        return digest(keys.encode())


class Synthetic(Documents):
    """Uniformly random tokens; document i depends on i alone."""

    def __init__(self, cfg: SyntheticSource):
        self._cfg = cfg

    def __len__(self) -> int:
        return self._cfg.documents

    def __getitem__(self, index: int) -> np.ndarray:
        # Seeded by the index, so a document is the same in any process and order.
        random, length = np.random.Generator(np.random.PCG64(index)), self._cfg.length
        if self._cfg.ragged:
            length = int(random.integers(1, length, endpoint=True))
        return random.integers(0, self._cfg.vocab, length, np.int32)

    def where(self, index: int) -> str:
        return f"synthetic document {index}"

    def hashes(self) -> np.ndarray:
        return record_hashes(np.uint64(0), len(self))

    def identity(self) -> str:
        cfg = self._cfg
        return f"synthetic {cfg.documents} {cfg.length} {cfg.ragged} {cfg.vocab}"


class FunctionDocuments(Documents):
    """Documents made by a function."""

    def __init__(self, cfg: FunctionSource):
        self._cfg = cfg
        self._call  # noqa: B018  names a function that is not there

    def __len__(self) -> int:
        return self._cfg.documents

    def __getitem__(self, index: int) -> bytes:
        made = self._call(index)
        text = json.dumps(made, ensure_ascii=False) if self._cfg.record else made
        if not isinstance(text, str):
            raise DataError(f"{self.where(index)}: is a {type(made).__name__}, not text")
        return text.encode()

    def where(self, index: int) -> str:
        return f"{self._cfg.call}({index})"

    def hashes(self) -> np.ndarray:
        # The name of the function decides what is held out, so renaming one changes figures.
        return record_hashes(np.uint64(text_hash(self._cfg.call)), len(self))

    def identity(self) -> str:
        return f"{self._cfg.call} {self._cfg.documents} {self._cfg.record}"

    @functools.cached_property
    def _call(self) -> Callable[[int], Any]:
        """The function, which no pickle holds."""
        return _resolve_call(self._cfg.call)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_call"}


class GrainDocuments(Documents):
    """Elements of a grain.MapDataset."""

    def __init__(self, cfg: GrainSource):
        self._cfg = cfg
        self._size = len(self._dataset)
        if self._size > MOST:
            raise ConfigError(
                f"data.sources: call: {cfg.call}: repeats without end; leave repeat() out, since "
                "passes are the run's (sources.*.epochs, train.epochs)"
            )

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> bytes | np.ndarray:
        found = element = self._dataset[index]
        if isinstance(element, Mapping):
            if self._cfg.record:
                return json.dumps(element, ensure_ascii=False, default=_to_json).encode()
            if self._cfg.field not in element:
                keys = listed([*map(str, element)])
                raise DataError(f"{self.where(index)}: no {self._cfg.field} in it; it has {keys}")
            found = element[self._cfg.field]
        if found is None:  # what a filter leaves out
            return b""
        if isinstance(found, np.ndarray) and found.dtype.kind in "iu" and found.ndim == 1:
            return found.astype(np.int32)
        if isinstance(found, str):
            return found.encode()
        if isinstance(found, bytes):
            return found
        raise DataError(
            f"{self.where(index)}: is a {type(found).__name__}; wanted: a text, an array of ids, "
            "or a mapping with one of them"
        )

    def where(self, index: int) -> str:
        return f"{self._cfg.call}()[{index}]"

    def hashes(self) -> np.ndarray:
        return record_hashes(np.uint64(text_hash(self._cfg.call)), len(self))

    def identity(self) -> str:
        return f"{self._cfg.call} {len(self)} {self._cfg.field} {self._cfg.record}"

    @functools.cached_property
    def _dataset(self) -> Any:
        """The dataset, which no pickle holds."""
        import grain

        made = _resolve_call(self._cfg.call)()
        if isinstance(made, grain.MapDataset):
            return made
        why = f"is a {type(made).__name__}"
        if isinstance(made, grain.IterDataset):
            why = (
                "is an IterDataset, which gives no element by its number, and lanes, resuming on "
                "other devices and holdout go by numbers"
            )
        raise ConfigError(
            f"data.sources: call: {self._cfg.call}: {why}; return the grain.MapDataset before "
            "to_iter_dataset(), or write its texts to files"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_dataset"}


def _resolve_call(call: str) -> Callable[..., Any]:
    """Return what module:function names, of the working folder too, as for `python -m`."""
    try:
        function: Callable[..., Any] = resolve(call)
        return function
    except ConfigError as error:
        raise DataError(f"data.sources: call: {call}: {error}") from error


def _to_json(value: Any) -> Any:
    """Return what JSON has for numpy's numbers and arrays, and for bytes."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"{type(value).__name__} is no JSON")


def open_source(cfg: AnySource, index: int = 0, split: Split = "train") -> Documents:
    """Return the documents of one split of the source at an index of data.sources. DataError if the
    source, or the split, is empty."""
    kind = pkgutil.resolve_name(cfg.DOCUMENTS)
    if isinstance(cfg, TextSource) and cfg.separator is not None:
        from maxstack.data import records

        kind = records.Separated
    documents: Documents = kind(cfg)
    documents.name = cfg.name or f"{last_name(cfg.kind)}-{index}"
    documents.record = cfg.record
    if not len(documents):
        files = f" ({', '.join(cfg.files)})" if isinstance(cfg, Files) else ""
        empty = "; every file is empty" if files else ""
        raise DataError(f"source {documents.name}{files}: no document in it{empty}")
    # No hash of millions of documents if nothing is held out.
    if split == "all" or (split == "train" and not cfg.holdout):
        return documents
    hashes = _hash_contents(documents) if cfg.holdout_by == "content" else documents.hashes()
    # 53 bits are what a float64 in [0, 1) holds exactly.
    held = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 < cfg.holdout
    indices = np.flatnonzero(held if split == "eval" else ~held)
    if not len(indices):
        advice = {
            "eval": "falls into the holdout; raise it",
            "train": "is left for training; lower it",
        }
        raise DataError(
            f"source {documents.name}: with holdout={cfg.holdout} none of its "
            f"{len(held)} documents {advice[split]}"
        )
    return Selection(documents, indices)


def _hash_contents(documents: Documents) -> np.ndarray:
    """Return uint64 hashes of what documents hold; of those that cannot be read, of their
    places."""
    # Of a local file the time too: an edit in place may keep the size.
    stamps = [file.version or storage.stamp(file.path) for file in documents.files]
    described = [documents.identity(), *stamps]
    kept = storage.cache_folder() / "contents" / f"{digest(json.dumps(described).encode())}.npy"
    if kept.exists():
        return np.load(kept)
    # Also the hashes of documents that cannot be read, so that these stay on one side.
    hashes = documents.hashes()
    with progress(len(documents), f"holdout of {documents.name}", "documents") as bar:
        for index in range(len(documents)):
            bar.update()
            try:
                document = documents[index]
            # The store may be back later; a split by another hash would stay for good.
            except StoreError:
                raise
            except DataError:
                continue
            parts = (document,) if isinstance(document, bytes | np.ndarray) else document[:1]
            hashes[index] = content_hash(parts[0])
    with storage.replacing(str(kept)) as unfinished, open(unfinished, "wb") as file:
        np.save(file, hashes)
    return hashes


def open_sources(cfg: DataConfig, evaluation: bool = False, whole: bool = False) -> list[Documents]:
    """Return all sources of `cfg` for training, or their held-out documents; `whole`: also all
    documents of the sources that hold nothing out."""
    from maxstack.data.shards import check_tokenizer, refuse_held_out

    # Some filters compare all documents, which no lane could do as it reads.
    if cfg.steps:
        raise ConfigError(
            "data.steps are applied by `maxstack data prepare`; train on what it writes, with "
            "data.steps=[]"
        )
    for source in cfg.sources:
        if isinstance(source, ArrayRecordSource) and source.content == "tokens":
            paths = [file.path for file in match_files(source)]
            check_tokenizer(paths, cfg.tokenizer)
            if not evaluation:
                refuse_held_out(paths)
    if not evaluation:
        opened = [open_source(source, index) for index, source in enumerate(cfg.sources)]
        check_classes(opened)
        return opened
    opened = [
        open_source(source, index, "eval" if source.holdout else "all")
        for index, source in enumerate(cfg.sources)
        if source.holdout or whole
    ]
    if not opened:
        raise DataError(
            "nothing to evaluate on: no source holds documents out; set `holdout` in one "
            "of data.sources, or give eval.data"
        )
    check_classes(opened)
    return opened


def check_classes(sources: Sequence[Documents]) -> None:
    """DataError if folders of two sources number their classes in two ways."""
    named = [source for source in sources if source.classes]
    for other in named[1:]:
        if other.classes != named[0].classes:
            raise DataError(
                f"{named[0].name} has the folders {listed([*named[0].classes])} and {other.name} "
                f"{listed([*other.classes])}, so the same number would mean two classes; give both "
                "the same folders"
            )
