"""A pass of data.steps over a range of documents: the filters between two that compare documents.

Filters of single documents run range by range, in any process. A filter that compares documents
needs all of them, so it ends a pass: each range leaves a note with signatures of the documents that
are left, the main process compares these (pipeline.py), and the next pass begins with what the
comparison says of the range. A note also has, of each document, the filter that removed it and its
size, and counts, so that passes need nothing but the note before; the removed documents are written
to a file of their own. Filters that change texts run again in each later pass, which is cheaper
than storing all texts between passes. Notes appear whole or not at all, so a killed preparation
goes on from those that are there.
"""

import contextlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard

from maxstack.config import storage
from maxstack.data.documents import Documents, Split
from maxstack.data.engines import SharedFiles, check_shared
from maxstack.data.filters import duplicates
from maxstack.data.filters.chain import FilterData, change, open_filters
from maxstack.data.filters.filter import Filter, Removed
from maxstack.errors import ConfigError, DataError
from maxstack.schema.filters import GLOBAL, AnyFilter, may_change

REMOVED = "removed"
COUNTS = "documents_in", "bytes_in", "documents_out", "bytes_out", "changed"
_BATCH, _BATCH_BYTES = 256, 1 << 24
"""Documents, and bytes of text, whose signatures are made together."""
_SAMPLES, _SAMPLE = 2, 240


@dataclass(frozen=True)
class Range:
    """Documents start..stop of a source's split, and the result of the last comparison."""

    number: int
    source: str
    split: Split
    start: int
    stop: int
    # Not compared: arrays have no single truth value.
    keepers: np.ndarray | None = field(default=None, compare=False, repr=False)
    """int64 [N, 3]: of a document that duplicates another one the number of the other one's range,
    its index in the split, and their similarity in millionths; -1 for others."""

    @property
    def name(self) -> str:
        return f"{self.source}-{self.split}-{self.start:010d}"


@dataclass(frozen=True)
class Job:
    """A pass over all ranges."""

    sections: Sequence[AnyFilter]
    """Of data.steps."""
    names: Sequence[str]
    data: FilterData
    documents: Mapping[tuple[str, Split], Documents]
    ranges: Sequence[Range]
    out: str
    notes: str
    """Folder of the notes."""
    files: SharedFiles
    number: int = 0
    """The number of the pass."""

    @property
    def span(self) -> tuple[int, int]:
        """The number of the first filter of the pass, and of the one that ends it by comparing
        what is left, or the number of filters."""
        stops = [n for n, section in enumerate(self.sections) if isinstance(section, GLOBAL)]
        bounds = [-1, *stops, len(self.sections)]
        return bounds[self.number] + 1, bounds[self.number + 1]

    @property
    def last(self) -> bool:
        return self.span[1] == len(self.sections)

    def note_path(self, number: int, each: Range) -> str:
        """Return the path of the note that a pass leaves for a range."""
        return storage.join(self.notes, f"{number}-{each.name}.npz")


def read_note(path: str) -> dict[str, np.ndarray]:
    """Read a note: `by` int16 [N], the filter that removed each document or -1; `sizes` int64 [N],
    bytes of text; `before`, sizes at the beginning; `counts` int64 [filters, 5] of COUNTS;
    `signatures` of the documents that are left; `more`, counts by rule and samples as JSON."""
    return {**np.load(io.BytesIO(storage.read(path)))}


def run(job: Job, each: Range) -> Iterator[int]:
    """Run a pass over a range and write its note, unless an earlier call did. Yield the number of
    documents."""
    check_shared(job.files)
    path = job.note_path(job.number, each)
    if storage.kind(path) is None:
        try:
            # The file of removed documents is whole before the note, which says that the range is
            # done.
            note = _Pass(job, each).note()
            with storage.replacing(path) as unfinished, unfinished.open("wb") as file:
                np.savez(file, **note)  # type: ignore[arg-type]
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error}; what is finished is kept"
            ) from error
    yield each.stop - each.start


class _Pass:
    """A pass over a range."""

    def __init__(self, job: Job, each: Range):
        self._job = job
        self._range = each
        self._documents = job.documents[each.source, each.split]
        count = each.stop - each.start
        self._by = np.full(count, -1, np.int16)
        self._sizes = np.full(count, -1, np.int64)
        self._first, self._stop = job.span
        if job.number:
            before = read_note(job.note_path(job.number - 1, each))
            self._by = before["by"]
            self._sizes = before["sizes"]
        self._counts = np.zeros((len(job.sections), len(COUNTS)), np.int64)
        self._out: Any = None
        self._rules: dict[str, dict[str, int]] = {}
        self._samples: dict[str, list[dict[str, Any]]] = {}
        self._filters: dict[int, Filter] = {}
        self._before: dict[int, Filter] = {}
        for number, each_filter in open_filters(job.sections, job.data).items():
            if self._first <= number < self._stop:
                self._filters[number] = each_filter
            elif number < self._first and may_change(job.sections[number]):
                self._before[number] = each_filter

    def note(self) -> dict[str, np.ndarray]:
        """Run the pass, write the file of removed documents, and return the note."""
        job = self._job
        before = self._sizes.copy()
        parts = []
        with contextlib.ExitStack() as stack:
            for texts in self._batches(before, stack):
                if not job.last:
                    section = job.sections[self._stop]
                    parts.append(duplicates.signatures(section, texts))  # type: ignore[arg-type]
        # What the comparison before this pass removed is known only now.
        if self._first:
            # What this pass removed was still there after the comparison.
            kept = (self._by == -1) | (self._by >= self._first)
            self._counts[self._first - 1, 2:4] = kept.sum(), before[kept].sum()
        if not job.last:
            alive = self._by == -1
            self._counts[self._stop, :2] = alive.sum(), self._sizes[alive].sum()
        signatures = np.concatenate(parts) if parts else np.zeros((0, 1))
        more = json.dumps([self._rules, self._samples]).encode()
        return {
            "by": self._by,
            "sizes": self._sizes,
            "before": before,
            "counts": self._counts,
            "signatures": signatures,
            "more": np.frombuffer(more, np.uint8),
        }

    def _batches(self, before: np.ndarray, stack: contextlib.ExitStack) -> Iterator[list[str]]:
        """Yield the texts that are left, some at a time."""
        texts: list[str] = []
        size = 0
        for at in map(int, np.flatnonzero(self._by == -1)):
            keeper = None if self._range.keepers is None else self._range.keepers[at]
            gone = keeper is not None and keeper[0] >= 0
            if not gone and not self._filters and self._job.last and self._job.number:
                continue  # the text is neither changed nor removed nor compared any more
            text = self._text(at)
            # Sizes of the source's own texts, before any filter.
            if not self._job.number:
                before[at] = self._sizes[at] = len(text.encode())
            # Filters of earlier passes that change texts run again, which is cheaper than storing
            # all texts.
            text = change(text, self._before)
            if keeper is not None and gone:
                self._remove(at, self._first - 1, text, self._duplicate(keeper), stack)
                continue
            result = self._filter(at, text, stack)
            if isinstance(result, str):
                self._sizes[at] = len(result.encode())
                size += int(self._sizes[at])
                if not self._job.last:
                    texts.append(result)
            # Bounded by bytes too: 256 long documents would fill a worker's memory.
            if len(texts) == _BATCH or size > _BATCH_BYTES:
                yield texts
                texts = []
                size = 0
        yield texts

    def _filter(self, at: int, text: str, stack: contextlib.ExitStack) -> str | Removed:
        """Apply the filters of the pass to a text."""
        for number, each in self._filters.items():
            result = each(text)
            row = self._counts[number]
            # In bytes before each filter, since filters change texts.
            row[:2] += 1, len(text.encode())
            if isinstance(result, Removed):
                self._remove(at, number, text, result, stack)
                return result
            row[2:4] += 1, len(result.encode())
            if result != text:
                row[4] += 1
                # Only while samples are wanted: a difference is found character by character.
                if (samples := self._open_samples("changed", number)) is not None:
                    samples.append({"place": self._place(at), **difference(text, result)})
            text = result
        return text

    def _remove(
        self, at: int, number: int, text: str, why: Removed, stack: contextlib.ExitStack
    ) -> None:
        """Note a removed document, and write it to the file of them."""
        name = self._job.names[number]
        self._by[at] = number
        rules = self._rules.setdefault(name, {})
        rules[why.rule] = rules.get(why.rule, 0) + 1
        row = {
            "step": name,
            "rule": why.rule,
            "value": why.value,
            "source": self._range.source,
            "split": self._range.split,
            "document": int(self._range.start + at),
            "where": self._place(at),
        }
        if (samples := self._open_samples("removed", number)) is not None:
            samples.append(row | {"text": text[: 2 * _SAMPLE]})
        # Opened with the first document, so that ranges without removals leave no file.
        if self._out is None:
            path = f"{REMOVED}/{self._range.name}-{self._job.number}.jsonl.zst"
            unfinished = stack.enter_context(storage.replacing(storage.join(self._job.out, path)))
            file = stack.enter_context(unfinished.open("wb"))
            self._out = stack.enter_context(zstandard.ZstdCompressor().stream_writer(file))
        self._out.write((json.dumps(row | {"text": text}, ensure_ascii=False) + "\n").encode())

    def _open_samples(self, what: str, number: int) -> list[dict[str, Any]] | None:
        """Return the samples of what a filter removed or changed; None if there are enough."""
        samples = self._samples.setdefault(f"{what} {self._job.names[number]}", [])
        return samples if len(samples) < _SAMPLES else None

    def _duplicate(self, keeper: np.ndarray) -> Removed:
        """Return the reason for removing a duplicate: the place of the document that is kept."""
        other = self._job.ranges[int(keeper[0])]
        documents = self._job.documents[other.source, other.split]
        return Removed("duplicate_of", {
            "source": other.source,
            "where": documents.place(int(keeper[1])),
            "similarity": round(int(keeper[2]) / 1e6, 4),
        })  # fmt: skip

    def _place(self, at: int) -> str:
        return self._documents.place(int(self._range.start + at))

    def _text(self, at: int) -> str:
        index = int(self._range.start + at)
        document = self._documents[index]
        if not isinstance(document, bytes):
            raise DataError(f"{self._documents.where(index)}: no text, which data.steps need")
        try:
            return document.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{self._documents.where(index)}: not UTF-8: {error}") from error


def difference(before: str, after: str) -> dict[str, str]:
    """Return two texts around the first place where they differ."""
    pairs = zip(before, after, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))
    begin = max(0, at - _SAMPLE // 4)
    return {"before": before[begin : begin + _SAMPLE], "after": after[begin : begin + _SAMPLE]}
