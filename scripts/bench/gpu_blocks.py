"""Block sizes for bench_gpu.py: the ones that a run would take, or with --tune all that a kernel
offers, the best of which go into a table."""

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
"""What tells one call from another in the rows of a section."""


@dataclasses.dataclass
class Sizes:
    """What is measured, and what came out of it."""

    tune: bool
    table: str
    """A file as `maxstack tune` writes it; it need not exist."""
    first: dict[str, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    """Results with a kernel's default sizes, by call: every other size must give the same."""

    def of(self, op: Op, name: str, case: Any) -> list[Blocks]:
        """Sizes for a backend; None: it takes its default. A kernel that cannot serve has that
        one."""
        if name not in op.names:
            return [None]
        with contextlib.suppress(ImportError):
            if (
                self.tune
                and op[name].supports(case) is None
                and (found := op[name].candidates(case))
            ):
                return list(found)
        with tuning.use(self.table):
            return [tuning.blocks(op.name, name, case.device.kind, case.shape_class)]

    def differs(
        self, default: bool, call: str, outputs: Mapping[str, jax.Array], dtype: str
    ) -> dict[str, Any]:
        """Nothing, or a status and a reason where these sizes, if they are not the default ones,
        give other results than those."""
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
        found = compare(outputs, self.first[call], dtype)
        return (
            {}
            if found["status"] == "ok"
            else {"status": "wrong", "reason": f"not as with the default sizes: {found['reason']}"}
        )

    def keep(self, rows: list[dict[str, Any]], device_kind: str) -> None:
        """Write the fastest sizes of every backend and shape class."""
        calls: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in rows:
            if row["status"] == "ok" and row.get("blocks") and row["both_ms"]:
                calls.setdefault(
                    (row["op"], row["backend"], _class(row), *map(str, map(row.get, SIZED))), []
                ).append(row)
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
        found = [*classes.values()]
        if self.tune and found:
            tuning.add(Path(self.table).expanduser(), found)


def _class(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(row["shape_class"].items()))
