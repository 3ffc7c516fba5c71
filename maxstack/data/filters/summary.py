"""The summary of data.steps: counts by filter and source, lengths and samples, as a table that is
printed and as a page."""

import html
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from maxstack.config import storage
from maxstack.data.filters.passes import COUNTS, Job, read_note
from maxstack.report import document
from maxstack.report.table import table

PAGE = "report.html"
HEADINGS = "step", "source", "documents", "removed", "share", "changed", "bytes in", "bytes out"
_BINS = 24
"""Powers of two of bytes."""
_SAMPLES = 5
_SHORTEST_BAR = 1


def gather(job: Job) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the notes of all passes. Return the indices of the documents that are kept, by the
    number of a source's split, and the summary."""
    sources = {
        source: np.zeros((len(job.sections), len(COUNTS)), np.int64) for source, _ in job.documents
    }
    rules = {name: Counter[str]() for name in job.names}
    samples = dict[str, list[list[dict[str, Any]]]]()
    lengths = np.zeros((2, _BINS), np.int64)
    kept = {key: list[np.ndarray]() for key in job.documents}
    for each in job.ranges:
        for number in range(job.number + 1):
            note = read_note(job.note_path(number, each))
            sources[each.source] += note["counts"]
            own_rules, own_samples, *_ = json.loads(note["more"].tobytes())
            for name, counts in own_rules.items():
                rules[name].update(counts)
            for name, rows in own_samples.items():
                samples.setdefault(name, []).append(rows)
            if number == 0:
                lengths[0] += _histogram(note["before"])
        alive = note["by"] == -1
        lengths[1] += _histogram(note["sizes"][alive])
        kept[each.source, each.split].append(each.start + np.flatnonzero(alive))
    filters = []
    for number, (name, section) in enumerate(zip(job.names, job.sections, strict=True)):
        by_source = {source: _named(counts[number]) for source, counts in sources.items()}
        ordered = dict(sorted(rules[name].items()))
        filters.append({"name": name, "kind": section.kind, "rules": ordered, "sources": by_source})
    chosen = {name: _first(by_range) for name, by_range in samples.items()}
    summary = {"steps": filters, "lengths": lengths.tolist(), "samples": chosen}
    return {str(n): np.concatenate(kept[key]) for n, key in enumerate(kept)}, summary


def _named(counts: np.ndarray) -> dict[str, int]:
    return dict(zip(COUNTS, counts.tolist(), strict=True))


def _first(by_range: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return some samples: the first of each range before the second of any."""
    # Spread over ranges, and in their order, so that samples depend on no engine.
    places = range(max(map(len, by_range)))
    ordered = [rows[place] for place in places for rows in by_range if place < len(rows)]
    return ordered[:_SAMPLES]


def rows_of(summary: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each filter and source, and one for all sources if there are several."""
    rows = []
    for each in summary["steps"]:
        by_source = {source: Counter(counts) for source, counts in each["sources"].items()}
        if len(by_source) > 1:
            by_source["all"] = sum(by_source.values(), Counter())
        for source, counts in by_source.items():
            removed = counts["documents_in"] - counts["documents_out"]
            share = removed / max(1, counts["documents_in"])
            sizes = [f"{counts[key]:,}" for key in ("changed", "bytes_in", "bytes_out")]
            documents = f"{counts['documents_in']:,}"
            rows.append([each["name"], source, documents, f"{removed:,}", f"{share:.1%}", *sizes])
    return rows


def show(summary: Mapping[str, Any], out: str) -> None:
    """Print the table, and where to see more."""
    print(table("llrrrrrr", rows_of(summary), HEADINGS))
    print(f"{storage.join(out, PAGE)} shows samples; `maxstack data removed {out}` all of them")


def write_page(summary: Mapping[str, Any], out: str) -> None:
    """Write OUT/report.html."""
    rules = [
        (each["name"], rule, f"{count:,}")
        for each in summary["steps"]
        for rule, count in each["rules"].items()
    ]
    parts = [
        "<header><h1>Filters before tokens</h1></header><h2>Counts</h2>",
        _table(HEADINGS, rows_of(summary)),
        "<h2>Rules</h2>",
        _table(("step", "rule", "removed"), rules),
        "<h2>Lengths in bytes</h2>",
        _bars(summary["lengths"]),
        "<h2>Samples</h2>",
    ]
    for name, rows in sorted(summary["samples"].items()):
        # Samples of removals and of changes have different keys, the same in all rows of a name.
        columns = ("where", "place", "rule", "value", "text", "before", "after")
        shown = [key for key in columns if key in rows[0]]
        cells = []
        for row in rows:
            cells.append([_cell(key, row[key]) for key in shown])
        parts += [f"<h3>{html.escape(name)}</h3>", _table(shown, cells)]
    with storage.replacing(storage.join(out, PAGE)) as unfinished:
        page = document.plain("maxstack: filters before tokens", "\n".join(parts))
        unfinished.write_text(page, encoding="utf-8")


def _cell(key: str, value: Any) -> str:
    """Return a value as text; of a change with escapes for characters that are not seen."""
    if key in ("before", "after"):
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return str(value)


def _histogram(sizes: np.ndarray) -> np.ndarray:
    """Count documents by the power of two that their bytes do not reach."""
    bins = np.ceil(np.log2(np.maximum(sizes, 0) + 1)).astype(int)
    return np.bincount(np.minimum(bins, _BINS - 1), minlength=_BINS)


def _bars(lengths: Sequence[Sequence[int]]) -> str:
    """Return a table with two bars, before and after, for each power of two."""
    used = np.flatnonzero(np.sum(lengths, 0))
    most = max(map(max, lengths)) or 1
    rows: list[Sequence[str]] = []
    for at in range(used.min(initial=_BINS), used.max(initial=-1) + 1):
        row = [f"&lt; {1 << at:,}"]
        for counts in lengths:
            row += [f"{counts[at]:,}", _bar(counts[at] / most)]
        rows.append(row)
    return _table(("bytes", "documents before", "", "after", ""), rows, escaped=True)


def _bar(share: float) -> str:
    width = max(_SHORTEST_BAR, round(200 * share)) if share else 0
    return (
        f'<svg width="200" height="10" role="img"><rect width="{width}" height="10" '
        'fill="#0072b2"/></svg>'
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, escaped: bool = False) -> str:
    def cells(tag: str, row: Sequence[str]) -> Iterator[str]:
        yield "<tr>"
        for text in row:
            yield f"<{tag}>{text if escaped else html.escape(text)}</{tag}>"
        yield "</tr>"

    head = "".join(cells("th", headings))
    body = "".join("".join(cells("td", row)) for row in rows)
    return f'<table class="data"><thead>{head}</thead><tbody>{body}</tbody></table>'
