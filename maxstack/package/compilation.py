"""Compilation of a package's programs for hardware that need not be here."""

from collections.abc import Iterator
from pathlib import Path

import jax

from maxstack.errors import ConfigError
from maxstack.package.loader import Package
from maxstack.plan.topology import Topology

BATCH = 4
"""Rows for which a program of any batch is compiled."""


def compile_programs(folder: Path, topology: Topology) -> Iterator[tuple[str, int, float]]:
    """Compile each program -> (file, peak bytes of temporaries, FLOPs). PackageError for another
    platform and for damage, ConfigError for another number of devices and where the compiler
    refuses a program."""
    # The loader takes the devices of a topology as if they were here, so what is compiled is what a
    # process on that hardware would compile.
    package = Package(folder, [*topology.devices()])
    if topology.size != (devices := package.manifest["devices"]):
        raise ConfigError(f"{folder}: made for {devices} devices; {topology.name} has others")
    for signature in package.signatures.values():
        for program in signature.spec["programs"]:
            sizes = {dim: size or BATCH for dim, size in program["sizes"].items()}
            try:
                made = signature.lower(sizes).compile()
            except jax.errors.JaxRuntimeError as error:
                raise ConfigError(
                    f"{folder}/{program['file']}: the compiler for {topology.name} refuses it: "
                    f"{error}"
                ) from error
            costs, memory = made.cost_analysis() or {}, made.memory_analysis()
            yield program["file"], memory.temp_size_in_bytes, float(costs.get("flops", 0.0))
