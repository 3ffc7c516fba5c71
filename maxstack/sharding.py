"""The device mesh, and the table from logical axes to mesh axes. Everything below run.py sees only
logical names."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pydantic
from pydantic import Field

from maxstack.config import ConfigError, Items, Section
from maxstack.devices import arrange

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, PartitionSpec

AXES = (
    "slices",
    "stage",
    "data",
    "fsdp",
    "expert",
    "context",
    "tensor",
)  # outermost first: neighbours along the last axes are nearest
Axes = str | tuple[str, ...] | list[str] | None
RULES: dict[str, Axes] = {
    "batch": ["slices", "data", "fsdp", "expert", "stage"],
    "seq": "context",
    "residual": ["context", "tensor"],
    "layers": "stage",
    "embed": ["fsdp", "expert", "context", "stage"],
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": ["tensor", "fsdp", "expert", "stage"],
    "norm": None,
    "expert": "expert",
    "latent": None,
}


class MeshConfig(Section):
    """Sizes of the mesh axes; their product is the number of devices. One of them may be -1:
    whatever devices are left."""

    slices: int = Field(1, ge=-1)
    """Groups of devices with a slow network between them (TPU slices); the batch is split over
    them, and nothing else by default."""
    stage: int = Field(1, ge=-1)
    """Stages of a pipeline: each holds a share of the repetitions of the pattern; outside the
    pipeline the batch is split over them."""
    data: int = Field(-1, ge=-1)
    """Replicas of the weights, each with its own rows."""
    fsdp: int = Field(1, ge=-1)
    """Shards of the weights, gathered when used, each with its own rows."""
    expert: int = Field(1, ge=-1)
    """Shards of the experts of a mixture, each with its own rows: tokens travel to their experts.
    Other weights are sharded as over fsdp."""
    context: int = Field(1, ge=-1)
    """Parts of each sequence."""
    tensor: int = Field(1, ge=-1)
    """Shards of heads, mlp hidden units and vocabulary."""
    rules: dict[str, Axes] = RULES
    """Logical axis -> mesh axis, list of mesh axes, or null; merged over the defaults. A mesh axis
    splits a tensor once, left to right."""
    optimizer_rules: dict[str, Axes] = {}
    """Rules for the optimizer's state alone, merged over `rules`: {embed: [data, fsdp]} shards it
    over replicas too (ZeRO-1); empty: like weights."""
    offload: Items[Literal["optimizer", "params"]] = ()
    """What lies in the host's memory between steps and comes to the devices for the update
    (optimizer) or for the whole step (params)."""
    context_kind: Literal["ring", "ulysses"] = "ring"
    """How attention sees a sequence that is split over context: keys and values go around in a
    ring, tokens in a balanced order, or an all-to-all gives each device whole sequences of some
    heads."""
    microbatches: int | None = Field(None, ge=1)
    """Parts of a batch that follow each other through the stages; null: as many as stages."""
    rounds: int = Field(1, ge=1)
    """How often a microbatch passes through all stages, each holding as many separate runs of
    layers: a smaller bubble, more traffic."""

    @pydantic.field_validator("rules", mode="before")
    @classmethod
    def _over_defaults(cls, given: Any) -> Any:
        return RULES | given if isinstance(given, dict) else given


_current: contextvars.ContextVar[tuple["Mesh", MeshConfig] | None] = contextvars.ContextVar(
    "mesh", default=None
)


@contextlib.contextmanager
def holding(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """Inside, a variable has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def use(mesh: "Mesh", cfg: MeshConfig) -> contextlib.AbstractContextManager[None]:
    """The mesh, and its configuration, that `constrain` and `per_device` apply inside."""
    return holding(_current, (mesh, cfg))


def current() -> tuple["Mesh", MeshConfig] | None:
    """The mesh that `use` set, and its configuration; None outside, and on a mesh of one device."""
    found = _current.get()
    return None if found is None or found[0].size == 1 else found


def mesh() -> "Mesh | None":
    """The mesh that `use` set, whatever its size."""
    found = _current.get()
    return found[0] if found else None


def make_mesh(cfg: MeshConfig, devices: Sequence[Any]) -> "Mesh":
    """The mesh of `cfg` over `devices`; raises ConfigError where the sizes do not multiply to their
    number."""
    import jax

    sizes = [getattr(cfg, axis) for axis in AXES]
    known = math.prod(size for size in sizes if size > 0)
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        asked = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
        raise ConfigError(
            f"{asked} needs a multiple of {known} devices, but there are {len(devices)}; "
            f"set one axis to -1, or run.virtual_devices={known} to try the mesh on a CPU"
        )
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.sharding.Mesh(arrange(devices, sizes), AXES, axis_types=kinds)


def spec(axes: Sequence[str | None], rules: Mapping[str, Any]) -> "PartitionSpec":
    """Logical axes -> PartitionSpec. A mesh axis is spent at most once, left to right."""
    from jax.sharding import PartitionSpec

    spent: set[str] = set()
    parts: list[Any] = []
    for axis in axes:
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
    """The PartitionSpec of logical axes over what `per_device` leaves of the current mesh at this
    place of the program."""
    found = current()
    assert found is not None, "needs a mesh"
    _, free = _free()
    rules = {
        logical: [axis for axis in names(axes) if axis in free]
        for logical, axes in found[1].rules.items()
    }
    return spec(axes.split(), rules)


def per_device(
    f: "Callable[..., Any]", in_specs: Any, out_specs: Any, axes: frozenset[str] | None = None
) -> "Callable[..., Any]":
    """`f` as each device runs it on its own parts, with collectives by hand over `axes`; None: all
    that are left.

    Inside another `per_device`, only axes that the outer one left to XLA are free.
    """
    import jax

    mesh, free = _free()
    return jax.shard_map(
        f,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=axes or free,
        check_vma=False,
    )


def size_of(*axes: str) -> int:
    """Product of the sizes of mesh axes; 1 without a mesh."""
    found = current()
    return math.prod(found[0].shape[axis] for axis in axes) if found else 1


def parts(axes: Axes, sizes: Mapping[str, int]) -> int:
    """Into how many parts a rule splits a dimension on a mesh of these sizes."""
    return math.prod(sizes[axis] for axis in names(axes))


def names(axes: Axes) -> tuple[str, ...]:
    """The mesh axes of a rule."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _free() -> tuple[Any, frozenset[str]]:
    """The mesh as the program sees it here, and the axes that no surrounding `per_device` has
    taken."""
    import jax

    found, inside = current(), jax.sharding.get_abstract_mesh()
    assert found is not None, "needs a mesh"
    taken = frozenset(inside.manual_axes)
    return (inside if taken else found[0]), frozenset(AXES) - taken
