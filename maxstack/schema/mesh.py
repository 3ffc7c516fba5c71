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
    """Sizes of the mesh axes; their product is the number of devices. One of them may be -1:
    whatever devices are left."""

    slices: AxisSize = 1
    """Groups of devices with a slow network between them (TPU slices); the batch is split over
    them, and nothing else by default."""
    stage: AxisSize = 1
    """Stages of a pipeline: each holds a share of the repetitions of the pattern; outside the
    pipeline the batch is split over them."""
    data: AxisSize = -1
    """Replicas of the weights, each with its own rows."""
    fsdp: AxisSize = 1
    """Shards of the weights, gathered when used, each with its own rows."""
    expert: AxisSize = 1
    """Shards of the experts of a mixture, each with its own rows: tokens travel to their experts.
    Other weights are sharded as over fsdp."""
    context: AxisSize = 1
    """Parts of each sequence."""
    tensor: AxisSize = 1
    """Shards of heads, mlp hidden units and vocabulary."""
    rules: dict[str, Axes] = RULES
    """Logical axis -> mesh axis, list of mesh axes, or null; merged over the defaults. A mesh axis
    splits a tensor once, left to right."""
    optimizer_rules: dict[str, Axes] = {}
    """Rules for the optimizer's state alone, merged over `rules`: {embed: [data, fsdp]} shards it
    over replicas too (ZeRO-1); empty: like weights."""
    offload: Items[Literal["optimizer", "params"]] = ()
    """Parts of the state that lie in the host's memory between steps and comes to the devices for
    the update (optimizer) or for the whole step (params)."""
    context_kind: Literal["ring", "ulysses"] = "ring"
    """Way in which attention sees a sequence that is split over context: keys and values go around
    in a ring, tokens in a balanced order, or an all-to-all gives each device whole sequences of
    some heads."""
    microbatches: CountInt | None = None
    """Parts of a batch that follow each other through the stages; null: as many as stages."""
    rounds: CountInt = 1
    """Times that a microbatch passes through all stages, each holding as many separate runs of
    layers: a smaller bubble, more traffic."""

    @pydantic.field_validator("rules", mode="before")
    @classmethod
    def _over_defaults(cls, rules: Any) -> Any:
        return RULES | rules if isinstance(rules, dict) else rules


def parts(axes: Axes, sizes: Mapping[str, int]) -> int:
    """Into how many parts a rule splits a dimension on a mesh of these sizes."""
    return math.prod(sizes[axis] for axis in names(axes))


def names(axes: Axes) -> tuple[str, ...]:
    """The mesh axes of a rule."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
