"""Compilation of a package's programs for hardware that need not be here."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

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
        states = package.manifest["states"].get(signature.spec["state"], {})
        for program in signature.spec["programs"]:
            step, places = signature.loaded(program["file"])
            sizes = {dim: size or BATCH for dim, size in program["sizes"].items()}
            given = (package.manifest["weights"], states, signature.spec["inputs"])
            shapes = [_shapes(*each, sizes) for each in zip(given, places, strict=True)]
            try:
                made = step.lower(*shapes).compile()
            except jax.errors.JaxRuntimeError as error:
                raise ConfigError(
                    f"{folder}/{program['file']}: the compiler for {topology.name} refuses it: "
                    f"{error}"
                ) from error
            costs, memory = made.cost_analysis() or {}, made.memory_analysis()
            yield program["file"], memory.temp_size_in_bytes, float(costs.get("flops", 0.0))


def _shapes(
    specs: Mapping[str, Any], places: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {}
    for name, spec in specs.items():
        shape = tuple(sizes.get(dim, dim) for dim in spec["shape"])
        dtype = jnp.dtype(spec["dtype"])
        shapes[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=places[name])
    return shapes
