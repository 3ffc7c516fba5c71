"""Results of bench_gpu.py as Markdown, beside goals and published figures."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
MFU_GOAL, TOKENS_GOAL, TORCH_GOAL = 0.58, 70_000, 1.1
"""Goals of the training step on one H200: causal MFU, tokens a second, speed over PyTorch's."""
PUBLISHED = {
    "FlashAttention-3 (2024, H100)": ({2048: 521, 4096: 579, 8192: 602, 16384: 616}, {}),
    "FlashAttention-3 (Sep 2026, H100)": (
        {2048: 560, 4096: 667, 8192: 685},
        {2048: 316, 4096: 444, 8192: 539},
    ),
    "cuDNN (2024, H100)": ({2048: 484, 4096: 518, 8192: 529, 16384: 539}, {}),
    "TLX Triton (H100)": ({}, {2048: 347, 4096: 468, 8192: 539}),
}
"""Causal, head_dim 128, forward and backward TFLOP/s: FlashAttention-3 paper (arXiv:2407.08608) and
tritonbench #1267."""
LINEAR = {
    "8,192 tokens, H 2048, V 131072": "Liger-Kernel #1422, CuTe, H100: backward with logits "
    "computed again 695 TFLOP/s, "
    "19 ms if that counts 6 M H V, 2.9 GiB",
    "32,768 tokens, H 2560, V 128256": "marin #6572, H100, JAX: 33.7 ms forward, 123.6 ms "
    "backward, 5.05 GiB",
    "8,192 tokens, H 2304, V 256000": "CCE (arXiv:2411.09009), A100: 134.8 ms for both, 1.16 GB",
}
NAMES = (
    "op",
    "case",
    "program",
    "mask",
    "shape",
    "what",
    "head_dim",
    "length",
    "batch",
    "backend",
    "blocks",
    "xla",
    "quantization",
)
FIGURES = (
    "step_ms",
    "tokens_per_second",
    "mfu_causal",
    "forward_ms",
    "backward_ms",
    "both_ms",
    "forward_tflops",
    "backward_tflops",
    "both_tflops",
    "tflops",
    "gigabytes_per_second",
)


SLOWEST: Row = {"both_ms": float("inf")}


def line(row: Row, device: Row) -> str:
    """A row for the screen."""
    what = [str(row[name]) for name in NAMES if row.get(name) not in (None, row["section"])]
    figures = [f"{name} {_figure(row[name])}" for name in FIGURES if row.get(name) is not None]
    reason = f" {row['reason']}" if row.get("reason") else ""
    return f"{row['section']:14} {' '.join(what)}: {row['status']} {', '.join(figures)}{reason}"


def report(results: Row) -> str:
    """All results, a table for each section."""
    device = results["device"]
    jax = device.get("versions", {}).get("jax", "?")
    title = f"{device.get('kind', 'no device')}, {results['date'][:10]}, jax {jax}"
    parts = [f"# {title}", f"`{results['command']}`"]
    if not results["finished"]:
        parts.append("Not finished: what is not here was not reached.")
    for section, table in TABLES.items():
        if rows := [row for row in results["rows"] if row["section"] == section]:
            parts += [f"## {section}", table(rows, device)]
    if left_out := results["left_out"]:
        lines = [f"- {name}: {reason}" for name, reason in left_out.items()]
        parts += ["## Not measured", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def checks(rows: list[Row], device: Row) -> str:
    """Number of checks that each backend passed, its largest error, and the other checks."""
    table = []
    for op, backend in dict.fromkeys((row["op"], row["backend"]) for row in rows):
        own = [row for row in rows if (row["op"], row["backend"]) == (op, backend)]
        own = [row for row in own if row["case"] != "every case"]
        if not own:
            continue
        statuses = [row["status"] for row in own]
        counts = [
            str(statuses.count(status))
            for status in ("ok", "wrong", "failed", "unsupported", "not reached")
        ]
        errors = [error for row in own if row["status"] == "ok" for error in row["errors"].values()]
        table.append([op, backend, *counts, f"{max(errors):.1e}" if errors else ""])
    head = ["op", "backend", "right", "wrong", "failed", "refused", "not reached", "largest error"]
    wrong = _reasons(rows, ("op", "backend", "case"), ("wrong", "failed", "unsupported"))
    return f"Against float64 on the device, values and gradients.\n\n{grid(head, table)}{wrong}"


def train(rows: list[Row], device: Row) -> str:
    """Our training step and PyTorch's, beside the goals."""
    table = []
    for row in rows:
        size = row.get("peak_bytes") or row.get("compiled_bytes")
        memory = f"{size / 2**30:.1f} GiB" if size else ""
        cells, kernels = [""] * 3, row["status"]
        if row["status"] == "ok":
            mfu = _percent(row.get("mfu_causal"))
            cells = [f"{row['step_ms']:,.1f}", f"{row['tokens_per_second']:,.0f}", mfu]
            kernels = ", ".join(
                f"{name} (unchecked)" if name in row["unchecked"] else name
                for name in row.get("kernels", [])
            )
        table.append([row["program"], str(row["batch"]), *cells, memory, kernels])
    head = ["program", "rows", "step, ms", "tokens/s", "causal MFU", "peak memory", "kernels"]
    own, theirs = (_fastest(rows, name) for name in ("maxstack", "torch"))
    goals = ""
    if own and own["mfu_causal"]:
        speed = own["tokens_per_second"]
        peer = "PyTorch not measured."
        if theirs:
            peer = f"{speed / theirs['tokens_per_second']:.2f} x PyTorch."
        goals = (
            f"Goals on an H200: {MFU_GOAL:.0%} causal MFU, {TOKENS_GOAL:,} tokens/s, "
            f"{TORCH_GOAL} x PyTorch. "
            f"Here: {_percent(own['mfu_causal'])}, {speed:,.0f} tokens/s, {peer}"
        )
    keys = "embed", "layers", "heads", "kv_heads", "head_dim", "hidden", "vocab", "length"
    about = "; ".join(f"{key} {rows[0][key]:,}" for key in keys if key in rows[0])
    return (
        f"{about}; bfloat16 compute, float32 weights and AdamW.\n\n"
        f"{grid(head, table)}\n\n{goals}" + _reasons(rows, ("program", "batch"))
    )


def attention(rows: list[Row], device: Row) -> str:
    """One table for each mask and head dim: forward / backward by length."""
    (factor, unit), parts = rate(device), []
    groups = {(row["mask"], row["head_dim"]) for row in rows}
    for mask, dim in sorted(groups, key=lambda key: (key[0], -key[1])):
        own = [row for row in rows if (row["mask"], row["head_dim"]) == (mask, dim)]
        lengths = sorted({row["length"] for row in own})
        table = []
        for backend in dict.fromkeys(row["backend"] for row in own):
            fastest = best([row for row in own if row["backend"] == backend], "length")
            cells = {row["length"]: _pair(row, factor) for row in fastest}
            if cells:
                table.append([backend, *(cells.get(length, "") for length in lengths)])
        if factor == 1 and (mask, dim) == ("causal", 128):
            for name, (forward, backward) in PUBLISHED.items():
                pairs = (f"{forward.get(n, '')} / {backward.get(n, '')}" for n in lengths)
                table.append([f"*{name}*", *pairs])
        counted = "causal, half of T S counted"
        if window := next((row["window"] for row in own if row["window"]), None):
            counted = f"window {window:,}, visible pairs counted"
        title = f"{unit} forward / backward, head_dim {dim}, {counted}"
        head = ["backend", *(f"{length:,}" for length in lengths)]
        parts.append(f"{title}\n\n{grid(head, table)}")
    return "\n\n".join(parts) + _reasons(
        rows, ("backend",), ("failed", "wrong", "unchecked", "unsupported", "not reached")
    )


def cross_entropy(rows: list[Row], device: Row) -> str:
    """Time and memory of each backend and shape."""
    factor, unit = rate(device)
    table = [
        [
            row["shape"],
            row["backend"],
            f"{row['forward_ms']:,.2f}",
            f"{row['both_ms']:,.2f}",
            _figure(row["forward_tflops"] * factor),
            _figure(row["both_tflops"] * factor),
            f"{row['memory_bytes'] / 2**30:.2f} GiB",
        ]
        for row in best(rows, "shape", "backend")
    ]
    head = [
        "shape",
        "backend",
        "forward alone, ms",
        "both, ms",
        f"forward alone, {unit}",
        f"both, {unit}",
        "memory",
    ]
    published = "".join(
        f"\n- {shape}: {text}"
        for shape, text in LINEAR.items()
        if any(row["shape"].startswith(shape) for row in rows)
    )
    about = (
        "The forward pass counts 2 M H V, both count 6, whatever is computed again. "
        "Memory is what the compiled program of both takes besides "
        "its arguments, gradients included."
    )
    return (
        f"{about}\n\n{grid(head, table)}"
        + (f"\n\nPublished:\n{published}" if published else "")
        + _reasons(rows, ("shape", "backend"))
    )


def grouped(rows: list[Row], device: Row) -> str:
    """Time of each backend and shape."""
    factor, unit = rate(device)
    table = [
        [
            row["shape"],
            row["backend"],
            f"{row['forward_ms']:,.2f}",
            "" if row["backward_ms"] is None else f"{row['backward_ms']:,.2f}",
            _pair(row, factor),
        ]
        for row in best(rows, "shape", "backend")
    ]
    head = ["shape", "backend", "forward, ms", "backward, ms", f"forward / backward, {unit}"]
    return grid(head, table) + _reasons(rows, ("shape", "backend"))


def ceilings(rows: list[Row], device: Row) -> str:
    """Speeds of a matmul and of a copy."""
    factor, unit = rate(device)
    table = []
    for row in rows:
        if row["status"] == "ok":
            speed = f"{_figure(row.get('gigabytes_per_second', 0))} GB/s"
            if "tflops" in row:
                speed = f"{_figure(row['tflops'] * factor)} {unit}"
            table.append([row["what"], speed])
    return grid(["what", "reached"], table) + _reasons(rows, ("what",))


TABLES = {
    "check": checks,
    "train": train,
    "attention": attention,
    "cross_entropy": cross_entropy,
    "grouped_matmul": grouped,
    "ceilings": ceilings,
}


def grid(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def _reasons(
    rows: list[Row], keys: tuple[str, ...], statuses: tuple[str, ...] | None = None
) -> str:
    """Each reason for a missing figure, with the rows that it holds for."""
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        if row["status"] != "ok" and (statuses is None or row["status"] in statuses):
            reason = ": ".join(filter(None, [row["status"], row.get("reason")]))
            names[reason][" ".join(str(row[key]) for key in keys if key in row)] = None
    lines = [f"\n- {', '.join(of)}: {reason}" for reason, of in names.items()]
    return "".join(["\n", *lines]) if lines else ""


def _fastest(rows: list[Row], program: str) -> Row | None:
    """The fastest of a program's valid rows."""
    own = (row for row in rows if row["status"] == "ok" and row["program"] == program)
    return max(own, key=lambda row: row["tokens_per_second"], default=None)


def best(rows: list[Row], *keys: str) -> list[Row]:
    """The fastest of the valid rows that differ only in the sizes of blocks."""
    fastest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        if row["status"] == "ok" and row["both_ms"] < fastest.get(key, SLOWEST)["both_ms"]:
            fastest[key] = row
    return list(fastest.values())


def rate(device: Row) -> tuple[float, str]:
    """(factor from TFLOP/s, unit) for a device: GFLOP/s on a CPU."""
    return (1000.0, "GFLOP/s") if device.get("platform") == "cpu" else (1.0, "TFLOP/s")


def _pair(row: Row, factor: float) -> str:
    return " / ".join(
        "?" if value is None else _figure(value * factor)
        for value in (row["forward_tflops"], row["backward_tflops"])
    )


def _figure(value: float) -> str:
    """Three digits, or all of a large number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
