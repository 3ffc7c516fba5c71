"""A model family: its table for config.json and its rows for tensors, and the translations that
follow from them, both ways.

Writing is checked by reading: the config.json that a family writes is read back, and the model must
be the same in canonical form. So a table never has to know what it cannot express.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from maxstack.config import plain_data
from maxstack.config.annotations import listed
from maxstack.config.spelling import did_you_mean
from maxstack.errors import ConfigError, quoted
from maxstack.hf import config_checks, table
from maxstack.hf.blocks import Layers
from maxstack.hf.folder import CLASS_NAME
from maxstack.hf.rows import Row
from maxstack.hf.table import Mismatch, Sink, Source
from maxstack.schema.decoder import DecoderConfig
from maxstack.schema.stack import StackConfig

CAUSAL, SCORING = "ForCausalLM", "ForSequenceClassification"
"""Ends of the names of architectures with a language model's head, and a reward model's."""
CLASSIFYING = "ForImageClassification"
"""End of the names of architectures with classes of images."""
NEVER = {"add_cross_attention": False, "is_encoder_decoder": False}
NO_MEANING = frozenset(
    """
    blocks pattern prefix dtype param_dtype remat unroll init_scale layers mtp weights new_tokens
    """.split()
)
"""Keys of a DecoderConfig that do not decide the logits, or that `layers` replaces."""


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture of transformers in our words."""

    architecture: str
    """First of `architectures` in config.json, or diffusers' `_class_name`."""
    model_type: str
    """`model_type` in config.json; empty: the architecture is of diffusers."""
    model: Mapping[str, Any]
    """Table of the DecoderConfig, without its layers."""
    layers: Layers
    """Table of its layers."""
    rows: tuple[Row, ...]
    """One row for each tensor."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys that must have this value, or one of these, where they are given; their absence means
    the same."""
    silent: Collection[str] = ()
    """Further keys that do not change the computation."""
    layer: str = "model.layers.{}"
    """Name of a layer."""
    further: str = ""
    """Name of a module of multi-token prediction, by its number; empty: there are none."""
    further_after: bool = False
    """These modules are numbered on from the last layer."""
    body: str = "model."
    """Beginning of tensor names except the head's; absent from files of the bare body."""
    unused: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Patterns of tensors without information."""
    bare: str = ""
    """Name of the architecture without a head."""
    schema: type[StackConfig] = DecoderConfig
    """Section of the model."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of keys that published folders leave out."""
    needed: Collection[str] = ()
    """Keys that may not be absent, because transformers' class of this type has other defaults."""

    def read(self, config: Mapping[str, Any], where: str, mtp: int | None = 0) -> dict[str, Any]:
        """Translate config.json into the mapping of a DecoderConfig. ConfigError lists keys and
        values that are not supported."""
        source = Source({**self.defaults, **config}, where, mtp)
        inside = config.get("rope_parameters")
        for key in self.needed:
            # The new spelling keeps rope_theta in rope_parameters.
            if not isinstance(inside, Mapping) or key not in inside:
                source.need(key)
        model = table.read(self.model, source) | self.layers.read(source)
        if self.schema is DecoderConfig and scores(config):
            _check_labels(config, where)
            # The head of a reward model is a matrix of its own, even over a tied embedding.
            model["head"] = {**model["head"], "scores": True, "tied": False}
        self._refuse(source, config)
        return {key: value for key, value in model.items() if value is not None}

    def write(self, model: StackConfig) -> dict[str, Any]:
        """Return the config.json of `model`; Mismatch where this family cannot express it."""
        if type(model) is not self.schema:
            raise Mismatch(f"it is no {model.kind}")
        wanted, sink = canonical_form(model), Sink()
        table.write(self.model, wanted, sink)
        self.layers.write(wanted["layers"], sink)
        # A model without a head has its own class in transformers, and its files lack the body's
        # prefix.
        architecture = self.architecture if model.has_head else self.bare
        if model.scores:
            architecture = architecture.replace(CAUSAL, SCORING)
            sink |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        named = {"architectures": [architecture], "model_type": self.model_type}
        config = {**(named if self.model_type else {CLASS_NAME: architecture}), **sink}
        # Modules of multi-token prediction are counted by their tensors, which do not exist yet.
        mtp = model.mtp_depth if self.further else 0
        # What the tables could not express is missing or different here, whatever it is.
        again = canonical_form(self.schema.model_validate(self.read(config, architecture, mtp)))
        if different := sorted(_different(wanted, again, "")):
            more = " and more" if len(different) > 5 else ""
            raise Mismatch(f"it has no way to say {', '.join(different[:5])}{more}")
        return config

    @property
    def _classes(self) -> set[str]:
        """Names of transformers' classes of this family."""
        stem = self.architecture.removesuffix(CAUSAL)
        return {self.architecture, self.bare, f"{stem}Model", f"{stem}{SCORING}"}

    def _refuse(self, source: Source, config: Mapping[str, Any]) -> None:
        fixed = {**NEVER, **self.fixed}
        known = {*source.used, *table.keys((self.model, self.layers)), *self.silent, *fixed}
        reasons = []
        for key, allowed in fixed.items():
            values = allowed if isinstance(allowed, tuple) else (allowed,)
            # null means the same as absence here.
            if config.get(key) is not None and config[key] not in values:
                reasons.append(f"{key}={quoted(config[key])} (supported: {quoted(allowed)})")
        # An unknown key may be an argument of the arithmetic: passing it over gives another model
        # in silence.
        unknown = config_checks.refused(config, known, source.where)
        if other := config_checks.other_class(config, self._classes):
            reasons.append(f"auto_map={quoted(other)} (supported: {self.architecture})")
        reasons = reasons[:3] + ([f"unknown keys: {listed(unknown)}"] if unknown else [])
        if reasons:
            raise ConfigError(
                f"{source.where}: {self.architecture} with something that maxstack does "
                f"not compute: {'; '.join(reasons)}. "
                "Remove a key only if it does not change the model's output"
            )


def scores(config: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a reward model."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else [architectures]
    return any(isinstance(name, str) and name.endswith(SCORING) for name in names)


def _check_labels(config: Mapping[str, Any], where: str) -> None:
    """ConfigError where a classifier has more than one label."""
    labels = config.get("num_labels") or len(config.get("id2label") or ("", ""))
    if labels != 1:
        raise ConfigError(
            f"{where}: a classifier of {labels} labels; a reward model, which is supported, has "
            'one: "id2label": {"0": "LABEL_0"}'
        )


def canonical_form(model: StackConfig) -> dict[str, Any]:
    """Return everything that decides the logits of a model: layers one by one, with defaults filled
    in, without names, dtypes and settings of speed."""
    data = plain_data(model)
    blocks = {name: _block(block) for name, block in data["blocks"].items()}
    layers = []
    for name in model.order:
        mixer = blocks[name]["mixer"]
        if mixer.get("share_kv"):
            # Blocks have any name; what counts is the number of the layer that owns keys and
            # values, the last one of that name before the sharing layers.
            owner = len(model.prefix) - 1 - model.prefix[::-1].index(mixer["share_kv"])
            layers.append(blocks[name] | {"mixer": mixer | {"share_kv": owner}})
        else:
            layers.append(blocks[name])
    further = (
        {"depth": model.mtp_depth, "block": blocks[data["mtp"]["block"]]}
        if model.mtp_depth
        else None
    )
    head = {"head": _without(data["head"], ["backend"])} if "head" in data else {}
    return _without(data, NO_MEANING) | {"layers": layers, "mtp": further} | head


def _without(mapping: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def _block(block: dict[str, Any]) -> dict[str, Any]:
    # `chunk` of attention limits what is seen; of the gated delta rule it only orders the same
    # sums.
    speed = ["backend", "chunk"] if block["mixer"]["kind"] == "gated_delta" else ["backend"]
    mixer = _without(block["mixer"], speed)
    if mixer["kind"] == "attention":
        mixer["kv_heads"] = mixer["kv_heads"] or mixer["heads"]
        mixer["scale"] = mixer["scale"] or mixer["head_dim"] ** -0.5
        if mixer["key_bias"] is None:
            mixer["key_bias"] = mixer["qkv_bias"]
    norms = {"mlp_norm": block["mlp_norm"] or block["norm"]}
    return block | norms | {"mixer": mixer, "mlp": _mlp(block["mlp"])}


def _mlp(mlp: dict[str, Any]) -> dict[str, Any]:
    """Return an MLP's mapping without settings of training."""
    if mlp["kind"] == "parallel":
        return mlp | {"moe": _mlp(mlp["moe"])}
    if mlp["kind"] != "moe":
        return mlp
    router = _without(mlp["router"], ["balance_loss", "z_loss", "bias_update"])
    groups = router["groups"] or 1
    # Choosing among all groups restricts nothing, however many there are.
    top_groups = router["top_groups"] or groups
    if top_groups < groups:
        router |= {"groups": groups, "top_groups": top_groups}
    else:
        router |= {"groups": 1, "top_groups": 1, "group_score": "top2"}
    return _without(mlp, ["backend"]) | {"router": router}


def _different(first: Any, second: Any, path: str) -> set[str]:
    """Return the paths at which two values differ, with the first one's value."""
    if isinstance(first, dict) and isinstance(second, dict):
        pairs = [(f"{path}.{key}", first.get(key), second.get(key)) for key in first | second]
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = [(path, *pair) for pair in zip(first, second, strict=True)]
    else:
        return set() if table.same(first, second) else {f"{path.removeprefix('.')}={first!r}"}
    return set().union(*(_different(a, b, inner) for inner, a, b in pairs))


def of_config(config: Mapping[str, Any], families: Mapping[str, Family], where: str) -> Family:
    """Return the family that a config.json names. ConfigError where it names none, or two, or an
    unknown model_type. Unknown `architectures` beside a known `model_type` are other heads on the
    same body."""
    architectures = config.get("architectures") or config.get(CLASS_NAME) or []
    model_type = config.get("model_type")
    names = [*(architectures if isinstance(architectures, list) else [architectures]), model_type]
    said = f"{where}: architectures={quoted(architectures)}, model_type={quoted(model_type)}"
    if not all(isinstance(name, str | None) for name in names):
        raise ConfigError(f"{said}: these are names, written as text")
    # A reward model has the tables and rows of its language model.
    names = [name.replace(SCORING, CAUSAL) if name else name for name in names]
    named = [families[name] for name in names if name in families]
    if not named:
        supported = sorted({family.architecture for family in families.values()})
        raise ConfigError(
            f"{said} is not supported{did_you_mean(names[0], families)}; supported: "
            f"{', '.join(supported)}"
        )
    if any(family is not named[0] for family in named):
        raise ConfigError(f"{said}: contradict each other; correct the one that is wrong")
    # It was ignored once beside a known architecture, and a model of another kind was scored as
    # Llama.
    if model_type not in (None, *families):
        raise ConfigError(
            f"{said}: model_type is of no family that is supported"
            f"{did_you_mean(model_type, families)}; if the model computes what "
            f"{named[0].architecture} does, set it to {named[0].model_type}"
        )
    return named[0]
