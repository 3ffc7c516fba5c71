"""The mesh: its axes, which logical axis each splits, and the section that sizes them."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from maxstack.config import (
    CountInt,
    Items,
    Section,
)

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


AxisSize = Annotated[int, Field(ge=-1, le=1_000_000)]


class MeshConfig(Section):
    """Sizes of the mesh axes; their product is the number of devices. One of them may be -1: all
    remaining devices."""

    slices: AxisSize = 1
    """Number of groups of devices (TPU slices) with a slow network between them; by default only
    the batch is split over them."""
    stage: AxisSize = 1
    """Number of pipeline stages: each holds a share of the repetitions of the pattern; outside the
    pipeline the batch is split over them."""
    data: AxisSize = -1
    """Number of replicas of the weights, each with its own rows of the batch."""
    fsdp: AxisSize = 1
    """Number of devices to shard the weights over. Weights are gathered when used; each device has
    its own rows of the batch."""
    expert: AxisSize = 1
    """Number of devices to shard experts over, each with its own rows of the batch: tokens are sent
    to their experts. Other weights are sharded as over fsdp."""
    context: AxisSize = 1
    """Number of devices to split each sequence over."""
    tensor: AxisSize = 1
    """Number of devices to shard heads, MLP hidden units and vocabulary over."""
    rules: dict[str, Axes] = RULES
    """Mapping from a logical axis to a mesh axis, a list of mesh axes, or null; merged over the
    defaults. A mesh axis splits at most one dimension of a tensor; dimensions take their axes from
    left to right."""
    optimizer_rules: dict[str, Axes] = {}
    """Rules for the optimizer state, merged over `rules`: {embed: [data, fsdp]} shards it over
    replicas too (ZeRO-1); empty: like the weights."""
    offload: Items[Literal["optimizer", "params"]] = ()
    """Parts of the state to keep in host memory between steps; they move to the devices for the
    update (optimizer) or for the whole step (params)."""
    context_kind: Literal["ring", "ulysses"] = "ring"
    """How attention works over a sequence that is split over context. ring: keys and values are
    passed around the ring of devices, with tokens ordered so that work is balanced; ulysses: an
    all-to-all gives each device whole sequences for some of the heads."""
    microbatches: CountInt | None = None
    """Number of microbatches that a batch is split into for the pipeline; null: as many as
    stages."""
    rounds: CountInt = 1
    """Number of times that each microbatch passes through all stages; each stage then holds that
    many separate groups of consecutive layers. More rounds: a smaller pipeline bubble, but more
    traffic."""

    @pydantic.field_validator("rules", mode="before")
    @classmethod
    def _over_defaults(cls, rules: Any) -> Any:
        return RULES | rules if isinstance(rules, dict) else rules


def parts(axes: Axes, sizes: Mapping[str, int]) -> int:
    """The number of parts that a rule splits a dimension into on a mesh of these sizes."""
    return math.prod(sizes[axis] for axis in names(axes))


def names(axes: Axes) -> tuple[str, ...]:
    """The mesh axes of a rule."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
