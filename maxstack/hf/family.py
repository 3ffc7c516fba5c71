"""A model family: its table for config.json and its rows for tensors; and the translations that
follow from them, both ways."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from maxstack.config import ConfigError, did_you_mean, plain_data, quoted
from maxstack.config.annotations import listed
from maxstack.hf import table
from maxstack.hf.blocks import Layers
from maxstack.hf.rows import Row
from maxstack.hf.table import Mismatch, Sink, Source
from maxstack.schema.decoder import DecoderConfig

# Keys that say nothing about the computation of logits.
SILENT = frozenset(
    (
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "aux_loss_alpha",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dtype",
        "embd_pdrop",
        "embedding_dropout",
        "eos_token_id",
        "ep_size",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "max_position_embeddings",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "seq_aux",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
        "unsloth_fixed",
        "use_cache",
        "vision_start_token_id",
        "vision_end_token_id",
        "vision_token_id",
        "image_token_id",
        "video_token_id",
    )
)
# Keys of generation and training that older versions of transformers wrote into every config.json.
STALE = frozenset(
    (
        "attn_implementation",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "prefix",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "top_k",
        "top_p",
        "torchscript",
        "typical_p",
        "use_bfloat16",
    )
)
NEVER = {"add_cross_attention": False, "is_encoder_decoder": False}


@dataclasses.dataclass(frozen=True)
class Family:
    """What one architecture of transformers is, in our words."""

    architecture: str
    """First of `architectures` in config.json."""
    model_type: str
    """`model_type` in config.json."""
    model: Mapping[str, Any]
    """Table of the DecoderConfig, without its layers."""
    layers: Layers
    """Table of its layers."""
    rows: tuple[Row, ...]
    """One row a tensor."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys that must have this value, or one of these, where they are given; it is what their
    absence means."""
    silent: frozenset[str] = frozenset()
    """Further keys that say nothing about the computation."""
    layer: str = "model.layers.{}"
    """Name of a layer."""
    further: str = ""
    """Name of a module of multi-token prediction, by its number; empty: there are none."""
    further_after: bool = False
    """These modules are counted on from the last layer."""
    body: str = "model."
    """What tensor names begin with, the head aside; absent from files of the bare body."""
    unused: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Patterns of tensors that carry nothing."""

    def read(self, config: Mapping[str, Any], where: str, mtp: int | None = 0) -> dict[str, Any]:
        """config.json -> the mapping of a DecoderConfig. ConfigError lists keys and values that are
        not known."""
        source = Source(config, where, mtp)
        model = table.read(self.model, source) | self.layers.read(source)
        self._refuse(source, config)
        return {key: value for key, value in model.items() if value is not None}

    def write(self, model: DecoderConfig) -> dict[str, Any]:
        """The config.json that says `model`; Mismatch where this family cannot."""
        wanted, sink = meaning(model), Sink()
        table.write(self.model, wanted, sink)
        self.layers.write(wanted["layers"], sink)
        found = {"architectures": [self.architecture], "model_type": self.model_type, **sink}
        mtp = model.mtp.depth if model.mtp and self.further else 0
        again = meaning(DecoderConfig.model_validate(self.read(found, self.architecture, mtp)))
        if different := sorted(_different(wanted, again, "")):
            raise Mismatch(
                "it has no way to say "
                f"{', '.join(different[:5])}{' and more' if len(different) > 5 else ''}"
            )
        return found

    def _refuse(self, source: Source, config: Mapping[str, Any]) -> None:
        fixed = {**NEVER, **self.fixed}
        known = source.used | SILENT | STALE | self.silent | fixed.keys()
        wrong = [
            f"{key}={quoted(config[key])} (supported: {quoted(value)})"
            for key, value in fixed.items()
            if config.get(key) is not None
            and config[key] not in (value if isinstance(value, tuple) else (value,))
        ]
        unknown = sorted(
            key
            for key, value in config.items()
            if key not in known and not key.startswith("_") and value is not None
        )
        if wrong or unknown:
            said = [
                f"{'; '.join(wrong[:3])}" if wrong else "",
                f"unknown keys: {listed(unknown)}" if unknown else "",
            ]
            raise ConfigError(
                f"{source.where}: {self.architecture} with something that maxstack does "
                f"not compute: {'; '.join(filter(None, said))}. "
                "Remove a key only if it does not change the model's output"
            )


def meaning(model: DecoderConfig) -> dict[str, Any]:
    """What decides the logits of a model, in one form: layers one by one, defaults filled in,
    without names, dtypes and matters of speed."""
    data = plain_data(model)
    blocks = {name: _block(block) for name, block in data["blocks"].items()}
    order = list(model.order)
    layers = []
    for name in order:
        mixer = blocks[name]["mixer"]
        if mixer.get("share_kv"):
            owner = len(model.prefix) - 1 - model.prefix[::-1].index(mixer["share_kv"])
            layers.append(blocks[name] | {"mixer": mixer | {"share_kv": owner}})
        else:
            layers.append(blocks[name])
    free = (
        "blocks",
        "pattern",
        "prefix",
        "dtype",
        "param_dtype",
        "remat",
        "unroll",
        "init_scale",
        "layers",
        "mtp",
        "weights",
    )
    rest = {key: value for key, value in data.items() if key not in free}
    mtp = {"depth": model.mtp.depth, "block": blocks[model.mtp.block]} if model.mtp else None
    head = {key: value for key, value in data["head"].items() if key != "backend"}
    return rest | {"layers": layers, "mtp": mtp, "head": head}


def _block(block: dict[str, Any]) -> dict[str, Any]:
    speed = {"backend", "chunk"} if block["mixer"]["kind"] == "gated_delta" else {"backend"}
    mixer = {key: value for key, value in block["mixer"].items() if key not in speed}
    if mixer["kind"] == "attention":
        mixer |= {
            "kv_heads": mixer["kv_heads"] or mixer["heads"],
            "scale": mixer["scale"] or mixer["head_dim"] ** -0.5,
        }
    return block | {"mixer": mixer, "mlp": _mlp(block["mlp"])}


def _mlp(mlp: dict[str, Any]) -> dict[str, Any]:
    """Without what is of training alone."""
    if mlp["kind"] == "parallel":
        return mlp | {"moe": _mlp(mlp["moe"])}
    if mlp["kind"] != "moe":
        return mlp
    router = {
        key: value
        for key, value in mlp["router"].items()
        if key not in ("balance_loss", "z_loss", "bias_update")
    }
    groups = router["groups"] or 1
    chosen = router["top_groups"] or groups
    limited = (
        {"groups": groups, "top_groups": chosen}
        if chosen < groups
        else {"groups": 1, "top_groups": 1, "group_score": "top2"}
    )
    return {key: value for key, value in mlp.items() if key != "backend"} | {
        "router": router | limited
    }


def _different(one: Any, other: Any, path: str) -> Collection[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            found
            for key in one | other
            for found in _different(one.get(key), other.get(key), f"{path}.{key}" if path else key)
        }
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return {found for a, b in zip(one, other, strict=True) for found in _different(a, b, path)}
    return set() if table.same(one, other) else {f"{path}={one!r}"}


def of_config(config: Mapping[str, Any], families: Mapping[str, Family], where: str) -> Family:
    """The family that a config.json names; ConfigError lists those that are supported, or says that
    `architectures` and `model_type` name two, or that `model_type` is not known. Unknown
    `architectures` beside a known `model_type` are other heads on the same body."""
    named = config.get("architectures") or []
    names = [*(named if isinstance(named, list) else [named]), config.get("model_type")]
    said = f"architectures={quoted(named)}, model_type={quoted(config.get('model_type'))}"
    found = [families[name] for name in names if isinstance(name, str) and name in families]
    if any(name is not None and not isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: {said}: these are names, written as text")
    if any(family is not found[0] for family in found):
        raise ConfigError(f"{where}: {said}: contradict each other; correct the one that is wrong")
    if found and names[-1] not in (None, *families):
        raise ConfigError(
            f"{where}: {said}: model_type is of no family that is supported"
            f"{did_you_mean(names[-1], families)}; if the model computes what "
            f"{found[0].architecture} does, set it to {found[0].model_type}"
        )
    if found:
        return found[0]
    supported = sorted({family.architecture for family in families.values()})
    raise ConfigError(
        f"{where}: {said} is not supported{did_you_mean(names[0], families)}; supported: "
        f"{', '.join(supported)}"
    )
