"""Compiles a run's step for a topology, for `maxstack plan` to read."""

import dataclasses
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack.hardware import compiling
from maxstack.plan.buffers import DUMP
from maxstack.plan.topology import Topology

if TYPE_CHECKING:
    from maxstack.run import Run
    from maxstack.schema.config import Config

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_OVER = re.compile(
    r"(?:Used |HLO temporaries \()([\d.]+)([KMGT]?)(?: of |\) exceeds available HBM "
    r"\()([\d.]+)([KMGT]?)(?: hbm|\))"
)
_LARGE = re.compile(
    r"Size: ([\d.]+)([KMGT]?)\n(?:\s+Operator: (?:.*?op_name=\"([^\"]*)\")?.*\n)?\s+Shape: (\S+)"
)
# For 8B on v5e:16x16: 36 instead of 78 s, the same collectives, 6.12 instead of 6.44 GiB needed.
QUICK_BEFORE_012: dict[str, Any] = {"exec_time_optimization_effort": -1.0}
QUICK: dict[str, Any] = {"optimization_level": "O1"}
"""XLA's keys for less compile time, up to jax 0.11 and since 0.12: the partitioning and collectives
are the same, with less fusion (EXPERIMENTS.md)."""


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """The compiler's out-of-memory error: bytes that a device would need and has, and the largest
    allocations as (bytes, shape, op_name)."""

    needed: int
    usable: int
    largest: tuple[tuple[int, str, str], ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step, and the seconds that making it took."""

    run: "Run"
    compiled: Any
    """jax's Compiled; None if it does not fit."""
    lowering: float
    compiling: float
    too_large: TooLarge | None = None


def check_mesh(cfg: "Config", topology: Topology) -> dict[str, int]:
    """Return the sizes of mesh axes over the topology. ConfigError if the mesh does not fill it, or
    if the model or the batch does not divide over the mesh."""
    from maxstack.schema import rules

    return rules.sizes_on(cfg, topology.size, topology.name)


def compile_step(
    cfg: "Config", topology: Topology, *, exact: bool = False, dump: Path | None = None
) -> Step:
    """Assemble, lower and compile the step. ConfigError if parts of the configuration conflict.

    `exact`: optimize fully, as training does. `dump`: folder for the compiler's buffer assignment.
    """
    check_mesh(cfg, topology)
    # Before jax is imported: for hardware that is not here this sets variables that jax and libtpu
    # read at their import.
    devices = topology.devices()
    import jax

    from maxstack import sharding
    from maxstack.run import assemble

    options: dict[str, Any] = {DUMP: str(dump)} if dump else {}
    if devices[0].platform == "tpu" and not exact:
        # jax 0.12 dropped the key and refuses it; earlier versions do not know optimization_level.
        old = hasattr(jax.config, "jax_exec_time_optimization_effort")
        options |= QUICK_BEFORE_012 if old else QUICK
    begin = time.perf_counter()
    # The run that train assembles: a plan is read from the very program that would run.
    run = assemble(cfg, sharding.make_mesh(cfg.mesh, devices))
    lowered = run.lower()
    middle = time.perf_counter()
    compiled = refusal = None
    try:
        compiled = compiling.compiled(lowered, run.mesh, options)
    except Exception as error:  # jaxlib has no class of its own for this
        refusal = too_large(str(error))
        if refusal is None:
            raise
    return Step(run, compiled, middle - begin, time.perf_counter() - middle, refusal)


def too_large(message: str) -> TooLarge | None:
    """Parse a TPU compiler's RESOURCE_EXHAUSTED; None for another message."""
    totals = _OVER.search(message)
    if not totals:
        return None
    used, unit, limit, limit_unit = totals.groups()
    largest = tuple(
        (_bytes(size, unit), shape, name) for size, unit, name, shape in _LARGE.findall(message)
    )
    return TooLarge(_bytes(used, unit), _bytes(limit, limit_unit), largest)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * UNITS[unit])
