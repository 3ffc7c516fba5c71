"""Rotary positions in config.json, in its old spelling (rope_theta, rope_scaling) and its new one
(rope_parameters, also by layer type). Both may be given where they agree."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxstack.config import Section
from maxstack.config.annotations import listed
from maxstack.errors import ConfigError, quoted
from maxstack.hf import table
from maxstack.hf.table import Mismatch, Sink, Source
from maxstack.schema.mixers import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)

ORIGINAL = "original_max_position_embeddings"
KINDS: dict[str, type[Section]] = {
    "linear": LinearScaling,
    "proportional": ProportionalScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}
NEEDED = {
    "llama3": ("low_freq_factor", "high_freq_factor", "original_length"),
    "longrope": ("factor",),
}
"""Keys that config.json must have although our sections have defaults."""


def _keys_of(kind: str) -> dict[str, tuple[str, Any]]:
    """Return our key -> (their key, default) of a kind; `...`: the key is needed; None: it may be
    absent."""
    keys = {}
    # The fields of our sections are the keys, so that each is declared once.
    for name, field in KINDS[kind].model_fields.items():
        if name != "kind":
            needed = field.is_required() or name in NEEDED.get(kind, ())
            theirs = ORIGINAL if name == "original_length" else name
            keys[name] = theirs, (... if needed else field.default)
    return keys


SCALINGS: Mapping[str, Mapping[str, tuple[str, Any]]] = {kind: _keys_of(kind) for kind in KINDS}
# "su" is LongRoPE in older files; all sections of mrope turn alike for a text.
OTHER_NAMES = {"su": "longrope", "mrope": "default"}
# Known with every kind; multimodal sections of the frequencies turn alike for text alone.
HARMLESS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    "finetuned",
    ORIGINAL,
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions of all layers, or of one layer type."""

    layer: str | None = None
    """The layer type; null: all layers."""
    _: dataclasses.KW_ONLY
    theta: float = 10_000.0
    """Base where the key is absent."""
    fraction: float = 1.0
    """Rotated share of a head where the key is absent."""
    interleaved: Any = False
    old_theta: str = "rope_theta"
    """The key of the old spelling."""
    old_scaling: bool = True
    """rope_scaling of the old spelling applies to these layers."""
    partial: bool = False
    """The family can rotate a share of a head."""
    outside: bool = False
    """The original length is beside the parameters, not in them."""
    default: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The parameters where config.json has none."""

    def read(self, source: Source) -> dict[str, Any]:
        """Return the mapping of a RopeConfig."""
        parameters = self._parameters(source)
        inside, beside = parameters.get("rope_theta"), source.get(self.old_theta)
        if inside and beside and inside != beside:
            raise source.fail(
                self.old_theta, f"rope_parameters say {inside}; leave out the one that is wrong"
            )
        # Both spellings may be given where they agree.
        theta = inside or beside or self.theta
        fraction = (
            parameters.get("partial_rotary_factor")
            or source.get("partial_rotary_factor")
            or self.fraction
        )
        if fraction != 1 and not self._partial:
            raise ConfigError(
                f"{source.where}: partial_rotary_factor={fraction}: heads of this family "
                "are rotated whole"
            )
        return {
            "theta": theta,
            "fraction": fraction,
            "interleaved": table.read(self.interleaved, source),
            "scaling": self._scaling(source, parameters),
        }

    def write(self, value: Any, sink: Sink) -> None:
        """Put rope_parameters, with those of other layer types beside them."""
        if value is None:
            raise Mismatch("there are no rotary positions")
        table.write({"interleaved": self.interleaved}, value, sink)
        if value["fraction"] != 1 and not self._partial:
            raise Mismatch(f"fraction={value['fraction']}")
        scaling = value["scaling"] or {"kind": "default"}
        parameters = {"rope_type": scaling["kind"], "rope_theta": value["theta"]}
        # A family whose default is a share needs a 1 to be said.
        if value["fraction"] != 1 or self.fraction != 1:
            parameters["partial_rotary_factor"] = value["fraction"]
        for ours, (theirs, default) in SCALINGS.get(scaling["kind"], {}).items():
            number = scaling[ours]
            if number is not None and (ours != "factor" or number != default):
                parameters[theirs] = list(number) if isinstance(number, tuple) else number
        # Some families read it beside the other keys of the model.
        if self.outside and ORIGINAL in parameters:
            sink.put(ORIGINAL, parameters[ORIGINAL])
        if self.layer is None:
            sink.put("rope_parameters", parameters)
            return
        # Each layer type adds its own to the same key, where Sink.put would see a contradiction.
        by_layer = sink.pop("rope_parameters", {})
        if by_layer.get(self.layer, parameters) != parameters:
            raise Mismatch(f"layers of type {self.layer} differ in their rotary positions")
        sink.put("rope_parameters", by_layer | {self.layer: parameters})

    @property
    def _partial(self) -> bool:
        return self.partial or self.fraction != 1

    def _parameters(self, source: Source) -> Mapping[str, Any]:
        new, old = source.get("rope_parameters"), source.get("rope_scaling")
        for key, value in (("rope_parameters", new), ("rope_scaling", old)):
            if not isinstance(value, Mapping | None):
                raise source.fail(key, "must be a mapping")
        if not new:
            return (old if self.old_scaling else None) or self.default
        # Parameters are numbers and words, so a mapping among them is that of a layer type.
        by_layer = any(isinstance(value, Mapping) for value in new.values())
        whole = (new.get(self.layer) or {}) if by_layer else new
        # Compared by meaning: `type` and `su` are old words for `rope_type` and `longrope`.
        if old and self.old_scaling and _scaled(old) != _scaled(whole):
            raise source.fail(
                "rope_scaling", "rope_parameters say otherwise; leave out the one that is wrong"
            )
        if not by_layer and self.layer is not None:
            raise source.fail(
                "rope_parameters", f"must have a mapping for each layer type, such as {self.layer}"
            )
        if not by_layer:
            return new
        if self.layer is None:
            raise source.fail(
                "rope_parameters",
                "one set of rotary positions for each layer type is not what this family has",
            )
        return new.get(self.layer) or self.default

    def _scaling(self, source: Source, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        kind = OTHER_NAMES.get(kind, kind)
        keys = SCALINGS.get(kind, {})
        if kind != "default" and not keys:
            raise ConfigError(
                f"{source.where}: RoPE of type {quoted(kind)} is not supported; "
                f"supported: default, {', '.join(SCALINGS)}"
            )
        known = HARMLESS | {theirs for theirs, _ in keys.values()}
        if unknown := sorted(parameters.keys() - known):
            raise ConfigError(
                f"{source.where}: RoPE of type {kind} has keys that are not known: "
                f"{listed(unknown)}"
            )
        length = source.get("max_position_embeddings")
        beside = source.get(ORIGINAL) if self.outside else None
        if self.outside and keys and beside is None:
            raise ConfigError(
                f"{source.where}: key {ORIGINAL} is missing, by which RoPE of type {kind} changes "
                "its factors; it stands beside the other keys of the model"
            )
        original = beside or parameters.get(ORIGINAL) or length
        scaling: dict[str, Any] = {"kind": kind}
        for ours, (theirs, default) in keys.items():
            value = parameters.get(theirs)
            if ours == "original_length":
                value = original
            # transformers takes LongRoPE's factor from the lengths where it is not given.
            elif ours == "factor" and value is None and default is ... and length and original:
                value = length / original
            # A default would be a guess at the factors that the model was trained with.
            if value is None and default is ...:
                raise ConfigError(f"{source.where}: RoPE of type {kind} needs {theirs}")
            scaling[ours] = default if value is None else value
        return scaling if keys else None


def _scaled(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling that one of the two spellings describes."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    names = {"type", "rope_type", "rope_theta", "partial_rotary_factor", ORIGINAL}
    more = {key: value for key, value in parameters.items() if key not in names}
    return {"kind": OTHER_NAMES.get(kind, kind), **more}
