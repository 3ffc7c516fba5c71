"""Rotary positions in config.json, in its old spelling (rope_theta, rope_scaling) and its new one
(rope_parameters, also by layer type)."""

from collections.abc import Mapping
from typing import Any

from maxstack.config import ConfigError, quoted
from maxstack.config.annotations import listed
from maxstack.hf.table import Mismatch, Sink, Source

ORIGINAL = "original_max_position_embeddings"
# Kind -> our key -> (theirs, default); a key without a default is needed, one whose default is null
# may stay away.
SCALINGS: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "linear": {"factor": ("factor", ...)},
    "proportional": {"factor": ("factor", 1.0)},
    "llama3": {
        "factor": ("factor", ...),
        "low_freq_factor": ("low_freq_factor", ...),
        "high_freq_factor": ("high_freq_factor", ...),
        "original_length": (ORIGINAL, ...),
    },
    "yarn": {
        "factor": ("factor", ...),
        "original_length": (ORIGINAL, ...),
        "beta_fast": ("beta_fast", 32.0),
        "beta_slow": ("beta_slow", 1.0),
        "truncate": ("truncate", True),
        "attention_factor": ("attention_factor", None),
        "mscale": ("mscale", None),
        "mscale_all_dim": ("mscale_all_dim", None),
    },
    "longrope": {
        "short_factor": ("short_factor", ...),
        "long_factor": ("long_factor", ...),
        "original_length": (ORIGINAL, ...),
        "factor": ("factor", ...),
        "attention_factor": ("attention_factor", None),
    },
}
OTHER_NAMES = {"su": "longrope", "mrope": "default"}
# Multimodal sections of the frequencies turn alike for text alone.
HARMLESS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
}


class Rope:
    """The rotary positions of all layers, or of those of one type.

    `theta`, `fraction`: what absent keys mean; `old_theta`: the key of the old spelling;
    `old_scaling`: whether rope_scaling meant these layers; `partial`: whether the family can rotate
    a share of a head alone; `outside`: the original length stands beside the parameters, not in
    them; `default`: the parameters where config.json has none.
    """

    def __init__(
        self,
        layer: str | None = None,
        *,
        theta: float = 10_000.0,
        fraction: float = 1.0,
        interleaved: Any = False,
        old_theta: str = "rope_theta",
        old_scaling: bool = True,
        partial: bool = False,
        outside: bool = False,
        default: Mapping[str, Any] | None = None,
    ):
        self.layer, self.theta, self.fraction, self.interleaved = (
            layer,
            theta,
            fraction,
            interleaved,
        )
        self.old_theta, self.old_scaling, self.outside, self.default = (
            old_theta,
            old_scaling,
            outside,
            default or {},
        )
        self.partial = partial or fraction != 1

    def read(self, source: Source) -> dict[str, Any]:
        """The mapping of a RopeConfig."""
        given = self._parameters(source)
        theta = given.get("rope_theta") or source.get(self.old_theta) or self.theta
        fraction = (
            given.get("partial_rotary_factor")
            or source.get("partial_rotary_factor")
            or self.fraction
        )
        if fraction != 1 and not self.partial:
            raise ConfigError(
                f"{source.where}: partial_rotary_factor={fraction}: heads of this family "
                "are rotated whole"
            )
        kind = given.get("rope_type") or given.get("type") or "default"
        kind = OTHER_NAMES.get(kind, kind)
        interleaved = (
            self.interleaved.read(source) if hasattr(self.interleaved, "read") else self.interleaved
        )
        return {
            "theta": theta,
            "fraction": fraction,
            "interleaved": interleaved,
            "scaling": self._scaling(source, kind, given),
        }

    def write(self, value: Any, sink: Sink) -> None:
        """Put rope_parameters, with those of other layer types beside them."""
        if value is None:
            raise Mismatch("there are no rotary positions")
        if hasattr(self.interleaved, "write"):
            self.interleaved.write(value["interleaved"], sink)
        elif value["interleaved"] != self.interleaved:
            raise Mismatch(f"interleaved={value['interleaved']}")
        if value["fraction"] != 1 and not self.partial:
            raise Mismatch(f"fraction={value['fraction']}")
        scaling = value["scaling"] or {"kind": "default"}
        found = {"rope_type": scaling["kind"], "rope_theta": value["theta"]}
        if value["fraction"] != 1 or self.fraction != 1:
            found["partial_rotary_factor"] = value["fraction"]
        for ours, (theirs, default) in SCALINGS.get(scaling["kind"], {}).items():
            if scaling[ours] is not None and (ours != "factor" or scaling[ours] != default):
                found[theirs] = (
                    list(scaling[ours]) if isinstance(scaling[ours], tuple) else scaling[ours]
                )
        if self.outside and ORIGINAL in found:
            sink.put(ORIGINAL, found[ORIGINAL])
        if self.layer is None:
            sink.put("rope_parameters", found)
        else:
            nested = dict(sink.pop("rope_parameters", {}))
            if nested.get(self.layer, found) != found:
                raise Mismatch(f"layers of type {self.layer} differ in their rotary positions")
            sink.put("rope_parameters", nested | {self.layer: found})

    def _parameters(self, source: Source) -> Mapping[str, Any]:
        new, old = source.get("rope_parameters"), source.get("rope_scaling")
        for key, value in (("rope_parameters", new), ("rope_scaling", old)):
            if not isinstance(value, Mapping | None):
                raise source.fail(key, "must be a mapping")
        if new and any(isinstance(value, Mapping) for value in new.values()):
            if self.layer is None:
                raise source.fail(
                    "rope_parameters",
                    "one set of rotary positions for each layer type is not what this family has",
                )
            return new.get(self.layer) or self.default
        return new or (old if self.old_scaling else None) or self.default

    def _scaling(
        self, source: Source, kind: str, given: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        keys = SCALINGS.get(kind, {})
        if kind != "default" and not keys:
            raise ConfigError(
                f"{source.where}: RoPE of type {quoted(kind)} is not supported; "
                f"supported: default, {', '.join(SCALINGS)}"
            )
        known = HARMLESS | {theirs for theirs, _ in keys.values()} | {ORIGINAL, "finetuned"}
        if unknown := sorted(given.keys() - known):
            raise ConfigError(
                f"{source.where}: RoPE of type {kind} has keys that are not known: "
                f"{listed(unknown)}"
            )
        length = source.get("max_position_embeddings")
        original = (source.get(ORIGINAL) if self.outside else None) or given.get(ORIGINAL) or length
        found: dict[str, Any] = {"kind": kind}
        for ours, (theirs, default) in keys.items():
            value = given.get(theirs)
            if ours == "original_length":
                value = original
            elif ours == "factor" and value is None and default is ... and length and original:
                value = length / original
            if value is None and default is ...:
                raise ConfigError(f"{source.where}: RoPE of type {kind} needs {theirs}")
            found[ours] = default if value is None else value
        return found if keys else None
