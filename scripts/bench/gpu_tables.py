"""What bench_gpu.py found, as Markdown, beside goals and published figures."""

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
MFU_GOAL, TOKENS_GOAL, TORCH_GOAL = 0.58, 70_000, 1.1
"""Of one H200, for the training step: causal MFU, tokens a second, and times as fast as PyTorch."""
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


def line(row: Row, device: Row) -> str:
    """A row as it comes, for the screen."""
    what = [
        str(row[name])
        for name in NAMES
        if row.get(name) is not None and row[name] != row["section"]
    ]
    figures = [f"{name} {_figure(row[name])}" for name in FIGURES if row.get(name) is not None]
    return (
        f"{row['section']:14} {' '.join(what)}: {row['status']} "
        f"{', '.join(figures)}{' ' + row['reason'] if row.get('reason') else ''}"
    )


def report(found: Row) -> str:
    """Everything, a table for each section."""
    device = found["device"]
    title = (
        f"{device.get('kind', 'no device')}, {found['date'][:10]}, jax "
        f"{device.get('versions', {}).get('jax', '?')}"
    )
    parts = [
        f"# {title}\n\n`{found['command']}`"
        + ("" if found["finished"] else "\n\nNot finished: what is not here was not reached.")
    ]
    for section, table in TABLES.items():
        rows = [row for row in found["rows"] if row["section"] == section]
        if rows:
            parts.append(f"## {section}\n\n{table(rows, device)}")
    if found["left_out"]:
        parts.append(
            "## Not measured\n\n"
            + "\n".join(f"- {name}: {reason}" for name, reason in found["left_out"].items())
        )
    return "\n\n".join(parts) + "\n"


def checks(rows: list[Row], device: Row) -> str:
    """How many checks each backend passed, the largest errors, and what did not pass."""
    table = []
    for op, backend in dict.fromkeys((row["op"], row["backend"]) for row in rows):
        mine = [
            row
            for row in rows
            if (row["op"], row["backend"]) == (op, backend) and row["case"] != "every case"
        ]
        count = {
            status: sum(row["status"] == status for row in mine)
            for status in ("ok", "wrong", "failed", "unsupported", "not reached")
        }
        errors = [
            error for row in mine if row["status"] == "ok" for error in row["errors"].values()
        ]
        if mine:
            table.append(
                [op, backend, *map(str, count.values()), f"{max(errors):.1e}" if errors else ""]
            )
    head = ["op", "backend", "right", "wrong", "failed", "refused", "not reached", "largest error"]
    wrong = _reasons(rows, ("op", "backend", "case"), ("wrong", "failed", "unsupported"))
    return f"Against float64 on the device, values and gradients.\n\n{_table(head, table)}{wrong}"


def train(rows: list[Row], device: Row) -> str:
    """Ours and PyTorch's, and how far the goals are."""
    table = []
    for row in rows:
        size = row.get("peak_bytes") or row.get("compiled_bytes")
        memory = f"{size / 2**30:.1f} GiB" if size else ""
        speed = (
            [
                f"{row['step_ms']:,.1f}",
                f"{row['tokens_per_second']:,.0f}",
                _percent(row.get("mfu_causal")),
            ]
            if row["status"] == "ok"
            else [""] * 3
        )
        kernels = ", ".join(
            f"{name} (unchecked)" if name in row["unchecked"] else name
            for name in row.get("kernels", [])
        )
        kernels = kernels if row["status"] == "ok" else row["status"]
        table.append([row["program"], str(row["batch"]), *speed, memory, kernels])
    head = ["program", "rows", "step, ms", "tokens/s", "causal MFU", "peak memory", "kernels"]
    own, theirs = (_fastest(rows, name) for name in ("maxstack", "torch"))
    goals = (
        [
            f"Goals on an H200: {MFU_GOAL:.0%} causal MFU, {TOKENS_GOAL:,} tokens/s, "
            f"{TORCH_GOAL} x PyTorch."
        ]
        if own and own["mfu_causal"]
        else []
    )
    if own and goals:
        goals.append(
            f"Here: {_percent(own['mfu_causal']) or 'no MFU'}, "
            f"{own['tokens_per_second']:,.0f} tokens/s, "
            + (
                f"{own['tokens_per_second'] / theirs['tokens_per_second']:.2f} x PyTorch."
                if theirs
                else "PyTorch not measured."
            )
        )
    keys = "embed", "layers", "heads", "kv_heads", "head_dim", "hidden", "vocab", "length"
    about = "; ".join(f"{key} {rows[0][key]:,}" for key in keys if key in rows[0])
    return (
        f"{about}; bfloat16 compute, float32 weights and AdamW.\n\n"
        f"{_table(head, table)}\n\n{' '.join(goals)}" + _reasons(rows, ("program", "batch"))
    )


def attention(rows: list[Row], device: Row) -> str:
    """One table for each mask and head dim: forward / backward by length."""
    (factor, unit), parts = rate(device), []
    for mask, dim in sorted(
        {(row["mask"], row["head_dim"]) for row in rows}, key=lambda key: (key[0], -key[1])
    ):
        mine = [row for row in rows if (row["mask"], row["head_dim"]) == (mask, dim)]
        lengths = sorted({row["length"] for row in mine})
        table = []
        for backend in dict.fromkeys(row["backend"] for row in mine):
            of = {
                row["length"]: row
                for row in best([row for row in mine if row["backend"] == backend], "length")
            }
            if any(row["status"] == "ok" for row in of.values()):
                table.append([backend, *(_pair(of.get(length), factor) for length in lengths)])
        if factor == 1 and (mask, dim) == ("causal", 128):
            for name, (forward, backward) in PUBLISHED.items():
                table.append(
                    [
                        f"*{name}*",
                        *(
                            f"{forward.get(length, '')} / {backward.get(length, '')}"
                            for length in lengths
                        ),
                    ]
                )
        window = next((row["window"] for row in mine if row["window"]), None)
        counted = (
            f"window {window:,}, visible pairs counted" if window else "causal, half of T S counted"
        )
        title = f"{unit} forward / backward, head_dim {dim}, {counted}"
        parts.append(
            f"{title}\n\n" + _table(["backend", *(f"{length:,}" for length in lengths)], table)
        )
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
        f"{about}\n\n{_table(head, table)}"
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
            *(
                "" if row[name] is None else f"{row[name]:,.2f}"
                for name in ("forward_ms", "backward_ms")
            ),
            _pair(row, factor),
        ]
        for row in best(rows, "shape", "backend")
    ]
    head = ["shape", "backend", "forward, ms", "backward, ms", f"forward / backward, {unit}"]
    return _table(head, table) + _reasons(rows, ("shape", "backend"))


def ceilings(rows: list[Row], device: Row) -> str:
    """What a matmul and a copy reach."""
    factor, unit = rate(device)
    table = [
        [
            row["what"],
            f"{_figure(row['tflops'] * factor)} {unit}"
            if "tflops" in row
            else f"{_figure(row['gigabytes_per_second'])} GB/s",
        ]
        for row in rows
        if row["status"] == "ok"
    ]
    return _table(["what", "reached"], table) + _reasons(rows, ("what",))


TABLES = {
    "check": checks,
    "train": train,
    "attention": attention,
    "cross_entropy": cross_entropy,
    "grouped_matmul": grouped,
    "ceilings": ceilings,
}


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def _reasons(
    rows: list[Row], keys: tuple[str, ...], statuses: tuple[str, ...] | None = None
) -> str:
    """Why there is no figure, each reason once with all that it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok" and (statuses is None or row["status"] in statuses):
            found.setdefault((row["status"], row.get("reason", "")), []).append(
                " ".join(str(row[key]) for key in keys if key in row)
            )
    lines = [
        f"\n- {', '.join(dict.fromkeys(who))}: {status}{': ' + reason if reason else ''}"
        for (status, reason), who in found.items()
    ]
    return "".join(["\n", *lines]) if lines else ""


def _fastest(rows: list[Row], program: str) -> Row | None:
    """Of its rows that may be shown."""
    return max(
        (row for row in rows if row["status"] == "ok" and row["program"] == program),
        key=lambda row: row["tokens_per_second"],
        default=None,
    )


def best(rows: list[Row], *keys: str) -> list[Row]:
    """Of rows that may be shown and differ in the sizes of blocks alone, the fastest."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        place = tuple(row[key] for key in keys)
        if row["status"] == "ok" and (
            place not in found or row["both_ms"] < found[place]["both_ms"]
        ):
            found[place] = row
    return list(found.values())


def rate(device: Row) -> tuple[float, str]:
    """What TFLOP/s are multiplied by for the unit that suits a device."""
    return (1000.0, "GFLOP/s") if device.get("platform") == "cpu" else (1.0, "TFLOP/s")


def _pair(row: Row | None, factor: float) -> str:
    if row is None or row["status"] != "ok":
        return ""
    return " / ".join(
        "?" if value is None else _figure(value * factor)
        for value in (row["forward_tflops"], row["backward_tflops"])
    )


def _figure(value: float) -> str:
    """Three digits, or all of a large number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
