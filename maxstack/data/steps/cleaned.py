"""All of data.steps: passes over every document, comparisons between them, and what is left."""

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
from maxstack.data.engines import Engine
from maxstack.data.files import digest
from maxstack.data.shared_files import shared_files
from maxstack.data.steps import duplicates, summary
from maxstack.data.steps.kinds import Found, changed, found, opened
from maxstack.data.steps.passes import REMOVED, Job, Range, read_note, run
from maxstack.data.steps.step import Step
from maxstack.errors import ConfigError, DataError
from maxstack.report.progress import progress
from maxstack.schema.data import DataConfig
from maxstack.schema.steps import GLOBAL, AnyStep, names_of

NOTES, PASSES = ".steps", "passes"
_FORMAT = 2
_LARGEST_RANGE = 10_000
Sources = Mapping[tuple[str, Split], Documents]


class Cleaned(Selection):
    """The documents of a source that no step removed, after the steps that change texts."""

    def __init__(
        self,
        documents: Documents,
        indices: np.ndarray,
        steps: Sequence[AnyStep],
        found: Found,
        plan: str,
    ):
        super().__init__(documents, indices)
        self._all, self._found, self._plan = steps, found, plan

    @functools.cached_property
    def _steps(self) -> dict[int, Step]:
        """The steps, which no pickle holds."""
        return opened(self._all, self._found, changing=True)

    def __getitem__(self, index: int) -> bytes:
        document = super().__getitem__(index)
        assert isinstance(document, bytes)
        return changed(document.decode(), self._steps).encode()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_steps"}

    def identity(self) -> str:
        return digest(f"{super().identity()} {self._plan}".encode())


def cleaned(
    cfg: DataConfig,
    sources: Sources,
    out: str,
    engine: Engine,
    task_texts: Mapping[str, Sequence[str]],
) -> tuple[dict[tuple[str, Split], Documents], dict[str, Any]]:
    """What data.steps leave of sources, and the summary for the manifest.

    Notes in OUT/.steps, removed documents in OUT/removed, and OUT/report.html are written; notes
    of an earlier, stopped call are used. ConfigError where `out` holds the shards of other data.
    """
    steps = cfg.steps
    data = found(steps, task_texts)
    opened(steps, data)  # names what is not installed
    plan = _plan(cfg, sources, data)
    notes = storage.join(out, f"{NOTES}/{plan}")
    result = storage.join(notes, "result.npz")
    if storage.kind(result) is None:
        _begin(out, notes)
        passes = storage.join(notes, PASSES)
        read = (path for documents in sources.values() for path in documents.paths())
        files = shared_files(read, storage.join(passes, "begun"))
        job = Job(steps, names_of(steps), data, sources, _ranges(sources), out, passes, files)
        _run(job, engine, result)
    storage.delete(notes, PASSES)
    kept = read_note(result)
    told = json.loads(kept["summary"].tobytes())
    left: dict[tuple[str, Split], Documents] = {}
    for number, (key, documents) in enumerate(sources.items()):
        indices = kept[str(number)]
        if not len(indices):
            raise DataError(
                f"source {key[0]} ({key[1]}): data.steps removed all of its {len(documents)} "
                f"documents; `maxstack data removed {out}` shows why"
            )
        left[key] = Cleaned(documents, indices, steps, data, plan)
    return left, told


def _plan(cfg: DataConfig, sources: Sources, data: Found) -> str:
    """A hash of everything that the steps' result depends on."""
    files = [
        (path, *storage.stamp(path)) for documents in sources.values() for path in documents.paths()
    ]
    described = [
        _FORMAT,
        [step.model_dump(mode="json") for step in cfg.steps],
        [source.model_dump(mode="json", exclude={"weight", "partial"}) for source in cfg.sources],
        [(*key, documents.identity()) for key, documents in sources.items()],
        files,
        [*data.items()],
    ]
    return digest(json.dumps(described, default=np.ndarray.tolist).encode())


def _begin(out: str, notes: str) -> None:
    """Delete what other steps left. ConfigError where other data is complete."""
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
        size = max(1, min(_LARGEST_RANGE, math.ceil(len(documents) / 16)))
        for start in range(0, len(documents), size):
            made.append(Range(len(made), *key, start, min(start + size, len(documents))))
    return made


def _run(job: Job, engine: Engine, result: str) -> None:
    """Run all passes, and write what is left and the summary."""
    passes = 1 + sum(isinstance(step, GLOBAL) for step in job.steps)
    documents, ranges = sum(map(len, job.documents.values())), job.ranges
    for number in range(passes):
        job = dataclasses.replace(job, number=number)
        with progress(documents, f"steps, pass {number + 1} of {passes}", "documents") as bar:
            for _, count in engine.map(run, job, ranges):
                bar.update(count)
        if not job.last:
            ranges = _compared(job)
    kept, told = summary.gather(job)
    summary.write_page(told, job.out)
    with storage.replacing(result) as unfinished, unfinished.open("wb") as file:
        text = np.frombuffer(json.dumps(told).encode(), np.uint8)
        np.savez(file, summary=text, **kept)  # type: ignore[arg-type]


def _compared(job: Job) -> list[Range]:
    """The ranges, with what comparing all documents that are left says of each."""
    step = job.steps[job.span[1]]
    assert isinstance(step, GLOBAL)
    notes = [job.path(job.number, each) for each in job.ranges]
    alive = [np.flatnonzero(read_note(path)["by"] == -1) for path in notes]
    starts = np.cumsum([0, *map(len, alive)])
    numbers, kind = duplicates.width(step)
    folder = storage.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        for path in notes:
            np.asarray(read_note(path)["signatures"], kind).tofile(file)
        file.flush()
        shape = int(starts[-1]), numbers
        signatures = np.memmap(file, kind, "r", shape=shape) if shape[0] else np.zeros(shape, kind)
        kept, similarity = duplicates.keepers(step, signatures)
        del signatures
    owner = np.repeat(np.arange(len(alive)), np.diff(starts))
    index = np.concatenate([r.start + at for r, at in zip(job.ranges, alive, strict=True)])
    made = []
    for each, at, start in zip(job.ranges, alive, starts, strict=False):
        own = kept[start : start + len(at)]
        keepers = np.full((each.stop - each.start, 3), -1, np.int64)
        gone = own != np.arange(start, start + len(at))
        parts = owner[own], index[own], np.round(similarity[start : start + len(at)] * 1e6)
        keepers[at[gone]] = np.stack(parts, 1)[gone]
        made.append(dataclasses.replace(each, keepers=keepers))
    return made
