"""The device mesh, and the rules from logical axes to mesh axes.

There are seven mesh axes, outermost first: slices, stage, data, fsdp, expert, context, tensor.
Rules map logical axes to them, for weights and activations alike, so code below run.py names
logical axes only. `constrain` tells XLA where an activation lies; what XLA would have to guess
(attention, experts, the pipeline) runs in `per_device`, with collectives by hand.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from maxstack.errors import ConfigError
from maxstack.hardware.devices import arrange
from maxstack.schema.mesh import AXES, MeshConfig, names

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, PartitionSpec


# A context variable, since threads trace on meshes of their own: a rollout beside training.
_current: contextvars.ContextVar[tuple["Mesh", MeshConfig] | None] = contextvars.ContextVar(
    "mesh", default=None
)


@contextlib.contextmanager
def holding(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def use(mesh: "Mesh", cfg: MeshConfig) -> contextlib.AbstractContextManager[None]:
    """Set the mesh and its configuration for `constrain` and `per_device` inside."""
    return holding(_current, (mesh, cfg))


def current() -> tuple["Mesh", MeshConfig] | None:
    """The mesh that `use` set, and its configuration; None outside, and on a mesh of one device."""
    pair = _current.get()
    # On one device no constraint is written: the program is that of a model without a mesh.
    return None if pair is None or pair[0].size == 1 else pair


def mesh() -> "Mesh | None":
    """The mesh that `use` set, whatever its size."""
    pair = _current.get()
    return pair[0] if pair else None


def make_mesh(cfg: MeshConfig, devices: Sequence[Any]) -> "Mesh":
    """The mesh of `cfg` over `devices`; raises ConfigError where the sizes do not multiply to their
    number."""
    import jax

    sizes = [getattr(cfg, axis) for axis in AXES]
    known = math.prod(size for size in sizes if size > 0)
    needed = f"a multiple of {known}" if -1 in sizes else f"{known}"
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        asked = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
        raise ConfigError(
            f"{asked} needs {needed} devices, but there are {len(devices)}; "
            f"set one axis to -1, or run.virtual_devices={known} to try the mesh on a CPU"
        )
    # Auto: XLA propagates shardings from the weights and `constrain`.
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.sharding.Mesh(arrange(devices, sizes), AXES, axis_types=kinds)


def spec(axes: Sequence[str | None], rules: Mapping[str, Any]) -> "PartitionSpec":
    """Logical axes -> PartitionSpec. A mesh axis is spent at most once, left to right."""
    from jax.sharding import PartitionSpec

    spent: set[str] = set()
    parts: list[Any] = []
    for axis in axes:
        if axis and axis not in rules:
            raise ConfigError(
                f"mesh.rules: no logical axis {axis!r}, which a layer or objective declares; there "
                f"are {', '.join(rules)}"
            )
        # One array cannot be split twice over a mesh axis: of two logical axes with the same rule
        # the first has it, as in a square matrix of embed by embed.
        free = [name for name in names(rules[axis] if axis else None) if name not in spent]
        spent.update(free)
        parts.append(tuple(free) if len(free) > 1 else free[0] if free else None)
    return PartitionSpec(*parts)


def constrain(x: "jax.Array", axes: str) -> "jax.Array":
    """Pin an activation to the mesh by its logical axes, as in `constrain(x_BTD, "batch seq
    embed")`; nothing on one device."""
    import jax

    if current() is None:
        return x
    mesh, _ = _free()
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, here(axes)))


def here(axes: str) -> "PartitionSpec":
    """The PartitionSpec of logical axes on the current mesh, over the mesh axes that a surrounding
    `per_device` leaves free."""
    pair = current()
    assert pair is not None, "needs a mesh"
    _, free = _free()
    rules = {}
    for logical, rule in pair[1].rules.items():
        rules[logical] = [axis for axis in names(rule) if axis in free]
    return spec(axes.split(), rules)


def split(axes: Any) -> tuple[str, ...]:
    """The mesh axes of a PartitionSpec's entry that have more than one device."""
    return tuple(axis for axis in names(axes) if size_of(axis) > 1)


def per_device(
    f: "Callable[..., Any]", in_specs: Any, out_specs: Any, axes: frozenset[str] | None = None
) -> "Callable[..., Any]":
    """`f` run by each device on its own parts, with collectives by hand over `axes`; None for all
    free axes.

    Inside another `per_device`, only axes that the outer one left to XLA are free.
    """
    import jax

    mesh, free = _free()
    return jax.shard_map(
        f,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        # Axes that are not named stay with XLA, so calls may be nested: experts within the
        # pipeline.
        axis_names=axes or free,
        check_vma=False,
    )


def size_of(*axes: str) -> int:
    """Product of the sizes of mesh axes; 1 without a mesh."""
    pair = current()
    return math.prod(pair[0].shape[axis] for axis in axes) if pair else 1


def _free() -> tuple[Any, frozenset[str]]:
    """The current mesh, abstract inside a `per_device`, and the axes that no surrounding
    `per_device` has taken."""
    import jax

    pair, inside = current(), jax.sharding.get_abstract_mesh()
    assert pair is not None, "needs a mesh"
    taken = frozenset(inside.manual_axes)
    # Inside a shard_map jax wants its own abstract mesh, which knows the axes that are manual
    # there.
    return (inside if taken else pair[0]), frozenset(AXES) - taken
