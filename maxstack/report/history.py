"""The history of a run in metrics.jsonl, reduced to what charts need.

A file is read in blocks of rows whose steps are in order. A small file keeps every value; a large
one keeps the smallest, the largest and the last value of each figure in a block, with the means, so
that 10 million rows fit in memory and no spike is lost. `series` reduces the blocks of a figure to
at most 2,000 points in the same way.

A run that resumes or rewinds writes rows of steps that are in the file already. Such a row begins a
new block, which undoes the older rows from its step on: whole blocks are dropped, and the block in
which that step lies is read again up to it."""

import collections
import contextlib
import dataclasses
import gc
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxstack import strict_json
from maxstack.regular_file import open_regular
from maxstack.report.append import newest
from maxstack.report.progress import progress

FILE = "metrics.jsonl"
ROWS = 1024
"""Rows of a block."""
SMALL = 64 << 20
"""Bytes of which every value is kept."""
TAIL = 256 << 10
"""Bytes at the end of a file that hold the latest rows."""
POINTS = 2000
"""Points of a series at most."""
MEANS = 400
"""Means of a series that is thinned."""
REFUSED = {1: "not finite", 2: "spike"}
"""Value of `skipped` -> what happened to the update."""
Points = tuple[list[int], list[float]]
"""Steps and values."""


@dataclasses.dataclass
class Block:
    """Consecutive rows whose steps are in order."""

    begin: int
    end: int
    """Bytes of the file."""
    done: int
    """The last step trained, in this block or before it."""
    back: bool = False
    """The first row's step was done before."""
    first: int = -1
    last: int = -1
    """Steps."""
    rows: int = 0
    damaged: int = 0
    """Lines that are not rows."""
    points: dict[str, Points] = dataclasses.field(default_factory=dict)
    means: dict[str, tuple[float, float, int]] = dataclasses.field(default_factory=dict)
    """Mean step, mean value and count by key, where `points` are not all."""
    events: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    texts: list[int] = dataclasses.field(default_factory=list)
    """Where rows with texts begin."""


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Suspend the garbage collector: with millions of small lists, none of them in a cycle, it
    takes as long as reading does."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class History:
    """The rows of a run that count, as of the last `update`."""

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._forget()

    def _forget(self) -> None:
        self._blocks: list[Block] = []
        self._end = 0
        self._size = 0
        self.rows = 0
        """Rows that were read, including undone ones."""
        self.damaged = 0
        """Lines that are not rows."""
        self.events: dict[tuple[int, str], None] = {}
        """(step, a value of REFUSED or `passed over`) in order, including undone ones."""

    @_without_collector()
    def update(self) -> bool:
        """Read what was written since the last call; False if that is nothing. OSError if the file
        cannot be read."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._end:  # the file was replaced
            self._forget()
        if size == self._size:
            return False
        self._size = size
        if size - self._end > SMALL:
            with progress(size - self._end, f"reading {self._path}", "B", delay=2) as bar:
                # Full blocks alone. What is left at the end is read below with all its values.
                for block in _blocks(self._path, self._end, self._done, whole=False):
                    self._add(block)
                    bar.update(block.end - block.begin)
        for block in _blocks(self._path, self._end, self._done, whole=True):
            self._add(block)
        return True

    @_without_collector()
    def series(self) -> tuple[dict[str, Points], dict[str, Points]]:
        """Return the steps and values of every figure, at most POINTS of each, thinned to the
        smallest and largest; and for figures that were thinned, means over equal spans of steps.
        Values that are not finite are left out."""
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
        # Extremes alone would fill the chart with noise, and means alone would hide a spike: the
        # page draws means over extremes.
        thinned = {key: _thinned(parts) for key, parts in points.items()}
        few = {key: len(steps) < POINTS // 2 for key, (steps, _) in thinned.items()}
        averaged = {key: _averaged(means[key]) for key in thinned if not few[key]}
        return thinned, averaged

    def texts(self, count: int) -> list[tuple[int, str]]:
        """Return (step, text) of the last `count` rows that hold texts."""
        found = []
        places = itertools.chain.from_iterable(block.texts for block in self._blocks)
        # Places in the file, not texts, are kept in memory.
        for place in [*places][-count:]:
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
        """Add the next block, and drop the rows that it undoes."""
        self._end = block.end
        self.rows += block.rows
        self.damaged += block.damaged
        self.events |= dict.fromkeys((step, kind) for step, kind in block.events)
        if block.back:
            # Blocks are in order of steps, so what is undone lies at the end.
            while self._blocks and self._blocks[-1].first >= block.first:
                self._blocks.pop()
            if self._blocks and self._blocks[-1].last >= block.first:
                old = self._blocks.pop()
                lines = _lines(self._path, old.begin, old.end)
                # Its values may have been reduced to extremes, which do not tell which row they
                # came from; so it is read again.
                self._blocks += _digest(old.begin, lines, -1, whole=True, below=block.first)
        if block.rows:
            self._blocks.append(block)


def last_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows in the last TAIL bytes; none if there is no file."""
    return [row for row in newest(folder / FILE, TAIL) if _is_row(row)][::-1]


def _blocks(path: Path, begin: int, done: int, *, whole: bool) -> Iterator[Block]:
    """Read blocks from byte `begin` on, after the step `done`: with `whole` all of them and all
    their values, otherwise full blocks with their extremes."""
    if not path.exists():
        return
    with open_regular(path) as file:
        file.seek(begin)
        rows = strict_json.lines(file, str(path))
        while lines := [*itertools.islice(rows, ROWS)]:
            # The last line may be under way; it is read next time.
            if not lines[-1].endswith(b"\n"):
                del lines[-1]
            # Full blocks hold ROWS lines each, however the file grew between two reads.
            if not lines or (len(lines) < ROWS and not whole):
                return
            for block in _digest(begin, lines, done, whole=whole):
                begin, done = block.end, block.done
                yield block


def _digest(
    begin: int, lines: Sequence[bytes], done: int, *, whole: bool, below: float = math.inf
) -> list[Block]:
    """Make blocks of the lines at byte `begin`: a new one begins at each row whose step was done
    before. Rows of steps from `below` on are left out."""
    blocks = [(Block(begin, begin, done), list[tuple[int, dict[str, Any]]]())]
    for line, row in zip(lines, _parsed(lines), strict=True):
        block, rows = blocks[-1]
        if row is None:
            if line.strip():
                block.damaged += 1
        elif row["step"] < below:
            # Evaluations come after their step with its number, so only a trained row repeats a
            # step.
            trained = "loss" in row or "passed_over" in row
            if row["step"] < done or (trained and row["step"] == done):
                blocks.append((Block(block.end, block.end, done, back=True), []))
                block, rows = blocks[-1]
            if trained:
                block.done = done = row["step"]
            rows.append((block.end, row))
        block.end += len(line)
    return [_filled(block, rows, whole) for block, rows in blocks]


def _filled(block: Block, rows: Sequence[tuple[int, dict[str, Any]]], whole: bool) -> Block:
    """Fill a block with the values of its rows. Rows with the same keys are transposed together by
    zip, which takes half the time of a loop over their fields."""
    if not rows:
        return block
    block.first = rows[0][1]["step"]
    block.last = rows[-1][1]["step"]
    block.rows = len(rows)
    alike = collections.defaultdict(list)
    for begin, row in rows:
        # Keys in order: rows of one kind (steps, evaluations) have the same.
        alike[tuple(row)].append((begin, row))
        if kind := REFUSED.get(row.get("skipped", 0)) or ("passed_over" in row and "passed over"):
            block.events.append((row["step"], kind))
    columns = collections.defaultdict(list)
    for keys, group in alike.items():
        begins, fields = zip(*group, strict=True)
        steps = np.array([row["step"] for row in fields])
        for key, column in zip(keys, zip(*map(dict.values, fields), strict=True), strict=True):
            # By exact type: bool is an int for isinstance, and no figure.
            kinds = {*map(type, column)}
            if kinds == {list}:
                block.texts += begins
            elif key != "step" and kinds <= {int, float}:
                columns[key].append((steps, np.array(column, float)))
    for key, parts in columns.items():
        steps, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        # Stable: of two rows of one step the later one stays last, and _thinned keeps the last.
        order = np.argsort(steps, kind="stable")
        order = order[np.isfinite(values[order])]
        if not len(order):
            continue
        steps, values = steps[order], values[order]
        if not whole:
            block.means[key] = float(steps.mean()), float(values.mean()), len(values)
            # A set, as the last value may be the largest.
            kept = sorted({int(values.argmin()), int(values.argmax()), len(values) - 1})
            steps, values = steps[kept], values[kept]
        block.points[key] = steps.tolist(), values.tolist()
    return block


def _thinned(parts: Sequence[Points]) -> Points:
    """Reduce the points of all parts, of each step the last: to all if they are POINTS or fewer, or
    to the first, the last, and the smallest and largest in each of many equal spans of steps."""
    steps, values = _concatenated(parts)
    # Evaluations and metrics of one step may come twice; the last one counts.
    last = np.append(steps[1:] != steps[:-1], True)
    steps, values = steps[last], values[last]
    if len(steps) > POINTS:
        # Two points a span, and the first and the last point.
        span = _spans(steps, POINTS // 2 - 1)
        # Sorted by span, then by value: the ends of each span are its smallest and largest.
        order = np.lexsort((values, span))
        begins = np.flatnonzero(np.append(True, np.diff(span[order]) > 0))
        ends = np.append(begins[1:], len(order)) - 1
        kept = np.unique(np.concatenate([order[begins], order[ends], [0, len(steps) - 1]]))
        steps, values = steps[kept], values[kept]
    return steps.tolist(), values.tolist()


def _averaged(parts: Sequence[Sequence[Sequence[float]]]) -> Points:
    """Return the mean step and value of all parts in each of MEANS equal spans of steps, weighted
    by their counts."""
    steps, values, counts = _concatenated(parts)
    span = _spans(steps, MEANS)
    total = np.bincount(span, counts)
    some = total > 0
    mean_steps, mean_values = (
        np.bincount(span, counts * column)[some] / total[some] for column in (steps, values)
    )
    return np.round(mean_steps).astype(int).tolist(), mean_values.tolist()


def _concatenated(parts: Sequence[Sequence[Sequence[float]]]) -> Iterator[np.ndarray]:
    for column in zip(*parts, strict=True):
        yield np.array([*itertools.chain.from_iterable(column)])


def _spans(steps: np.ndarray, count: int) -> np.ndarray:
    """Return which of `count` equal spans each step is in."""
    first, last = steps[0], steps[-1]
    return ((steps - first) * count // (last - first + 1)).astype(int)


def _parsed(lines: Sequence[bytes]) -> list[dict[str, Any] | None]:
    """Parse the row of each line, None for a line that is not one. Parsing many lines as one array
    takes 5 us a row instead of 8."""
    # One line that is not JSON spoils the array; then each line is parsed by itself.
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
    """Read the lines between two bytes; none if there is no file."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        file.seek(begin)
        return file.read(end - begin).splitlines(keepends=True)
    return []
