"""Programs of a package compiled for hardware that need not be here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxstack.errors import ConfigError
from maxstack.package import loader
from maxstack.plan.topology import Topology

BATCH = 4
"""Rows for which a program of any batch is compiled."""


def compiled(folder: Path, topology: Topology) -> Iterator[tuple[str, int, float]]:
    """(file, bytes of the largest moment beside arguments, FLOPs) of each program as the
    topology's compiler makes it. ConfigError for another platform or number of devices, and where
    the compiler refuses a program."""
    manifest = loader.read_manifest(folder)
    platform, devices = topology.platform, manifest["devices"]
    if platform not in manifest["platforms"]:
        made = ", ".join(manifest["platforms"])
        raise ConfigError(f"{folder}: made for {made}, not for {platform} ({topology.name})")
    if topology.size != devices:
        raise ConfigError(f"{folder}: made for {devices} devices; {topology.name} has others")
    axes = manifest.get("mesh") or {"devices": 1}
    mesh = Mesh(np.array(topology.devices()).reshape(*axes.values()), (*axes,))
    whole = NamedSharding(mesh, PartitionSpec())
    for signature in manifest["signatures"].values():
        for program in signature["programs"]:
            data = loader.checked(folder, manifest, program["file"])
            exported = export.deserialize(bytearray(data))
            placed = [each or whole for each in exported.in_shardings_jax(mesh)]
            shapes = [
                jax.ShapeDtypeStruct(_sizes(aval.shape), aval.dtype, sharding=where)
                for aval, where in zip(exported.in_avals, placed, strict=True)
            ]
            given, _ = jax.tree.unflatten(exported.in_tree, shapes)
            try:
                step = jax.jit(exported.call, donate_argnums=1).lower(*given).compile()
            except jax.errors.JaxRuntimeError as error:
                raise ConfigError(
                    f"{folder}/{program['file']}: the compiler for {topology.name} refuses it: "
                    f"{error}"
                ) from error
            costs: Any = step.cost_analysis() or {}
            memory: Any = step.memory_analysis()
            yield program["file"], memory.temp_size_in_bytes, float(costs.get("flops", 0.0))


def _sizes(shape: Any) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else BATCH for dim in shape)
