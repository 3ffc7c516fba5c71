"""What data.steps did: counts by step and source, lengths and samples, as a table and a page."""

import collections
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from maxstack.config import storage
from maxstack.data.steps.passes import COUNTS, Job, read_note
from maxstack.data.steps.step import TENTHS
from maxstack.report import document
from maxstack.report.table import table

PAGE = "report.html"
_BINS = 24
"""Powers of two of bytes."""
_SAMPLES = 5
_SHORTEST_BAR = 1


def gather(job: Job) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(indices of what is left of each source's split, by its number; the summary) after the last
    pass."""
    counts = {key[0]: np.zeros((len(job.steps), len(COUNTS)), np.int64) for key in job.documents}
    rules: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    samples: dict[str, list[tuple[int, dict[str, Any]]]] = collections.defaultdict(list)
    lengths = np.zeros((2, _BINS), np.int64)
    near: dict[str, dict[str, Any]] = {}
    left: dict[tuple[str, str], list[np.ndarray]] = {key: [] for key in job.documents}
    for each in job.ranges:
        for number in range(job.number + 1):
            note = read_note(job.path(number, each))
            counts[each.source] += note["counts"]
            own_rules, own_samples, own_near = json.loads(note["more"].tobytes())
            for name, found in own_rules.items():
                rules[name].update(found)
            for name, rows in own_samples.items():
                samples[name] += enumerate(rows)
            for name, by_rule in own_near.items():
                for rule, found in by_rule.items():
                    near.setdefault(name, {}).setdefault(rule, np.zeros(TENTHS, int))
                    near[name][rule] += found
            if not number:
                lengths[0] += _histogram(note["before"])
        alive = note["by"] == -1
        lengths[1] += _histogram(note["sizes"][alive])
        left[each.source, each.split].append(each.start + np.flatnonzero(alive))
    steps = [
        {
            "name": name,
            "kind": step.kind,
            "rules": dict(sorted(rules[name].items())),
            "sources": {
                source: dict(zip(COUNTS, map(int, found[number]), strict=True))
                for source, found in counts.items()
            },
        }
        for number, (name, step) in enumerate(zip(job.names, job.steps, strict=True))
    ]
    chosen = {
        name: [row for _, row in sorted(rows, key=lambda pair: pair[0])[:_SAMPLES]]
        for name, rows in samples.items()
    }
    values = {name: {rule: [*map(int, each)] for rule, each in found.items()}
              for name, found in near.items()}  # fmt: skip
    told = {"steps": steps, "lengths": lengths.tolist(), "samples": chosen, "near": values}
    return {str(n): np.concatenate(left[key]) for n, key in enumerate(left)}, told


def rows_of(told: dict[str, Any]) -> list[list[str]]:
    """A row for each step and source, and for each step of all sources where there are several."""
    rows = []
    for step in told["steps"]:
        by_source = dict(step["sources"])
        if len(by_source) > 1:
            by_source["all"] = {k: sum(each[k] for each in by_source.values()) for k in COUNTS}
        for source, found in by_source.items():
            removed = found["documents_in"] - found["documents_out"]
            rows.append([
                step["name"],
                source,
                f"{found['documents_in']:,}",
                f"{removed:,}",
                f"{removed / max(1, found['documents_in']):.1%}",
                f"{found['changed']:,}",
                f"{found['bytes_in']:,}",
                f"{found['bytes_out']:,}",
            ])  # fmt: skip
    return rows


HEADINGS = "step", "source", "documents", "removed", "share", "changed", "bytes in", "bytes out"


def show(told: dict[str, Any], out: str) -> None:
    """Print the table, and where to see more."""
    print(table("llrrrrrr", rows_of(told), HEADINGS))
    print(f"{storage.join(out, PAGE)} shows samples; `maxstack data removed {out}` all of them")


def write_page(told: dict[str, Any], out: str) -> None:
    """Write OUT/report.html."""
    parts = [
        "<header><h1>Steps before tokens</h1></header><h2>Counts</h2>",
        _html(HEADINGS, rows_of(told)),
        "<h2>Rules</h2>",
        _html(
            ("step", "rule", "removed"),
            [
                (step["name"], rule, f"{count:,}")
                for step in told["steps"]
                for rule, count in step["rules"].items()
            ],
        ),
        "<h2>Values of rules</h2>",
        "<p>Documents by what a rule measured, over its bound, which is the line.</p>",
        _html(
            ("step", "rule", "0 to 2 times the bound"),
            [
                (name, rule, _spread(counts))
                for name, by_rule in told["near"].items()
                for rule, counts in by_rule.items()
            ],
            escaped=True,
        ),
        "<h2>Lengths in bytes</h2>",
        *_bars(told["lengths"]),
        "<h2>Samples</h2>",
    ]
    for name, rows in sorted(told["samples"].items()):
        what = [key for key in ("where", "place", "rule", "value", "text") if key in rows[0]]
        what += [key for key in ("before", "after") if key in rows[0]]
        cells = [[_cell(row[key], key in ("before", "after")) for key in what] for row in rows]
        parts += [f"<h3>{html.escape(name)}</h3>", _html(what, cells)]
    with storage.replacing(storage.join(out, PAGE)) as unfinished:
        page = document.plain("maxstack: steps before tokens", "\n".join(parts))
        unfinished.write_text(page, encoding="utf-8")


def _cell(value: Any, escaped: bool) -> str:
    """A value as text; `escaped`: with escapes for characters that are not seen."""
    if escaped:
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return str(value)


def _histogram(sizes: np.ndarray) -> np.ndarray:
    """Documents by the power of two that their bytes do not reach."""
    bins = np.ceil(np.log2(np.maximum(sizes, 0) + 1)).astype(int)
    return np.bincount(np.minimum(bins, _BINS - 1), minlength=_BINS)


def _bars(lengths: Sequence[Sequence[int]]) -> Iterable[str]:
    """Two bars, before and after, for each power of two from the shortest document to the
    longest."""
    used = np.flatnonzero(np.sum(lengths, 0))
    most = max(map(max, lengths)) or 1
    rows: list[Sequence[str]] = []
    for at in range(used.min(initial=_BINS), used.max(initial=-1) + 1):
        before, after = lengths[0][at], lengths[1][at]
        rows.append((f"&lt; {1 << at:,}", f"{before:,}", _bar(before / most), f"{after:,}",
                     _bar(after / most)))  # fmt: skip
    headings = ("bytes", "documents before", "", "after", "")
    yield _html(headings, rows, escaped=True)


def _bar(share: float) -> str:
    width = max(_SHORTEST_BAR, round(200 * share)) if share else 0
    return (
        f'<svg width="200" height="10" role="img"><rect width="{width}" height="10" '
        'fill="#0072b2"/></svg>'
    )


def _spread(counts: Sequence[int]) -> str:
    """A histogram with a line at the bound."""
    most = max(counts)
    bars = "".join(
        f'<rect x="{10 * at}" y="{30 - round(30 * count / most)}" width="9" '
        f'height="{round(30 * count / most)}" fill="#0072b2"><title>{count:,}</title></rect>'
        for at, count in enumerate(counts)
    )
    bound = '<line x1="100" x2="100" y1="0" y2="30" stroke="#d55e00"/>'
    return f'<svg width="200" height="30" role="img">{bars}{bound}</svg>'


def _html(headings: Sequence[str], rows: Iterable[Sequence[str]], *, escaped: bool = False) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        texts = row if escaped else [html.escape(cell) for cell in row]
        return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    head = cells("th", headings)
    return f'<table class="data"><thead>{head}</thead><tbody>{body}</tbody></table>'
