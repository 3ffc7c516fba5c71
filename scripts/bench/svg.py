"""Line charts and bar charts as SVG text: light background, the reader's own sans-serif font,
colours that the colour-blind can distinguish."""

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from html import escape

INK, SOFT, GRID = "#1f2933", "#52606d", "#e4e7eb"
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7f6a00",
    "#6b4c9a",
    "#999999",
)
"""The palette of Okabe and Ito, and more."""
MARKS = ("circle", "square", "diamond", "triangle")
PANEL, HEIGHT, MARGIN = 300, 230, (62, 70)
"""Width and height of a panel's plane, and the space left of it and below for labels."""


MANY = 20
"""Fewest points of a line that a linear panel draws without marks."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plane of a line chart; y is linear unless `log`, x in powers of two unless `linear`."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float, float]]]
    log: bool = False
    dashed: tuple[str, ...] = ()
    """Names of published series."""
    linear: bool = False
    """x starts at 0, with round numbers below; a series of many points has no marks."""


def line_chart(title: str, note: str, panels: Sequence[Panel]) -> str:
    """Panels beside each other with one legend under the title."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    legend, lines = _legend(
        names,
        {name for panel in panels for name in panel.dashed},
        (PANEL + MARGIN[0]) * len(panels),
    )
    top = 82 + 20 * lines
    parts = [
        _panel(panel, names, MARGIN[0] + n * (PANEL + MARGIN[0]), top)
        for n, panel in enumerate(panels)
    ]
    return _page(
        (PANEL + MARGIN[0]) * len(panels) + 24,
        top + HEIGHT + MARGIN[1],
        title,
        note,
        [legend, *parts],
    )


def bar_chart(
    title: str,
    note: str,
    unit: str,
    parts: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float]]],
) -> str:
    """A horizontal bar for each row, its parts one after the other, their sum beside it. Without
    `parts` there is no legend."""
    left, width, step = 30 + 7 * max(len(name) for name, _ in rows), 560, 26
    top = 86 if parts else 66
    ticks = _ticks(0, max(sum(values) for _, values in rows))
    scale = width / ticks[-1]
    body = [_legend(list(parts), set(), left + width)[0]] if parts else []
    bottom = top + step * len(rows)
    for tick in ticks:
        x = left + tick * scale
        body += [
            f'<path d="M{x:.1f} {top - 4}V{bottom}" stroke="{GRID}"/>',
            _text(x, bottom + 18, _number(tick), "middle", SOFT),
        ]
    for n, (name, values) in enumerate(rows):
        x, y = float(left), top + n * step
        body.append(_text(left - 10, y + 14, name, "end"))
        for part, value in enumerate(values):
            body.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{value * scale:.1f}" '
                f'height="{step - 8}" fill="{COLOURS[part]}"/>'
            )
            x += value * scale
        body.append(_text(x + 6, y + 14, _number(sum(values)), "start", SOFT))
    body.append(_text(left + width / 2, bottom + 40, unit, "middle", SOFT))
    return _page(left + width + 70, bottom + 56, title, note, body)


def screen(title: str, lines: Sequence[str]) -> str:
    """Lines of text as in a terminal; commands, which begin with `$`, are wrapped."""
    width = max(len(line) for line in lines if not line.startswith("$ "))
    shown: list[str] = []
    for line in lines:
        is_command = line.startswith("$ ")
        shown += textwrap.wrap(line, width, subsequent_indent="    ") if is_command else [line]
    body = [
        f'<text x="16" y="{70 + 17 * n}" font-family="ui-monospace, Menlo, Consolas, '
        f'monospace" xml:space="preserve" fill="{INK}">'
        f"{escape(line)}</text>"
        for n, line in enumerate(shown)
        if line
    ]
    return _page(32 + 7.3 * width, 80 + 17 * len(shown), title, "", body)


def _page(width: float, height: float, title: str, note: str, body: Sequence[str]) -> str:
    head = (
        f'<text x="16" y="26" font-size="16" font-weight="600" fill="{INK}">{escape(title)}</text>'
        + _text(16, 44, note, "start", SOFT)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
        'font-size="12">\n'
        f'<title>{escape(title)}</title>\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
        + "\n".join([head, *body])
        + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _legend(names: Sequence[str], dashed: set[str], width: float) -> tuple[str, int]:
    """(names with their colours, number of lines)."""
    parts, x, line = [], 16.0, 0
    for name in names:
        wide = 34 + 6.6 * len(name)
        if x > 16 and x + wide > width:
            x, line = 16.0, line + 1
        y, (colour, mark) = 62 + 20 * line, _look(names, name)
        stroke = ' stroke-dasharray="5 4"' if name in dashed else ""
        parts.append(
            f'<path d="M{x:.1f} {y - 4}h20" stroke="{colour}" '
            f'stroke-width="2"{stroke}/>{_mark(mark, x + 10, y - 4, colour)}'
        )
        parts.append(_text(x + 26, y, name, "start"))
        x += wide + 10
    return "\n".join(parts), line + 1


def _look(names: Sequence[str], name: str) -> tuple[str, str]:
    i = names.index(name)
    return COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]


def _mark(kind: str, x: float, y: float, colour: str) -> str:
    shapes = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6"',
        "square": f'<path d="M{x - 3.3:.1f} {y - 3.3:.1f}h6.6v6.6h-6.6z"',
        "diamond": f'<path d="M{x:.1f} {y - 4.6:.1f}l4.6 4.6l-4.6 4.6l-4.6 -4.6z"',
        "triangle": f'<path d="M{x:.1f} {y - 4.4:.1f}l4.2 7.6h-8.4z"',
    }
    return f'{shapes[kind]} fill="{colour}" stroke="#ffffff" stroke-width="0.8"/>'


def _panel(panel: Panel, names: Sequence[str], left: float, top: float) -> str:
    points = [point for series in panel.series.values() for point in series]
    xs = sorted({x for x, _ in points})
    if panel.linear:
        xs = _ticks(0, xs[-1])
    else:
        first, span = math.log2(xs[0]), math.log2(xs[-1] / xs[0]) or 1.0
    ticks = _decades([y for _, y in points]) if panel.log else _ticks(0, max(y for _, y in points))

    def position(x: float, y: float) -> tuple[float, float]:
        across = x / xs[-1] if panel.linear else (math.log2(x) - first) / span
        up = math.log(y / ticks[0]) / math.log(ticks[-1] / ticks[0]) if panel.log else y / ticks[-1]
        return left + 14 + across * (PANEL - 28), top + HEIGHT * (1 - up)

    parts = [_text(left, top - 12, panel.title, "start")]
    for tick in ticks:
        y = position(xs[0], tick)[1]
        parts += [
            f'<path d="M{left:.1f} {y:.1f}h{PANEL}" stroke="{GRID}"/>',
            _text(left - 6, y + 4, _number(tick), "end", SOFT),
        ]
    for x in xs:
        parts.append(
            _text(position(x, ticks[-1])[0], top + HEIGHT + 18, _number(x), "middle", SOFT)
        )
    parts.append(f'<path d="M{left:.1f} {top + HEIGHT:.1f}h{PANEL}" stroke="{SOFT}"/>')
    parts.append(_text(left + PANEL / 2, top + HEIGHT + 40, panel.x_label, "middle", SOFT))
    parts.append(_text(left + PANEL, top - 12, panel.y_label, "end", SOFT))
    for name, series in panel.series.items():
        colour, mark = _look(names, name)
        positions = [position(x, y) for x, y in sorted(series)]
        stroke = ' stroke-dasharray="5 4"' if name in panel.dashed else ""
        route = "L".join(f"{x:.1f} {y:.1f}" for x, y in positions)
        parts.append(f'<path d="M{route}" fill="none" stroke="{colour}" stroke-width="2"{stroke}/>')
        parts += [
            _mark(mark, x, y, colour)
            for x, y in positions
            if not panel.linear or len(positions) < MANY
        ]
    return "\n".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high` or slightly above, about five steps."""
    rough = (high - low) / 5 or 1.0
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    return [low + step * n for n in range(max(1, math.ceil((high - low) / step - 1e-9)) + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    """Powers of ten around all values; of four if those would be few."""
    base = 10.0 if max(values) / min(values) > 1000 else 4.0
    low, high = math.floor(math.log(min(values), base)), math.ceil(math.log(max(values), base))
    return [base**n for n in range(low, max(high, low + 1) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"
