"""Block sizes for bench_gpu.py: those of a run, or with --tune all that a kernel offers, the best
of which go into a table."""

import contextlib
import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench.gpu_errors import compare

from maxstack.kernels import tuning
from maxstack.kernels.backends import Op

Blocks = dict[str, int] | None
SIZED = "mask", "head_dim", "length", "shape"
"""Columns that differ between the calls of a section."""


@dataclasses.dataclass
class Sizes:
    """Block sizes to measure, and the results with default sizes."""

    tune: bool
    table: str
    """A table in the format of `maxstack tune`; it need not exist."""
    first: dict[str, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    """Results with a kernel's default sizes, by call; other sizes must give the same."""

    def of(self, op: Op, name: str, case: Any) -> list[Blocks]:
        """Sizes for a backend, None for its default; only that for a kernel that cannot serve."""
        if name not in op.names:
            return [None]
        with contextlib.suppress(ImportError):
            if self.tune and op[name].supports(case) is None:
                if candidates := op[name].candidates(case):
                    return list(candidates)
        with tuning.use(self.table):
            return [tuning.blocks(op.name, name, case.device.kind, case.shape_class)]

    def differs(
        self, default: bool, call: str, outputs: Mapping[str, jax.Array], dtype: str
    ) -> dict[str, Any]:
        """A status and a reason if these sizes give other results than the default ones, else
        nothing."""
        if not self.tune:
            return {}
        if call not in self.first and not default:
            return {
                "status": "unchecked",
                "reason": "the default sizes gave nothing to compare with",
            }
        if default:
            self.first[call] = {
                name: np.asarray(value).astype(np.float64) for name, value in outputs.items()
            }
            return {}
        result = compare(outputs, self.first[call], dtype)
        if result["status"] == "ok":
            return {}
        return {"status": "wrong", "reason": f"not as with the default sizes: {result['reason']}"}

    def keep(self, rows: list[dict[str, Any]], device_kind: str) -> None:
        """Write the fastest sizes of every backend and shape class."""
        calls: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in rows:
            if row["status"] == "ok" and row.get("blocks") and row["both_ms"]:
                shape = tuple(sorted(row["shape_class"].items()))
                key = row["op"], row["backend"], shape, *(str(row.get(name)) for name in SIZED)
                calls.setdefault(key, []).append(row)
        classes: dict[tuple[Any, ...], dict[str, Any]] = {}
        for (op, backend, shape, *_), own in sorted(
            calls.items(), key=lambda item: item[1][0]["both_ms"]
        ):  # the longest call of a class decides
            best = min(own, key=lambda row: row["both_ms"])
            classes[op, backend, shape] = {
                "device": device_kind,
                "op": op,
                "backend": backend,
                "shape": best["shape_class"],
                "blocks": best["blocks"],
                "microseconds": round(1e3 * best["both_ms"], 1),
                "default_microseconds": round(1e3 * own[0]["both_ms"], 1),
                "date": datetime.date.today().isoformat(),
            }
        if self.tune and classes:
            tuning.add(Path(self.table).expanduser(), [*classes.values()])
