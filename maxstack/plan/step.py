"""Compilation of the step that a run would take, for a topology: `maxstack plan` reads its figures
from it."""

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
QUICK = {"exec_time_optimization_effort": -1.0}, {"optimization_level": "O1"}
"""XLA's own keys for less time in the compiler, up to jax 0.11 and since 0.12: the same
partitioning and collectives, but less fused (EXPERIMENTS.md)."""


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """The compiler's refusal: bytes that one device would need and has, and the largest allocations
    as (bytes, shape, op_name)."""

    needed: int
    usable: int
    largest: tuple[tuple[int, str, str], ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step and how long it took to make, in seconds."""

    run: "Run"
    compiled: Any
    """jax's Compiled; None where it does not fit."""
    lowering: float
    compiling: float
    too_large: TooLarge | None = None


def check_mesh(cfg: "Config", topology: Topology) -> dict[str, int]:
    """Mesh axis -> size over the topology. ConfigError where the mesh does not fill it, or the
    model or the batch does not divide over the mesh."""
    from maxstack.schema import rules

    return rules.sizes_on(cfg, topology.size, topology.name)


def compile_step(
    cfg: "Config", topology: Topology, *, exact: bool = False, dump: Path | None = None
) -> Step:
    """Assemble, lower and compile. ConfigError where the configuration's parts do not fit each
    other.

    `exact`: with all the effort that training would spend. `dump`: a folder for the compiler's
    assignment of buffers.
    """
    check_mesh(cfg, topology)
    devices = topology.devices()
    import jax

    from maxstack import sharding
    from maxstack.run import assemble

    options: dict[str, Any] = {DUMP: str(dump)} if dump else {}
    if devices[0].platform == "tpu" and not exact:
        options |= QUICK[not hasattr(jax.config, "jax_exec_time_optimization_effort")]
    begin = time.perf_counter()
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
    """The refusal in a TPU compiler's RESOURCE_EXHAUSTED; None for another message."""
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
