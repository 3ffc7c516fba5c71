"""The plots and tables of docs/PERFORMANCE.md, from the measurements in docs/performance/*.json.

A file there is what bench_gpu.py writes (attention's speed and memory by sequence length), what
bench_cpu.py writes (a step beside its peers) or what profile_step.py writes (a step by component).
example: python scripts/plot_performance.py
"""

import json
from pathlib import Path
from typing import Any

from bench import arguments
from bench.cpu_tables import peer_plots, peer_tables
from bench.gpu_tables import PUBLISHED, TABLES, best, rate
from bench.svg import Panel, bar_chart, line_chart

DOCS = Path(__file__).resolve().parent.parent / "docs"
Found = dict[str, Any]


def main() -> None:
    """Write what changed."""
    parser = arguments.parser(__doc__)
    parser.add_argument(
        "--docs",
        type=Path,
        default=DOCS,
        help="the folder that holds PERFORMANCE.md and performance/",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if something would change"
    )
    args = parser.parse_args()
    arguments.write_or_check(written(args.docs), args.check)


def written(docs: Path) -> dict[Path, str]:
    """Every file that follows from the measurements: the plots, and PERFORMANCE.md with its
    tables."""
    files: dict[Path, str] = {}
    page = docs / "PERFORMANCE.md"
    text = page.read_text(encoding="utf-8")
    for source in sorted((docs / "performance").glob("*.json")):
        plots, told = _drawn(source)
        files |= {docs / "performance" / name: plot for name, plot in plots.items()}
        shown = [f"![{name.removesuffix('.svg')}](performance/{name})" for name in plots]
        block = "\n{}\n".format("\n\n".join([*shown, *told]))
        text = arguments.with_block(text, page, f"<!-- {source.stem} -->", "<!-- end -->", block)
    return files | {page: text}


def _drawn(source: Path) -> tuple[dict[str, str], list[str]]:
    """Plots by name, and tables, of what was measured."""
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{source} is not JSON: {error}") from None
    try:
        draw, tell = next(both for key, both in KINDS.items() if key in found)
        return draw(found, source.stem), tell(found)
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise SystemExit(
            f"{source} cannot be drawn ({type(error).__name__}: {error}); write it with "
            "bench_gpu.py, profile_step.py, or bench_cpu.py with `--only step` or without --only"
        ) from None


def bench_plots(found: Found, stem: str) -> dict[str, str]:
    """Attention by sequence length, a plot for each mask and head dim."""
    rows = [row for row in found["rows"] if row["section"] == "attention" and row["status"] == "ok"]
    return {
        f"{stem}-attention-{mask}-{dim}.svg": _attention(
            found, [row for row in rows if (row["mask"], row["head_dim"]) == (mask, dim)]
        )
        for mask, dim in sorted({(row["mask"], row["head_dim"]) for row in rows})
    }


def _attention(found: Found, rows: list[Found]) -> str:
    (factor, unit), first = rate(found["device"]), rows[0]
    gpu = factor == 1
    published = PUBLISHED if gpu and (first["mask"], first["head_dim"]) == ("causal", 128) else {}
    panels = []
    for n, (title, key, label, scale) in enumerate(
        (
            ("Forward", "forward_tflops", unit, factor),
            ("Backward", "backward_tflops", unit, factor),
            ("Temporary memory of both", "temporary_bytes", "MiB", 2**-20),
        )
    ):
        series = _by_backend(rows, key, scale)
        others = {
            name: [*map(_pair, figures[n].items())]
            for name, figures in published.items()
            if n < 2 and figures[n]
        }
        if series or others:
            panels.append(
                Panel(title, "sequence length", label, series | others, n == 2, tuple(others))
            )
    mask = f"window {first['window']:,}" if first["window"] else "causal"
    counted = "visible pairs counted" if first["window"] else "half of T S counted"
    where = found["device"]["kind"] if gpu else found["machine"]["processor"]
    title = (
        f"Attention, {mask}, head_dim {first['head_dim']}, {first['heads']} heads, {first['dtype']}"
    )
    return line_chart(title, f"{where}, {found['date'][:10]}; {counted}", panels)


def _pair(item: tuple[int, float]) -> tuple[float, float]:
    return float(item[0]), float(item[1])


def _by_backend(rows: list[Found], key: str, scale: float) -> dict[str, list[tuple[float, float]]]:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in best(rows, "backend", "length"):
        if row.get(key):
            series.setdefault(row["backend"], []).append((row["length"], row[key] * scale))
    return series


def tables(found: Found) -> list[str]:
    """Tables of the report, each under its name, after the command that made them."""
    told = [
        f"`{found['command']}`, {found['date'][:10]}, {found['machine']['processor']}, "
        f"jax {found['device']['versions']['jax']}:"
    ]
    for section, table in TABLES.items():
        rows = [row for row in found["rows"] if row["section"] == section]
        told += [f"**{section.replace('_', ' ')}**", table(rows, found["device"])] if rows else []
    return told


def step_plots(found: Found, stem: str) -> dict[str, str]:
    """Milliseconds of each component, forward and backward together, and of the rest."""
    rows = [(name, [1e3 * seconds]) for name, seconds in _components(found) if seconds > 0]
    note = (
        f"{found['device']}, {found['tokens']:,} tokens; the whole step takes "
        f"{1e3 * found['step']['seconds']:,.1f} ms"
    )
    return {
        f"{stem}.svg": bar_chart(
            f"A training step by component: {found['config']}", note, "ms a step", (), rows
        )
    }


def step_table(found: Found) -> list[str]:
    """The step by component in numbers."""
    whole = found["step"]["seconds"]
    rows = [
        f"| {name} | {1e3 * seconds:,.1f} | {seconds / whole:.1%} |"
        for name, seconds in [*_components(found), ("the whole step", whole)]
    ]
    words = " ".join(["python scripts/profile_step.py", found["config"], *found["overrides"]])
    return [
        f"`{words}`, jax {found['jax']}, the median of {found['rounds']} rounds:",
        "\n".join(["| component | ms a step | share |", "| --- | --- | --- |", *rows]),
    ]


def _components(found: Found) -> list[tuple[str, float]]:
    """Seconds a step of every component, the largest first, and of what they leave."""
    parts = [
        (f"{row['name']} x {row['count']}" if row["count"] > 1 else row["name"], row["seconds"])
        for row in found["components"]
    ]
    return [*sorted(parts, key=lambda part: -part[1]), ("the rest", found["rest"]["seconds"])]


KINDS = {
    "components": (step_plots, step_table),
    "rows": (bench_plots, tables),
    "tokens_per_second": (peer_plots, peer_tables),
}
"""Plots and tables of a file, by a key of it."""


if __name__ == "__main__":
    main()
