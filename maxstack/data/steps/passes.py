"""A pass of data.steps over a range of documents: the steps between two that compare all documents.

A pass leaves a note for each range, from which the next one goes on: which step removed which
document, sizes, counts, and signatures of what is left; and the removed documents in a file of
their own.
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
from maxstack.data.shared_files import SharedFiles, check_shared
from maxstack.data.steps import duplicates
from maxstack.data.steps.kinds import Found, changed, opened
from maxstack.data.steps.step import Removed, Rules, Step
from maxstack.errors import ConfigError, DataError
from maxstack.schema.steps import CHANGING, GLOBAL, AnyStep

REMOVED = "removed"
COUNTS = "documents_in", "bytes_in", "documents_out", "bytes_out", "changed"
_BATCH, _BATCH_BYTES = 256, 1 << 24
"""Documents, and bytes of text, whose signatures are made together."""
_SAMPLES, _SAMPLE = 2, 240


@dataclass(frozen=True)
class Range:
    """Documents start..stop of a source's split, and what the last comparison said of them."""

    number: int
    source: str
    split: Split
    start: int
    stop: int
    keepers: np.ndarray | None = field(default=None, compare=False, repr=False)
    """int64 [N, 3]: the number of a document's range and its index in the split if another one is
    kept instead of it, else -1; and their similarity in millionths."""

    @property
    def name(self) -> str:
        return f"{self.source}-{self.split}-{self.start:010d}"


@dataclass(frozen=True)
class Job:
    """What all ranges share."""

    steps: Sequence[AnyStep]
    names: Sequence[str]
    found: Found
    documents: Mapping[tuple[str, Split], Documents]
    ranges: Sequence[Range]
    out: str
    notes: str
    """Folder of the notes."""
    files: SharedFiles
    number: int = 0
    """Of the pass."""

    @property
    def span(self) -> tuple[int, int]:
        """The first step of the pass, and the one that compares what it leaves, or the end."""
        stops = [n for n, step in enumerate(self.steps) if isinstance(step, GLOBAL)]
        bounds = [-1, *stops, len(self.steps)]
        return bounds[self.number] + 1, bounds[self.number + 1]

    @property
    def last(self) -> bool:
        return self.span[1] == len(self.steps)

    def path(self, number: int, each: Range) -> str:
        """The note of a range of a pass."""
        return storage.join(self.notes, f"{number}-{each.name}.npz")


def read_note(path: str) -> dict[str, np.ndarray]:
    """Arrays of a note: `by` int16 [N], the step that removed each document or -1; `sizes` int64
    [N], bytes of text; `before`, sizes at first; `counts` int64 [steps, 5]; `signatures` of those
    that are left; `more`, rules, samples and values of rules as JSON."""
    return {**np.load(io.BytesIO(storage.read(path)))}


def run(job: Job, each: Range) -> Iterator[int]:
    """Run a pass over a range, and leave its note; a note that is there is kept. The number of its
    documents."""
    check_shared(job.files)
    path = job.path(job.number, each)
    if storage.kind(path) is None:
        try:
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
        self._job, self._range = job, each
        self._documents = job.documents[each.source, each.split]
        count = each.stop - each.start
        self._by, self._sizes = np.full(count, -1, np.int16), np.full(count, -1, np.int64)
        self._first, self._stop = job.span
        if job.number:
            before = read_note(job.path(job.number - 1, each))
            self._by, self._sizes = before["by"], before["sizes"]
        self._counts = np.zeros((len(job.steps), len(COUNTS)), np.int64)
        self._out: Any = None
        self._rules: dict[str, dict[str, int]] = {}
        self._samples: dict[str, list[dict[str, Any]]] = {}
        all_steps = opened(job.steps, job.found)
        self._steps = {n: step for n, step in all_steps.items() if self._first <= n < self._stop}
        self._before: dict[int, Step] = {
            n: step
            for n, step in all_steps.items()
            if n < self._first and isinstance(job.steps[n], CHANGING)
        }

    def note(self) -> dict[str, np.ndarray]:
        """The note, after the file of removed documents."""
        job = self._job
        before = self._sizes.copy()
        parts = []
        with contextlib.ExitStack() as stack:
            for texts in self._batches(before, stack):
                if not job.last:
                    parts.append(duplicates.signatures(job.steps[self._stop], texts))  # type: ignore[arg-type]
        if self._first:
            kept = (self._by == -1) | (self._by >= self._first)
            self._counts[self._first - 1, 2:4] = kept.sum(), before[kept].sum()
        if not job.last:
            alive = self._by == -1
            self._counts[self._stop, :2] = alive.sum(), self._sizes[alive].sum()
        signatures = np.concatenate(parts) if parts else np.zeros((0, 1))
        near = {
            self._job.names[number]: step.near
            for number, step in self._steps.items()
            if isinstance(step, Rules)
        }
        more = json.dumps([self._rules, self._samples, near]).encode()
        return {
            "by": self._by,
            "sizes": self._sizes,
            "before": before,
            "counts": self._counts,
            "signatures": signatures,
            "more": np.frombuffer(more, np.uint8),
        }

    def _batches(self, before: np.ndarray, stack: contextlib.ExitStack) -> Iterator[list[str]]:
        """Texts that are left, some at a time."""
        texts: list[str] = []
        size = 0
        for at in map(int, np.flatnonzero(self._by == -1)):
            keeper = None if self._range.keepers is None else self._range.keepers[at]
            gone = keeper is not None and keeper[0] >= 0
            if not gone and not self._steps and self._job.last and self._job.number:
                continue  # nothing is left to do with its text
            text = self._text(at)
            if not self._job.number:
                before[at] = self._sizes[at] = len(text.encode())
            text = changed(text, self._before)
            made: str | Removed = text
            if keeper is not None and gone:
                made = self._duplicate(keeper)
                self._remove(at, self._first - 1, text, made, stack)
            else:
                made = self._stepped(at, text, stack)
            if isinstance(made, str):
                self._sizes[at] = len(made.encode())
                texts += [made] * (not self._job.last)
                size += int(self._sizes[at])
            if len(texts) == _BATCH or size > _BATCH_BYTES:
                yield texts
                texts, size = [], 0
        yield texts

    def _stepped(self, at: int, text: str, stack: contextlib.ExitStack) -> str | Removed:
        """What the pass's steps make of a text."""
        made: str | Removed = text
        for number, step in self._steps.items():
            size = len(text.encode())
            made = step(text)
            row = self._counts[number]
            row[:2] += 1, size
            if isinstance(made, Removed):
                self._remove(at, number, text, made, stack)
                return made
            row[2:] += 1, len(made.encode()), made != text
            if made != text and (samples := self._lacking("changed", number)) is not None:
                samples.append({"place": self._place(at), **difference(text, made)})
            text = made
        return text

    def _remove(
        self, at: int, number: int, text: str, why: Removed, stack: contextlib.ExitStack
    ) -> None:
        """Note a removed document, and write it."""
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
        if (samples := self._lacking("removed", number)) is not None:
            samples.append(row | {"text": text[: 2 * _SAMPLE]})
        if self._out is None:
            path = f"{REMOVED}/{self._range.name}-{self._job.number}.jsonl.zst"
            unfinished = stack.enter_context(storage.replacing(storage.join(self._job.out, path)))
            file = stack.enter_context(unfinished.open("wb"))
            self._out = stack.enter_context(zstandard.ZstdCompressor().stream_writer(file))
        self._out.write((json.dumps(row | {"text": text}, ensure_ascii=False) + "\n").encode())

    def _lacking(self, what: str, number: int) -> list[dict[str, Any]] | None:
        """The samples of what a step removed or changed; None where there are enough."""
        samples = self._samples.setdefault(f"{what} {self._job.names[number]}", [])
        return samples if len(samples) < _SAMPLES else None

    def _duplicate(self, keeper: np.ndarray) -> Removed:
        """Why a duplicate goes: where the document is that is kept instead."""
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
    """Two texts around the first place where they differ."""
    pairs = zip(before, after, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))
    begin = max(0, at - _SAMPLE // 4)
    return {"before": before[begin : begin + _SAMPLE], "after": after[begin : begin + _SAMPLE]}
