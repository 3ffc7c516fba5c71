"""The whole of data.steps: passes over all documents, comparisons between them, and the result.

With K filters that compare documents there are K + 1 passes (passes.py). After each pass but the
last, the main process reads the signatures from the notes of all ranges and finds the clusters of
duplicates; of each cluster the first document in the order of sources, splits and indices is kept.
Signatures are kept in a file and mapped, since 512 bytes for each of many millions of documents do
not fit in memory.
"""

import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxstack.config import storage
from maxstack.data.documents import Documents, Selection, Split
from maxstack.data.engines import Engine, shared_files
from maxstack.data.files import digest
from maxstack.data.filters import duplicates, summary
from maxstack.data.filters.chain import FilterData, change, open_filters, read_data
from maxstack.data.filters.filter import Filter
from maxstack.data.filters.passes import REMOVED, Job, Range, read_note, run
from maxstack.errors import ConfigError, DataError
from maxstack.report.progress import progress
from maxstack.schema.data import DataConfig
from maxstack.schema.filters import GLOBAL, AnyFilter, may_change, names_of

NOTES, PASSES = ".steps", "passes"
_FORMAT = 2
_LARGEST_RANGE = 10_000
Sources = Mapping[tuple[str, Split], Documents]


class FilteredDocuments(Selection):
    """The documents of a source that no filter removed, as the filters change them."""

    def __init__(
        self,
        documents: Documents,
        indices: np.ndarray,
        sections: Sequence[AnyFilter],
        data: FilterData,
        plan: str,
    ):
        super().__init__(documents, indices)
        self._sections = sections
        self._data = data
        self._plan = plan

    @functools.cached_property
    def _filters(self) -> dict[int, Filter]:
        """Filters that change texts; pickles leave them out."""
        filters = open_filters(self._sections, self._data)
        return {n: each for n, each in filters.items() if may_change(self._sections[n])}

    def __getitem__(self, index: int) -> bytes:
        document = super().__getitem__(index)
        assert isinstance(document, bytes)
        return change(document.decode(), self._filters).encode()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_filters"}

    def identity(self) -> str:
        return digest(f"{super().identity()} {self._plan}".encode())


def filter_sources(
    cfg: DataConfig,
    sources: Sources,
    out: str,
    engine: Engine,
    task_texts: Mapping[str, Sequence[str]],
) -> tuple[dict[tuple[str, Split], Documents], dict[str, Any]]:
    """Apply data.steps to sources. Return the documents that are left, and the summary for the
    manifest.

    Writes notes to OUT/.steps, removed documents to OUT/removed, and OUT/report.html; uses the
    notes of an earlier call that was stopped. ConfigError if `out` holds shards of other data.
    """
    sections = cfg.steps
    data = read_data(sections, task_texts)
    open_filters(sections, data)  # a package that is missing is an error before the first pass
    plan = _plan(cfg, sources, data)
    notes = storage.join(out, f"{NOTES}/{plan}")
    result = storage.join(notes, "result.npz")
    if storage.kind(result) is None:
        _begin(out, notes)
        passes = storage.join(notes, PASSES)
        read = (path for documents in sources.values() for path in documents.paths())
        files = shared_files(read, storage.join(passes, "begun"))
        job = Job(sections, names_of(sections), data, sources, _ranges(sources), out, passes, files)
        _run(job, engine, result)
    # After the result is whole, which needs no note any more.
    storage.delete(notes, PASSES)
    kept = read_note(result)
    counts = json.loads(kept["summary"].tobytes())
    left: dict[tuple[str, Split], Documents] = {}
    for number, (key, documents) in enumerate(sources.items()):
        indices = kept[str(number)]
        if not len(indices):
            raise DataError(
                f"source {key[0]} ({key[1]}): data.steps removed all of its {len(documents)} "
                f"documents; `maxstack data removed {out}` shows why"
            )
        # Indices and filters rather than texts, which would be stored once more.
        left[key] = FilteredDocuments(documents, indices, sections, data, plan)
    return left, counts


def _plan(cfg: DataConfig, sources: Sources, data: FilterData) -> str:
    """Return a hash of everything that the result depends on."""
    files = [
        (path, *storage.stamp(path)) for documents in sources.values() for path in documents.paths()
    ]
    # The texts of tasks and lists of words are part of `data`, so changed files are another plan.
    described = [
        _FORMAT,
        [section.model_dump(mode="json") for section in cfg.steps],
        [source.model_dump(mode="json", exclude={"weight", "partial"}) for source in cfg.sources],
        [(*key, documents.identity()) for key, documents in sources.items()],
        files,
        [*data.items()],
    ]
    return digest(json.dumps(described, default=np.ndarray.tolist).encode())


def _begin(out: str, notes: str) -> None:
    """Delete what other filters left. ConfigError if shards of other data are complete."""
    if storage.kind(notes) is not None or storage.kind(out) is None:
        return
    if storage.kind(storage.join(out, "manifest.json")) is not None:
        raise ConfigError(
            f"{out}: holds shards of other data (other documents or data.steps than this config's) "
            "or of an older version; choose another --out, or delete the folder"
        )
    storage.delete(out, REMOVED, NOTES)


def _ranges(sources: Sources) -> list[Range]:
    made: list[Range] = []
    for key, documents in sources.items():
        # By the documents alone, so that notes serve any engine and number of workers.
        size = max(1, min(_LARGEST_RANGE, math.ceil(len(documents) / 16)))
        for start in range(0, len(documents), size):
            made.append(Range(len(made), *key, start, min(start + size, len(documents))))
    return made


def _run(job: Job, engine: Engine, result: str) -> None:
    """Run all passes, and write the indices of what is left and the summary."""
    passes = 1 + sum(isinstance(section, GLOBAL) for section in job.sections)
    documents = sum(map(len, job.documents.values()))
    ranges = job.ranges
    for number in range(passes):
        job = dataclasses.replace(job, number=number)
        with progress(documents, f"filters, pass {number + 1} of {passes}", "documents") as bar:
            for _, count in engine.map(run, job, ranges):
                bar.update(count)
        if not job.last:
            ranges = _compare(job)
    kept, counts = summary.gather(job)
    summary.write_page(counts, job.out)
    with storage.replacing(result) as unfinished, unfinished.open("wb") as file:
        text = np.frombuffer(json.dumps(counts).encode(), np.uint8)
        np.savez(file, summary=text, **kept)  # type: ignore[arg-type]


def _compare(job: Job) -> list[Range]:
    """Compare all documents that are left. Return the ranges with the result for each."""
    section = job.sections[job.span[1]]
    assert isinstance(section, GLOBAL)
    notes = [job.note_path(job.number, each) for each in job.ranges]
    alive = [np.flatnonzero(read_note(path)["by"] == -1) for path in notes]
    starts = np.cumsum([0, *map(len, alive)])
    numbers, kind = duplicates.signature_type(section)
    folder = storage.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        for path in notes:
            # A range without documents has an array of another type.
            np.asarray(read_note(path)["signatures"], kind).tofile(file)
        file.flush()
        shape = int(starts[-1]), numbers
        # An empty file cannot be mapped.
        signatures = np.memmap(file, kind, "r", shape=shape) if shape[0] else np.zeros(shape, kind)
        kept, similarity = duplicates.find_keepers(section, signatures)
        del signatures  # closes the map before the file goes
    owner = np.repeat(np.arange(len(alive)), np.diff(starts))
    index = np.concatenate([r.start + at for r, at in zip(job.ranges, alive, strict=True)])
    made = []
    # Each task gets the result for its own range alone, not the labels of all documents.
    for each, at, start in zip(job.ranges, alive, starts, strict=False):
        own = kept[start : start + len(at)]
        keepers = np.full((each.stop - each.start, 3), -1, np.int64)
        # The first document of a cluster is its own keeper.
        gone = own != np.arange(start, start + len(at))
        parts = owner[own], index[own], np.round(similarity[start : start + len(at)] * 1e6)
        keepers[at[gone]] = np.stack(parts, 1)[gone]
        made.append(dataclasses.replace(each, keepers=keepers))
    return made
