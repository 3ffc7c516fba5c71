"""Results of bench_gpu.py as Markdown."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
GIB = 2**30


def report(results: Row) -> str:
    """All results, a table for each section."""
    device = results["device"]
    jax = device.get("versions", {}).get("jax", "?")
    title = f"{device.get('kind', 'no device')}, {results['date'][:10]}, jax {jax}"
    parts = [f"# {title}", f"`{results['command']}`"]
    if not results["finished"]:
        parts.append("Not finished: what is not here was not reached.")
    for section in TABLES:
        if rows := [row for row in results["rows"] if row["section"] == section]:
            parts += [f"## {section}", table(section, rows, device)]
    if left_out := results["left_out"]:
        lines = [f"- {name}: {reason}" for name, reason in left_out.items()]
        parts += ["## Not measured", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def table(section: str, rows: list[Row], device: Row) -> str:
    """The table of a section, and why figures are missing."""
    make, keys = TABLES[section]
    lines = [make(rows, *rate(device))]
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        if row["status"] != "ok":
            reason = ": ".join(filter(None, [row["status"], row.get("reason")]))
            names[reason][" ".join(str(row[key]) for key in keys if key in row)] = None
    reasons = "\n".join(f"- {', '.join(of)}: {reason}" for reason, of in names.items())
    return "\n\n".join([*lines, *([reasons] if reasons else [])])


def checks(rows: list[Row], factor: float, unit: str) -> str:
    """Number of checks that each backend passed, and its largest error."""
    lines = []
    for op, backend in dict.fromkeys((row["op"], row["backend"]) for row in rows):
        own = [row for row in rows if (row["op"], row["backend"]) == (op, backend)]
        own = [row for row in own if row["case"] != "every case"]
        statuses = [row["status"] for row in own]
        errors = [max(row["errors"].values()) for row in own if row["status"] == "ok"]
        if statuses.count("unsupported") < len(own):
            counts = [str(statuses.count(status)) for status in STATUSES]
            lines.append([op, backend, *counts, f"{max(errors):.1e}" if errors else ""])
    head = ["op", "backend", "right", "wrong", "failed", "refused", "not reached", "largest error"]
    return f"Against float64 on the device, values and gradients.\n\n{grid(head, lines)}"


STATUSES = "ok", "wrong", "failed", "unsupported", "not reached"


def train(rows: list[Row], factor: float, unit: str) -> str:
    """Our training step and PyTorch's."""
    lines = []
    for row in rows:
        cells = [""] * 4
        if row["status"] == "ok":
            mfu, peak = row.get("mfu_causal"), row.get("peak_bytes")
            cells = [f"{row['step_ms']:,.1f}", f"{row['tokens_per_second']:,.0f}"]
            cells += [f"{mfu:.1%}" if mfu else "", f"{peak / GIB:.1f} GiB" if peak else ""]
        lines.append([row["program"], str(row["batch"]), *cells])
    head = ["program", "rows", "step, ms", "tokens/s", "causal MFU", "peak memory"]
    keys = "embed", "layers", "heads", "kv_heads", "head_dim", "hidden", "vocab", "length"
    about = "; ".join(f"{key} {rows[0][key]:,}" for key in keys)
    return f"{about}; bfloat16 compute, float32 weights and AdamW.\n\n{grid(head, lines)}"


def attention(rows: list[Row], factor: float, unit: str) -> str:
    """A table for each mask and head dim: forward / backward by length."""
    parts = []
    groups = {(row["mask"], row["head_dim"]): row["window"] for row in rows}
    for mask, dim in sorted(groups, key=lambda key: (key[0], -key[1])):
        own = [row for row in rows if (row["mask"], row["head_dim"]) == (mask, dim)]
        lengths = sorted({row["length"] for row in own})
        lines = []
        cells: dict[str, dict[int, str]] = {row["backend"]: {} for row in own}
        for row in own:
            if row["status"] == "ok":
                cells[row["backend"]][row["length"]] = both(row, factor)
        for backend, speeds in cells.items():
            if speeds:
                lines.append([backend, *(speeds.get(length, "") for length in lengths)])
        window = groups[mask, dim]
        counted = f"window {window:,}, visible pairs" if window else "causal, half of T S"
        head = ["backend", *(f"{length:,}" for length in lengths)]
        title = f"{unit} forward / backward, head_dim {dim}, {counted} counted"
        parts.append(f"{title}\n\n{grid(head, lines)}")
    return "\n\n".join(parts)


def cross_entropy(rows: list[Row], factor: float, unit: str) -> str:
    """Time and memory of each backend and shape."""
    lines = [
        [
            row["shape"],
            row["backend"],
            f"{row['forward_ms']:,.2f}",
            f"{row['both_ms']:,.2f}",
            figure(row["forward_tflops"] * factor),
            figure(row["both_tflops"] * factor),
            f"{row['memory_bytes'] / GIB:.2f} GiB",
        ]
        for row in rows
        if row["status"] == "ok"
    ]
    kinds = "forward alone", "both"
    head = ["shape", "backend", *(f"{kind}, ms" for kind in kinds)]
    head += [*(f"{kind}, {unit}" for kind in kinds), "memory"]
    about = (
        "The forward pass counts 2 M H V, both count 6, whatever is computed again. "
        "Memory is what the compiled program of both takes besides "
        "its arguments, gradients included."
    )
    return f"{about}\n\n{grid(head, lines)}"


def grouped(rows: list[Row], factor: float, unit: str) -> str:
    """Time of each backend and shape."""
    lines = [
        [
            row["shape"],
            row["backend"],
            f"{row['forward_ms']:,.2f}",
            f"{row['backward_ms']:,.2f}" if row["backward_ms"] else "",
            both(row, factor),
        ]
        for row in rows
        if row["status"] == "ok"
    ]
    head = ["shape", "backend", "forward, ms", "backward, ms", f"forward / backward, {unit}"]
    return grid(head, lines)


def ceilings(rows: list[Row], factor: float, unit: str) -> str:
    """Speeds of a matmul and of a copy."""
    lines = []
    for row in rows:
        if "tflops" in row:
            lines.append([row["what"], f"{figure(row['tflops'] * factor)} {unit}"])
        elif row["status"] == "ok":
            lines.append([row["what"], f"{figure(row['gigabytes_per_second'])} GB/s"])
    return grid(["what", "reached"], lines)


TABLES = {
    "check": (checks, ("op", "backend", "case")),
    "train": (train, ("program", "batch")),
    "attention": (attention, ("backend",)),
    "cross_entropy": (cross_entropy, ("shape", "backend")),
    "grouped_matmul": (grouped, ("shape", "backend")),
    "ceilings": (ceilings, ("what",)),
}
"""What makes the table of a section, and the columns that name a row without figures."""


def grid(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


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
