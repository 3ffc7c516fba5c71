"""Plots and tables of what bench_cpu.py writes: the step beside its peers, and how it scales."""

import statistics
from typing import Any

from bench.gpu_tables import grid
from bench.svg import Panel, bar_chart, line_chart

Found = dict[str, Any]


def peer_plots(found: Found, stem: str) -> dict[str, str]:
    """Tokens/s of the reference work, a bar for each program, and by width and length."""
    note = f"{found['processor']}, {found['date']}, jax {found['versions']['jax']}"
    bars = [
        (name, [statistics.median(values)]) for name, values in found["tokens_per_second"].items()
    ]
    plots = {
        f"{stem}.svg": bar_chart(
            "The reference work beside its peers",
            note,
            "tokens/s",
            (),
            sorted(bars, key=lambda bar: _dtype(bar[0]), reverse=True),
        )
    }
    if sizes := found.get("scaling"):
        first = sizes[0]
        wide = [size for size in sizes if size["length"] == first["length"]]
        long = [size for size in sizes if size["width"] == first["width"]]
        panels = [
            Panel("Speed by width", "width", "tokens/s", _series(wide, "width"), True),
            Panel("Speed by length", "length", "tokens/s", _series(long, "length"), True),
            Panel(
                "Memory by length", "length", "GB", _series(long, "length", "gigabytes"), log=True
            ),
        ]
        plots[f"{stem}-scaling.svg"] = line_chart(
            "The reference work, wider and longer, float32", note, panels
        )
    return plots


def peer_tables(found: Found) -> list[str]:
    """Speed and memory of every program, the start, and both by size."""
    speeds = {name: statistics.median(each) for name, each in found["tokens_per_second"].items()}
    rounds = len(found["tokens_per_second"]["maxstack f32"])
    step = [["program", "tokens/s", "of all rounds", "peak GB", "maxstack is x as fast"]]
    for name in sorted(speeds, key=_dtype, reverse=True):
        speed, each = speeds[name], found["tokens_per_second"][name]
        memory = found["gigabytes"].get(name)
        step.append(
            [
                name,
                f"{speed:,.0f}",
                f"{min(each):,.0f} to {max(each):,.0f}",
                f"{memory:.2f}" if memory else "",
                f"{speeds[f'maxstack {_dtype(name)}'] / speed:.2f}",
            ]
        )
    start = [["process start to first loss", "seconds"]]
    start += [
        [f"maxstack, {kind} compilation cache", f"{seconds:.1f}"]
        for kind, (seconds, _) in found["start"].items()
    ]
    start += [
        [f"{name}, cold", f"{statistics.median(each):.1f}"]
        for name, each in found["peers_first_loss"].items()
    ]
    sizes = [["width, rows x length", "program", "tokens/s", "peak GB", "maxstack is x as fast"]]
    for size in found.get("scaling", ()):
        where = f"{size['width']:,}, {size['rows']} x {size['length']:,}"
        ours = size["programs"]["maxstack"]["tokens_per_second"]
        for name, told in size["programs"].items():
            speed = told["tokens_per_second"]
            memory = f"{told['gigabytes']:.2f}"
            sizes.append([where, name, f"{speed:,.0f}", memory, f"{ours / speed:.2f}"])
    tables = [step, start, *([sizes] if len(sizes) > 1 else [])]
    made_with = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return [
        f"`{found['command']}`, {found['date']}, {found['processor']}, {made_with}. Speeds are the "
        f"medians of {rounds} rounds and memory is the largest; maxstack's start and the speeds by "
        "size were measured once.",
        *(grid(head, rows) for head, *rows in tables),
    ]


def _dtype(name: str) -> str:
    return name.split()[-1]


def _series(
    sizes: list[Found], by: str, figure: str = "tokens_per_second"
) -> dict[str, list[tuple[float, float]]]:
    return {
        name: [
            (size[by], size["programs"][name][figure]) for size in sizes if name in size["programs"]
        ]
        for name in sizes[0]["programs"]
    }
