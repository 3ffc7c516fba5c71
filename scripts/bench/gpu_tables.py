"""Results of bench_gpu.py as Markdown."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
STATUSES = "ok", "wrong", "failed", "unsupported", "not reached"


def report(results: Row) -> str:
    """All results, a table for each section."""
    device = results["device"]
    parts = [f"# {device.get('kind', 'no device')}, {results['date'][:10]}"]
    parts += [f"`{results['command']}`"]
    if not results["finished"]:
        parts.append("Not finished: what is not here was not reached.")
    for section in TABLES:
        if rows := [row for row in results["rows"] if row["section"] == section]:
            parts += [f"## {section}", table(section, rows, device)]
    parts += [f"- {name}: {reason}" for name, reason in results["left_out"].items()]
    return "\n\n".join(parts) + "\n"


def table(section: str, rows: list[Row], device: Row) -> str:
    """The table of a section, and why figures are missing."""
    make, keys = TABLES[section]
    good = [row for row in rows if row["status"] == "ok"]
    parts = [make(rows if section == "check" else good, *rate(device))]
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        if row["status"] != "ok":
            reason = ": ".join(filter(None, [row["status"], row.get("reason")]))
            names[reason][" ".join(str(row[key]) for key in keys if key in row)] = None
    lines = [f"- {', '.join(of)}: {reason}" for reason, of in names.items()]
    return "\n\n".join([*parts, *(["\n".join(lines)] if lines else [])])


def checks(rows: list[Row], factor: float, unit: str) -> str:
    """Number of checks that each backend passed, and its largest error."""
    lines = []
    for op, backend in dict.fromkeys((row["op"], row["backend"]) for row in rows):
        own = [row for row in rows if (row["op"], row["backend"]) == (op, backend)]
        statuses = [row["status"] for row in own]
        if {*statuses} != {"unsupported"}:
            errors = [max(row["errors"].values()) for row in own if row["status"] == "ok"]
            counts = [str(statuses.count(status)) for status in STATUSES]
            lines.append([op, backend, *counts, f"{max(errors):.1e}" if errors else ""])
    head = "op, backend, right, wrong, failed, refused, not reached, largest error"
    return f"Against float64 on the device, values and gradients.\n\n{grid(head, lines)}"


def train(rows: list[Row], factor: float, unit: str) -> str:
    """Our training step and PyTorch's."""
    lines = []
    for row in rows:
        mfu, peak = row.get("mfu_causal"), row.get("peak_bytes")
        figures = f"{row['step_ms']:,.1f}", f"{row['tokens_per_second']:,.0f}"
        shares = f"{mfu:.1%}" if mfu else "", f"{peak / 2**30:.1f} GiB" if peak else ""
        lines.append([row["program"], str(row["batch"]), *figures, *shares])
    return grid("program, rows, step ms, tokens/s, causal MFU, peak memory", lines)


def attention(rows: list[Row], factor: float, unit: str) -> str:
    """A table for each mask and head dim: forward / backward by length."""
    parts = []
    groups = {(row["mask"], row["head_dim"]): row["window"] for row in rows}
    for mask, dim in sorted(groups, key=lambda key: (key[0], -key[1])):
        own = [row for row in rows if (row["mask"], row["head_dim"]) == (mask, dim)]
        speeds: dict[str, dict[int, str]] = defaultdict(dict)
        for row in own:
            speeds[row["backend"]][row["length"]] = both(row, factor)
        lengths = sorted({row["length"] for row in own})
        lines = [[name, *map(of.get, lengths, [""] * len(lengths))] for name, of in speeds.items()]
        window = groups[mask, dim]
        counted = f"window {window:,}, visible pairs" if window else "causal, half of T S"
        title = f"{unit} forward / backward, head_dim {dim}, {counted} counted"
        parts.append(f"{title}\n\n{grid(['backend', *(f'{n:,}' for n in lengths)], lines)}")
    return "\n\n".join(parts)


def cross_entropy(rows: list[Row], factor: float, unit: str) -> str:
    """Time and memory of each backend and shape."""
    lines = []
    for row in rows:
        times = [f"{row[key]:,.2f}" for key in ("forward_ms", "both_ms")]
        speeds = [figure(row[key] * factor) for key in ("forward_tflops", "both_tflops")]
        memory = f"{row['memory_bytes'] / 2**30:.2f} GiB"
        lines.append([row["shape"], row["backend"], *times, *speeds, memory])
    head = f"shape; backend; forward alone, ms; both, ms; forward alone, {unit}; both, {unit}"
    about = (
        "The forward pass counts 2 M H V, both count 6, whatever is computed again. Memory is what "
        "the compiled program of both takes besides its arguments, gradients included."
    )
    return f"{about}\n\n{grid([*head.split('; '), 'memory'], lines)}"


def grouped(rows: list[Row], factor: float, unit: str) -> str:
    """Time of each backend and shape."""
    lines = []
    for row in rows:
        back = f"{row['backward_ms']:,.2f}" if row["backward_ms"] else ""
        times = f"{row['forward_ms']:,.2f}", back
        lines.append([row["shape"], row["backend"], *times, both(row, factor)])
    head = f"shape; backend; forward, ms; backward, ms; forward / backward, {unit}"
    return grid(head.split("; "), lines)


def ceilings(rows: list[Row], factor: float, unit: str) -> str:
    """Speeds of a matmul and of a copy."""
    lines = []
    for row in rows:
        copied = f"{figure(row.get('gigabytes_per_second', 0))} GB/s"
        speed = f"{figure(row['tflops'] * factor)} {unit}" if "tflops" in row else copied
        lines.append([row["what"], speed])
    return grid("what, reached", lines)


TABLES = {
    "check": (checks, ("op", "backend", "case")),
    "train": (train, ("program", "batch")),
    "attention": (attention, ("backend",)),
    "cross_entropy": (cross_entropy, ("shape", "backend")),
    "grouped_matmul": (grouped, ("shape", "backend")),
    "ceilings": (ceilings, ("what",)),
}
"""What makes the table of a section, and the columns that name a row without figures."""


def grid(head: str | list[str], rows: Iterable[list[str]]) -> str:
    """A table of Markdown; the head may be a text with commas."""
    names = head.split(", ") if isinstance(head, str) else head
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [names, ["---"] * len(names), *rows])


def rate(device: Row) -> tuple[float, str]:
    """(factor from TFLOP/s, unit) for a device: GFLOP/s on a CPU."""
    return (1000.0, "GFLOP/s") if device.get("platform") == "cpu" else (1.0, "TFLOP/s")


def both(row: Row, factor: float) -> str:
    """Speeds of the forward and the backward pass."""
    speeds = row["forward_tflops"], row["backward_tflops"]
    return " / ".join("?" if speed is None else figure(speed * factor) for speed in speeds)


def figure(value: float) -> str:
    """Three digits, or all of a large number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
