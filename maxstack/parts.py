"""What parts of one's own are made of (docs/EXTENDING.md): sections to derive from, and the classes
and functions that their implementations use. Names are imported when they are first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

_PLACES = {
    "maxstack.data.documents": ("Documents",),
    "maxstack.data.filters.filter": ("Removed",),
    "maxstack.data.lanes": ("Lane",),
    "maxstack.kernels.sequences": ("natural",),
    "maxstack.layers.attention": ("Attention",),
    "maxstack.layers.layer": ("Layer",),
    "maxstack.layers.weight": ("project",),
    "maxstack.models.model": ("Model",),
    "maxstack.objectives.log_probs": ("LogProbs",),
    "maxstack.objectives.objective": ("Batch", "Loss", "Models", "Objective", "token_fields"),
    "maxstack.schema.mixers": ("AttentionConfig", "MixerPart"),
    "maxstack.schema.mlps": ("MLPPart",),
    "maxstack.schema.objective": ("ObjectivePart", "RowField"),
    "maxstack.schema.optimizer.arguments": ("TransformPart",),
    "maxstack.schema.parts": (
        *("Cached", "Count", "Dim", "Inner", "Parts", "Weight", "matrix", "vector"),
    ),
    "maxstack.schema.stack": ("StackConfig",),
}
_ALIASES = {
    "FilterPart": ("maxstack.schema.filters", "Filter"),
    "RewardPart": ("maxstack.schema.rewards", "WorkerReward"),
    "SourcePart": ("maxstack.schema.data", "Source"),
}
_NAMES = {name: (place, name) for place, names in _PLACES.items() for name in names} | _ALIASES
__all__ = [  # noqa: PLE0604
    *_NAMES
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'maxstack.parts' has no attribute {name!r}")
    place, inside = _NAMES[name]
    value = globals()[name] = getattr(importlib.import_module(place), inside)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
