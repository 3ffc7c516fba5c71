"""What metrics.jsonl says of a run, for charts: all rows of a small file; of a large one, the
smallest and largest values of each block of rows, which metrics.index.jsonl keeps.

A row of a step that was done before undoes the rows from there on: a resumed run writes them again.
"""

import collections
import contextlib
import dataclasses
import gc
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from maxstack import strict_json
from maxstack.regular_file import open_regular
from maxstack.report.append import Appender, newest

FILE, INDEX = "metrics.jsonl", "metrics.index.jsonl"
ROWS = 1024
"""Rows of a block."""
SMALL = 64 << 20
"""Bytes that are read row by row, without an index."""
STRETCHES, STRETCH = 1000, 64
"""Places at which a file is sampled, and rows that are read at each."""
TAIL = 256 << 10
"""Bytes at the end of a file that hold the latest rows."""
POINTS, MEANS = 2000, 400
"""Points of a series at most, and means of one that is thinned."""
REFUSED = {1: "not finite", 2: "spike"}
"""By the values of `skipped`."""
Points = tuple[list[int], list[float]]
"""Steps and values."""


@dataclasses.dataclass
class Block:
    """Rows that follow each other, their steps in order."""

    begin: int
    end: int
    """Bytes of the file."""
    done: int
    """The step trained last; that of the block before where none is."""
    back: bool = False
    """The first row's step was done before."""
    first: int = -1
    last: int = -1
    """Steps."""
    rows: int = 0
    damaged: int = 0
    """Lines that are no row."""
    points: dict[str, Points] = dataclasses.field(default_factory=dict)
    means: dict[str, tuple[float, float, int]] = dataclasses.field(default_factory=dict)
    """Mean step, mean value and count by key, where `points` are not all."""
    events: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    texts: list[int] = dataclasses.field(default_factory=list)
    """Where rows with texts begin."""


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """No search for cycles meanwhile: with millions of small lists, of which none is in a cycle, it
    takes two thirds of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class History:
    """The rows of a run that count, as far as they were written at the last `update`."""

    rows = damaged = 0
    """Rows that were read, with those that are undone; lines that are no row."""

    def __init__(self, folder: Path):
        self._folder, self._path = folder, folder / FILE
        self._blocks: list[Block] = []
        self._end = self._size = self._gaps = 0
        self.events: dict[tuple[int, str], None] = {}
        """(step, a value of REFUSED or `passed over`), in order, with those that are undone."""

    @_without_collector()
    def update(self) -> bool:
        """Read what was written since the last call; False where that is nothing. OSError where the
        file cannot be read."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._end:  # another file
            self.__init__(self._folder)  # type: ignore[misc]
        if size == self._size:
            return False
        self._size = size
        if not self._blocks and size > SMALL:
            for block in _indexed(self._folder):
                self._add(block)
        if size - self._end > SMALL:
            self._sample(size - TAIL)
        for block in _blocks(self._path, self._end, self._done, whole=True):
            self._add(block)
        return True

    @property
    def sampled(self) -> float:
        """The share of the bytes that were read or indexed."""
        return 1 - self._gaps / max(self._end, 1)

    @_without_collector()
    def series(self) -> tuple[dict[str, Points], dict[str, Points]]:
        """Steps and values of every figure, at most POINTS of each, with the smallest and the
        largest of what was left out; and means over equal spans of steps, where any was. Values
        that are not finite are left out."""
        points = collections.defaultdict(list)
        means = collections.defaultdict[str, list[Sequence[Sequence[float]]]](list)
        for block in self._blocks:
            for key, (steps, values) in block.points.items():
                points[key].append((steps, values))
                if key in block.means:
                    step, value, count = block.means[key]
                    means[key].append(([step], [value], [count]))
                else:
                    means[key].append((steps, values, [1] * len(steps)))
        thinned = {key: _thinned(parts) for key, parts in points.items()}
        few = {key: len(steps) < POINTS // 2 for key, (steps, _) in thinned.items()}
        averaged = {key: _averaged(means[key]) for key in thinned if not few[key]}
        return thinned, averaged

    def texts(self, count: int) -> list[tuple[int, str]]:
        """(step, text) of the last `count` rows that hold texts."""
        found = []
        for place in [place for block in self._blocks for place in block.texts][-count:]:
            with open_regular(self._path) as file:
                file.seek(place)
                row = _row(file.readline()) or {}
            lists = (value for value in row.values() if isinstance(value, list))
            found += [(row["step"], str(text)) for texts in lists for text in texts]
        return found

    @property
    def _done(self) -> int:
        return self._blocks[-1].done if self._blocks else -1

    def _add(self, block: Block) -> None:
        """Add the next block, and leave out what it undoes."""
        self._gaps += block.begin - self._end
        self._end = block.end
        self.rows, self.damaged = self.rows + block.rows, self.damaged + block.damaged
        self.events |= dict.fromkeys((step, kind) for step, kind in block.events)
        if block.back:
            while self._blocks and self._blocks[-1].first >= block.first:
                self._blocks.pop()
            if self._blocks and self._blocks[-1].last >= block.first:
                old = self._blocks.pop()
                lines = _lines(self._path, old.begin, old.end)
                self._blocks += _digest(old.begin, lines, -1, whole=True, below=block.first)
        if block.rows:
            self._blocks.append(block)

    def _sample(self, stop: int) -> None:
        """Read a few rows at each of STRETCHES places up to `stop`, and go on from there."""
        with open_regular(self._path) as file:
            for place in np.linspace(self._end, stop, STRETCHES, endpoint=False).astype(int):
                begin = _next_line(file, max(int(place), self._end))
                lines = [*itertools.islice(file, STRETCH)]
                for block in _digest(begin, lines, self._done, whole=False):
                    self._add(block)
            end = _next_line(file, max(stop, self._end))
        self._gaps, self._end = self._gaps + end - self._end, end


def last_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows in the last TAIL bytes; none where there is no file."""
    return [row for row in newest(folder / FILE, TAIL) if _is_row(row)][::-1]


class Index:
    """The blocks of a large metrics.jsonl in metrics.index.jsonl, a line each."""

    def __init__(self, folder: Path):
        self._folder, self._lines = folder, Appender(folder / INDEX)
        self._end: tuple[int, int] | None = None
        """Byte and step up to which the file is indexed."""

    def extend(self, most: int | None = None, read: Callable[[int], Any] | None = None) -> None:
        """Index what was written since, `most` blocks of it; nothing of a small file. What cannot
        be read or written now is left for later."""
        path = self._folder / FILE
        with contextlib.suppress(OSError):
            if path.stat().st_size <= SMALL:
                return
            if self._end is None:
                known = _indexed(self._folder)
                self._end = (known[-1].end, known[-1].done) if known else (0, -1)
                if not known:
                    (self._folder / INDEX).unlink(missing_ok=True)
            for block in itertools.islice(_blocks(path, *self._end, whole=False), most):
                self._lines.add(json.dumps(dataclasses.asdict(block)) + "\n")
                self._end = block.end, block.done
                if read:
                    read(block.end - block.begin)


def _indexed(folder: Path) -> list[Block]:
    """The blocks that the index has; none where the last is not what the file holds there."""
    blocks: list[Block] = []
    with contextlib.suppress(OSError), open_regular(folder / INDEX) as index:
        for line in strict_json.lines(index, INDEX):
            with contextlib.suppress(ValueError, TypeError):  # a line that a kill cut short
                block = Block(**strict_json.parse_object(line, INDEX))
                if block.begin == (blocks[-1].end if blocks else 0):
                    blocks.append(block)
    if not blocks:
        return []
    last = blocks[-1]
    done = blocks[-2].done if len(blocks) > 1 else -1
    lines = _lines(folder / FILE, last.begin, last.end)
    there = _digest(last.begin, lines, done, whole=False)[-1]
    same = json.dumps(dataclasses.asdict(there)) == json.dumps(dataclasses.asdict(last))
    return blocks if same else []


def _blocks(path: Path, begin: int, done: int, *, whole: bool) -> Iterator[Block]:
    """Blocks of the lines from byte `begin` on; `done`: the step trained before. With the values of
    all rows (`whole`), or of full blocks, and with the extremes alone."""
    if not path.exists():
        return
    with open_regular(path) as file:
        file.seek(begin)
        rows = strict_json.lines(file, str(path))
        while lines := [*itertools.islice(rows, ROWS)]:
            if not lines[-1].endswith(b"\n"):
                del lines[-1]
            if not lines or (len(lines) < ROWS and not whole):
                return
            for block in _digest(begin, lines, done, whole=whole):
                begin, done = block.end, block.done
                yield block


def _digest(
    begin: int, lines: Sequence[bytes], done: int, *, whole: bool, below: float = math.inf
) -> list[Block]:
    """Blocks of the lines at byte `begin`, another one from each row on whose step was done before;
    without rows of steps from `below` on."""
    blocks = [(Block(begin, begin, done), list[tuple[int, dict[str, Any]]]())]
    for line, row in zip(lines, _parsed(lines), strict=True):
        block, rows = blocks[-1]
        if row is None:
            block.damaged += bool(line.strip())
        elif row["step"] < below:
            trained = "loss" in row or "passed_over" in row
            if row["step"] < done or (trained and row["step"] == done):
                block, rows = Block(block.end, block.end, done, back=True), []
                blocks.append((block, rows))
            if trained:
                block.done = done = row["step"]
            rows.append((block.end, row))
        block.end += len(line)
    return [_filled(block, rows, whole) for block, rows in blocks]


def _filled(block: Block, rows: Sequence[tuple[int, dict[str, Any]]], whole: bool) -> Block:
    """The block with what its rows say."""
    if not rows:
        return block
    block.first, block.last, block.rows = rows[0][1]["step"], rows[-1][1]["step"], len(rows)
    alike = collections.defaultdict(list)
    for begin, row in rows:
        alike[tuple(row)].append((begin, row))
        if kind := REFUSED.get(row.get("skipped", 0)) or ("passed_over" in row and "passed over"):
            block.events.append((row["step"], kind))
    columns = collections.defaultdict(list)
    for keys, group in alike.items():
        begins, fields = zip(*group, strict=True)
        steps = np.array([row["step"] for row in fields])
        for key, column in zip(keys, zip(*map(dict.values, fields), strict=True), strict=True):
            kinds = {*map(type, column)}
            if kinds == {list}:
                block.texts += begins
            elif key != "step" and kinds <= {int, float}:
                columns[key].append((steps, np.array(column, float)))
    for key, parts in columns.items():
        steps, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        finite = np.isfinite(values)
        if not finite.any():
            continue
        steps, values = steps[finite], values[finite]
        if not whole:
            block.means[key] = float(steps.mean()), float(values.mean()), len(values)
            kept = sorted({int(values.argmin()), int(values.argmax()), len(values) - 1})
            steps, values = steps[kept], values[kept]
        block.points[key] = steps.tolist(), values.tolist()
    return block


def _thinned(parts: Sequence[Points]) -> Points:
    """The points of all parts, the last of each step: all of POINTS or fewer, else the smallest and
    largest in each of many equal spans of steps, the first and the last."""
    steps, values = _concatenated(parts)
    last = np.append(steps[1:] != steps[:-1], True)
    steps, values = steps[last], values[last]
    if len(steps) > POINTS:
        span = _spans(steps, POINTS // 2 - 1)
        order = np.lexsort((values, span))
        begins = np.flatnonzero(np.append(True, np.diff(span[order]) > 0))
        ends = np.append(begins[1:], len(order)) - 1
        kept = np.unique(np.concatenate([order[begins], order[ends], [0, len(steps) - 1]]))
        steps, values = steps[kept], values[kept]
    return steps.tolist(), values.tolist()


def _averaged(parts: Sequence[Sequence[Sequence[float]]]) -> Points:
    """The mean step and value of all parts in each of MEANS equal spans of steps, by their
    counts."""
    steps, values, counts = _concatenated(parts)
    span = _spans(steps, MEANS)
    total = np.bincount(span, counts)
    some = total > 0
    mean_steps, mean_values = (
        np.bincount(span, counts * column)[some] / total[some] for column in (steps, values)
    )
    return np.round(mean_steps).astype(int).tolist(), mean_values.tolist()


def _concatenated(parts: Sequence[Sequence[Sequence[float]]]) -> Iterator[np.ndarray]:
    return (
        np.array([*itertools.chain.from_iterable(column)]) for column in zip(*parts, strict=True)
    )


def _spans(steps: np.ndarray, count: int) -> np.ndarray:
    """The number of the span that each step is in, of `count` equal ones."""
    first, last = steps[0], steps[-1]
    return ((steps - first) * count // (last - first + 1)).astype(int)


def _parsed(lines: Sequence[bytes]) -> list[dict[str, Any] | None]:
    """The row of each line, None for one that is none; many lines at once, which is faster."""
    with contextlib.suppress(ValueError):
        rows = strict_json.parse(b"[" + b",".join(lines) + b"]", FILE, strict=False)
        if len(rows) == len(lines) and all(map(_is_row, rows)):
            return [*map(strict_json.restore, rows)]
    return [_row(line) for line in lines]


def _row(line: bytes) -> dict[str, Any] | None:
    row = strict_json.read(line)
    return row if _is_row(row) else None


def _is_row(row: Any) -> bool:
    return type(row) is dict and type(row.get("step")) is int and row["step"] >= 0


def _lines(path: Path, begin: int, end: int) -> list[bytes]:
    """The lines between two bytes; none where there is no file."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        file.seek(begin)
        return file.read(end - begin).splitlines(keepends=True)
    return []


def _next_line(file: BinaryIO, place: int) -> int:
    """Go to the first beginning of a line from a byte on."""
    file.seek(max(0, place - 1))
    if place:
        file.readline()
    return file.tell()
