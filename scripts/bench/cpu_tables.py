"""What bench_cpu.py and profile_step.py write, as tables of Markdown and as charts."""

import statistics
from pathlib import Path
from typing import Any

from bench.charts import Panel, bar_chart, line_chart
from bench.gpu_tables import grid

Found = dict[str, Any]


def draw_peers(found: Found, stem: Path) -> list[str]:
    """Draw tokens/s of the reference work, and by width and length -> the names of the files."""
    note = f"{found['processor']}, {found['date']}, jax {found['versions']['jax']}"
    speeds = {name: {"": speed} for name, speed in medians(found).items()}
    file = stem.with_suffix(".svg")
    bar_chart(file, "The reference work beside its peers", note, "tokens/s", speeds)
    sizes = found.get("scaling")
    if not sizes:
        return [file.name]
    wide = [size for size in sizes if size["length"] == sizes[0]["length"]]
    long = [size for size in sizes if size["width"] == sizes[0]["width"]]
    panels = [
        Panel(title, by, unit, series(chosen, by, figure), ("log", "log"))
        for title, by, unit, chosen, figure in (
            ("Speed by width", "width", "tokens/s", wide, "tokens_per_second"),
            ("Speed by length", "length", "tokens/s", long, "tokens_per_second"),
            ("Memory by length", "length", "GB", long, "gigabytes"),
        )
    ]
    wider = stem.with_name(f"{stem.name}-scaling.svg")
    line_chart(wider, "The reference work, wider and longer, float32", note, panels)
    return [file.name, wider.name]


def series(sizes: list[Found], by: str, figure: str) -> dict[str, list[tuple[float, float]]]:
    """A figure of every program by width or length."""
    found: dict[str, list[tuple[float, float]]] = {}
    for size in sizes:
        for name, told in size["programs"].items():
            found.setdefault(name, []).append((size[by], told[figure]))
    return found


def medians(found: Found) -> dict[str, float]:
    """Tokens/s of every program, float32 first."""
    speeds = found["tokens_per_second"]
    names = sorted(speeds, key=dtype, reverse=True)
    return {name: statistics.median(speeds[name]) for name in names}


def dtype(name: str) -> str:
    """The type of a program's name."""
    return name.split()[-1]


def peer_tables(found: Found) -> list[str]:
    """Speed and memory of every program, the start, and both by size."""
    speeds, step = medians(found), []
    for name, speed in speeds.items():
        each, memory = found["tokens_per_second"][name], found["gigabytes"].get(name)
        step.append(
            [
                name,
                f"{speed:,.0f}",
                f"{min(each):,.0f} to {max(each):,.0f}",
                f"{memory:.2f}" if memory else "",
                f"{speeds[f'maxstack {dtype(name)}'] / speed:.2f}",
            ]
        )
    start = [
        [f"maxstack, {kind} compilation cache", f"{seconds:.1f}"]
        for kind, (seconds, _) in found["start"].items()
    ]
    for name, each in found["peers_first_loss"].items():
        start.append([f"{name}, cold", f"{statistics.median(each):.1f}"])
    sizes = []
    for size in found.get("scaling", ()):
        where = f"{size['width']:,}, {size['rows']} x {size['length']:,}"
        ours = size["programs"]["maxstack"]["tokens_per_second"]
        for name, told in size["programs"].items():
            speed, memory = told["tokens_per_second"], f"{told['gigabytes']:.2f}"
            sizes.append([where, name, f"{speed:,.0f}", memory, f"{ours / speed:.2f}"])
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    rounds, times = len(found["tokens_per_second"]["maxstack f32"]), "maxstack is x as fast"
    size_head = ["width, rows x length", "program", "tokens/s", "peak GB", times]
    return [
        f"`{found['command']}`, {found['date']}, {found['processor']}, {versions}. Speeds are the "
        f"medians of {rounds} rounds and memory is the largest; maxstack's start and the speeds by "
        "size were measured once.",
        grid(["program", "tokens/s", "of all rounds", "peak GB", times], step),
        grid(["process start to first loss", "seconds"], start),
        *([grid(size_head, sizes)] if sizes else []),
    ]


def draw_step(found: Found, stem: Path) -> list[str]:
    """Draw milliseconds of each component, forward and backward together, and of the rest."""
    rows = {name: {"": 1e3 * seconds} for name, seconds in components(found) if seconds > 0}
    note = (
        f"{found['device']}, {found['tokens']:,} tokens; the whole step takes "
        f"{1e3 * found['step']['seconds']:,.1f} ms"
    )
    title = f"A training step by component: {found['config']}"
    bar_chart(stem.with_suffix(".svg"), title, note, "ms a step", rows)
    return [f"{stem.name}.svg"]


def step_tables(found: Found) -> list[str]:
    """The step by component in numbers."""
    whole = found["step"]["seconds"]
    rows = [
        [name, f"{1e3 * seconds:,.1f}", f"{seconds / whole:.1%}"]
        for name, seconds in [*components(found), ("the whole step", whole)]
    ]
    words = " ".join(["python scripts/profile_step.py", found["config"], *found["overrides"]])
    return [
        f"`{words}`, jax {found['jax']}, {found['rounds']} rounds:",
        grid(["component", "ms a step", "share"], rows),
    ]


def components(found: Found) -> list[tuple[str, float]]:
    """Seconds a step of every component, the largest first, and of what they leave."""
    parts = []
    for row in sorted(found["components"], key=lambda row: -row["seconds"]):
        times = f" x {row['count']}" if row["count"] > 1 else ""
        parts.append((row["name"] + times, row["seconds"]))
    return [*parts, ("the rest", found["rest"]["seconds"])]
