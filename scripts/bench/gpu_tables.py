"""Results of bench_gpu.py as tables of Markdown."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
STATUSES = "ok", "wrong", "failed", "unsupported", "not reached"
COLUMNS = {
    "check": [],
    "train": "program batch step_ms tokens_per_second mfu_causal peak_bytes".split(),
    "attention": [],
    "cross_entropy": (
        "shape backend forward_ms both_ms forward_tflops both_tflops memory_bytes".split()
    ),
    "grouped_matmul": "shape backend forward_ms backward_ms forward_tflops backward_tflops".split(),
    "ceilings": "what tflops gigabytes_per_second".split(),
}
"""Of the sections in their order; checks and attention have tables of their own."""
NAMES = "op", "backend", "case", "shape", "program"
"""Columns that name a row without figures."""
LOGITS = (
    "The forward pass counts 2 M H V, both count 6, whatever is computed again. Memory is what "
    "the compiled program of both takes besides its arguments, gradients included."
)


def tables(results: Row) -> list[str]:
    """The command that made the results, and a table for each section."""
    jax = results["device"].get("versions", {}).get("jax")
    when, where = results["date"][:10], results["machine"]["processor"]
    parts = [f"`{results['command']}`, {when}, {where}, jax {jax}:"]
    for section in COLUMNS:
        if rows := [row for row in results["rows"] if row["section"] == section]:
            parts.append(f"**{section.replace('_', ' ')}**")
            good = [row for row in rows if row["status"] == "ok"]
            if section == "check":
                parts += checks(rows)
            elif section == "attention":
                parts += attention(good, *rate(results["device"]))
            else:
                parts += [LOGITS] if section == "cross_entropy" else []
                parts.append(plain(good, COLUMNS[section], *rate(results["device"])))
            parts += missing(rows)
    return parts


def plain(rows: list[Row], columns: list[str], factor: float, unit: str) -> str:
    """A line for each row."""
    head, lines = [], []
    for key in columns:
        head.append(key.replace("tflops", unit).replace("_bytes", " GiB").replace("_", " "))
    for row in rows:
        lines.append([cell(row.get(key), key, factor) for key in columns])
    return grid(head, lines)


def cell(value: Any, key: str, factor: float) -> str:
    """A value of a row as text."""
    if value is None or isinstance(value, str):
        return value or ""
    scale = factor if key.endswith("tflops") else 2**-30 if key.endswith("_bytes") else 1
    return figure(value * scale)


def missing(rows: list[Row]) -> list[str]:
    """Why figures are missing."""
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        if row["status"] != "ok":
            reason = ": ".join(filter(None, [row["status"], row.get("reason")]))
            names[reason][" ".join(str(row[key]) for key in NAMES if key in row)] = None
    lines = [f"- {', '.join(of)}: {reason}" for reason, of in names.items()]
    return ["\n".join(lines)] if lines else []


def checks(rows: list[Row]) -> list[str]:
    """Number of checks that each backend passed, and its largest error."""
    lines = []
    for op, backend in dict.fromkeys((row["op"], row["backend"]) for row in rows):
        own = [row for row in rows if (row["op"], row["backend"]) == (op, backend)]
        statuses = [row["status"] for row in own]
        if {*statuses} != {"unsupported"}:
            errors = [max(row["errors"].values()) for row in own if row["status"] == "ok"]
            counts = [str(statuses.count(status)) for status in STATUSES]
            lines.append([op, backend, *counts, f"{max(errors):.1e}" if errors else ""])
    head = "op, backend, right, wrong, failed, refused, not reached, largest error".split(", ")
    return ["Against float64 on the device, values and gradients.", grid(head, lines)]


def attention(rows: list[Row], factor: float, unit: str) -> list[str]:
    """A table for each mask and head dim: forward / backward by length."""
    parts = []
    groups = {(row["mask"], row["head_dim"]): row["window"] for row in rows}
    for (mask, dim), window in sorted(
        groups.items(), key=lambda group: (group[0][0], -group[0][1])
    ):
        own = [row for row in rows if (row["mask"], row["head_dim"]) == (mask, dim)]
        speeds: dict[str, dict[int, str]] = defaultdict(dict)
        for row in own:
            ways = row["forward_tflops"], row["backward_tflops"]
            told = ("?" if speed is None else figure(speed * factor) for speed in ways)
            speeds[row["backend"]][row["length"]] = " / ".join(told)
        lengths = sorted({row["length"] for row in own})
        lines = [[name, *map(of.get, lengths, [""] * len(lengths))] for name, of in speeds.items()]
        counted = f"window {window:,}, visible pairs" if window else "causal, half of T S"
        parts.append(f"{unit} forward / backward, head_dim {dim}, {counted} counted")
        parts.append(grid(["backend", *(f"{n:,}" for n in lengths)], lines))
    return parts


def grid(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def rate(device: Row) -> tuple[float, str]:
    """(factor from TFLOP/s, unit) for a device: GFLOP/s on a CPU."""
    return (1000.0, "GFLOP/s") if device.get("platform") == "cpu" else (1.0, "TFLOP/s")


def figure(value: float) -> str:
    """Three digits, or all of a large number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
