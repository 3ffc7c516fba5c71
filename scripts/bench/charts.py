"""Line charts, bar charts and screens as SVG files, by matplotlib (the extra `plots`)."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Points = Sequence[tuple[float, float]]
INK = "#1f2933"
COLOURS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #7f6a00 #6b4c9a #999999".split()
"""The palette of Okabe and Ito, which the colour-blind can distinguish, and more."""
MARKERS = "osD^"
MANY = 20
"""Fewest points of a line that is drawn without marks."""
STYLE = {
    "svg.fonttype": "none",  # text stays text, in the reader's font
    "svg.hashsalt": "maxstack",  # the same figures give the same file
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "text.color": INK,
}


class Panel(NamedTuple):
    """A plane of a line chart."""

    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    scales: tuple[str, str] = ("linear", "linear")


def line_chart(file: Path, title: str, note: str, panels: Sequence[Panel]) -> None:
    """Draw panels side by side, with one legend."""
    figure = _figure(4.3 * len(panels), 4.2)
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    shown: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, points in panel.series.items():
            number = names.index(name)
            (shown[name],) = axes.plot(
                *zip(*sorted(points), strict=True),
                color=COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)] if len(points) < MANY else "",
                markersize=4,
            )
        x, y = panel.scales
        axes.set_xscale(x, **({"base": 2} if x == "log" else {}))
        axes.set_yscale(y)
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        if x == "log":
            places = sorted({x for points in panel.series.values() for x, _ in points})
            axes.set_xticks(places, [f"{place:,.0f}" for place in places])
        if y == "linear":
            axes.set_ylim(bottom=0)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=2 * len(panels))
    _save(figure, file, title, note)


def bar_chart(
    file: Path, title: str, note: str, unit: str, rows: Mapping[str, Mapping[str, float]]
) -> None:
    """Draw a horizontal bar for each row, its parts one after the other, their sum beside it."""
    figure = _figure(8.6, 1.4 + 0.28 * len(rows))
    axes = figure.subplots()
    parts = list(dict.fromkeys(part for values in rows.values() for part in values))
    ends = [0.0] * len(rows)
    for number, part in enumerate(parts):
        widths = [values.get(part, 0.0) for values in rows.values()]
        bars = axes.barh([*rows], widths, 0.7, ends, color=COLOURS[number], label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    labels = [f"{end:,.0f}" if end >= 100 else f"{end:.3g}" for end in ends]
    axes.bar_label(bars, labels, padding=4)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    if len(parts) > 1:
        axes.legend(loc="lower right")
    _save(figure, file, title, note)


def screen(file: Path, title: str, text: str) -> None:
    """Draw text as in a terminal; the command, its first line, is wrapped."""
    command, *lines = text.rstrip().splitlines()
    width = max(map(len, lines))
    lines = [*textwrap.wrap(command, width, subsequent_indent="    "), *lines]
    wide, high = 0.077 * width + 0.4, 0.163 * len(lines) + 0.6
    figure = _figure(wide, high)
    figure.text(0.2 / wide, 0.1 / high, "\n".join(lines), family="monospace", linespacing=1.3)
    _save(figure, file, title, "")


def _figure(width: float, height: float) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    return Figure((width, height), layout="constrained")


def _save(figure: Any, file: Path, title: str, note: str) -> None:
    figure.suptitle("\n".join(filter(None, [title, note])), fontsize=11)
    figure.savefig(file, metadata={"Date": None, "Title": title})
