"""The device mesh, and the table from logical axes to mesh axes. Everything below run.py sees only logical names."""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pydantic
from pydantic import Field

from maxstack.config import ConfigError, Section

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, PartitionSpec

AXES = ("data", "fsdp", "tensor")
Axes = str | tuple[str, ...] | list[str] | None
RULES: dict[str, Axes] = {
    "batch": ["data", "fsdp"], "seq": None, "layers": None, "embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "head_dim": None,
    "mlp": "tensor", "vocab": ["tensor", "fsdp"], "norm": None, "expert": None, "latent": None,
}


class MeshConfig(Section):
    """Sizes of the mesh axes; their product is the number of devices."""

    data: int = Field(-1, ge=-1)
    """Replicas of the weights; -1: whatever devices are left."""
    fsdp: int = Field(1, ge=-1)
    """Shards of the weights, gathered when used; the batch is split over data x fsdp."""
    tensor: int = Field(1, ge=-1)
    """Shards of heads, mlp hidden units and vocabulary."""
    rules: dict[str, Axes] = RULES
    """Logical axis -> mesh axis, list of mesh axes, or null; merged over the defaults."""

    @pydantic.field_validator("rules", mode="before")
    @classmethod
    def _over_defaults(cls, given: Any) -> Any:
        return RULES | given if isinstance(given, dict) else given


_current: contextvars.ContextVar[tuple["Mesh", dict[str, Axes]] | None] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def use(mesh: "Mesh", rules: dict[str, Axes]) -> Iterator[None]:
    """The mesh and rules that `constrain` applies inside."""
    token = _current.set((mesh, rules))
    try:
        yield
    finally:
        _current.reset(token)


def make_mesh(cfg: MeshConfig, devices: Sequence[Any]) -> "Mesh":
    """The mesh of `cfg` over `devices`; raises ConfigError where the sizes do not multiply to their number."""
    import jax
    import numpy as np

    sizes = [getattr(cfg, axis) for axis in AXES]
    known = math.prod(size for size in sizes if size > 0)
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        asked = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
        raise ConfigError(f"{asked} needs a multiple of {known} devices, but there are {len(devices)}; "
                          f"set one axis to -1, or run.virtual_devices={known} to try the mesh on a CPU")
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.sharding.Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=kinds)


def spec(axes: Sequence[str | None], rules: dict[str, Axes]) -> "PartitionSpec":
    """Logical axes -> PartitionSpec. A mesh axis is spent at most once, left to right."""
    from jax.sharding import PartitionSpec

    spent: set[str] = set()
    parts: list[Any] = []
    for axis in axes:
        wanted = rules[axis] if axis else None
        names = [name for name in ([wanted] if isinstance(wanted, str) else wanted or []) if name not in spent]
        spent.update(names)
        parts.append(tuple(names) if len(names) > 1 else names[0] if names else None)
    return PartitionSpec(*parts)


def current() -> tuple["Mesh", dict[str, Axes]] | None:
    """The mesh and rules that `use` set; None outside."""
    return _current.get()


def constrain(x: "jax.Array", axes: str) -> "jax.Array":
    """Pin an activation to the mesh by its logical axes, as in `constrain(x_BTD, "batch seq embed")`; nothing on one device."""
    import jax

    found = current()
    if found is None or found[0].size == 1:
        return x
    mesh, rules = found
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec(axes.split(), rules)))
