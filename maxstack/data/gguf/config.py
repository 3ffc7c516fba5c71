"""config.json of a GGUF file: its metadata by the keys of transformers.

llama.cpp computes by what the keys of an architecture say, and by constants where they are silent.
Each key is translated, checked or known to change nothing; another one is refused by name, since
it may change what is computed.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from maxstack.config.annotations import listed
from maxstack.data.gguf.file import GgufFile
from maxstack.errors import ConfigError, DataError, quoted

SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
EPSILON = "attention.layer_norm_rms_epsilon"
WINDOW = {"attention.sliding_window": "sliding_window"}
USED = {"expert_used_count": "num_experts_per_tok"}
LOCAL = {"expert_count": "num_local_experts", **USED}
CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
ORIGINAL = "original_max_position_embeddings"
FULL, SLIDING = "full_attention", "sliding_attention"
# Of files, of how numbers were found, and of the vocabulary, whose size is that of the embedding.
HARMLESS = {"vocab_size", "rope.scaling.finetuned"}
ROPE_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors that config.json holds as numbers."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp in transformers' words."""

    class_name: str
    model_type: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further keys."""
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of config.json that llama.cpp does not write, since they never differ."""
    largest: int = 0
    """Layers of the model whose queries are scaled by the width for a head, as in llama.cpp."""


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama"),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            **USED,
        },
        {"norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "gemma": Architecture("GemmaForCausalLM", "gemma"),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", {**CAPS, **WINDOW}, largest=46),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", {**CAPS, **WINDOW}, largest=62),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", WINDOW),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        {"expert_feed_forward_length": "intermediate_size", **LOCAL, **WINDOW},
    ),
}
LLAMA = ARCHITECTURES["llama"]
MIXTRAL = Architecture("MixtralForCausalLM", "mixtral", {**LOCAL, **WINDOW})
MISTRAL = Architecture("MistralForCausalLM", "mistral", WINDOW)


class Keys:
    """The keys of an architecture, with those that nobody has asked for."""

    def __init__(self, file: GgufFile, name: str):
        self._where, self._name = file.path, name
        self._left = {
            key.removeprefix(f"{name}."): value
            for key, value in file.metadata.items()
            if key.startswith(f"{name}.")
        }
        for key, value in self._left.items():
            words = key == "rope.scaling.type"
            numbers = isinstance(value, np.ndarray) or type(value) in (bool, int, float)
            if (type(value) is not str) if words else not numbers:
                raise DataError(f"{self._where}: {name}.{key}={quoted(value)}: is no value of it")
            if type(value) is float and not math.isfinite(value):
                raise DataError(f"{self._where}: {name}.{key}={value}: is no number")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; of an array with a value for each layer, which must agree,
        that value."""
        value = self._left.pop(key, default)
        if isinstance(value, np.ndarray):
            if len({*value.tolist()}) != 1:
                raise self.fail(key, value.tolist(), "layers that differ in it are not supported")
            value = value[0].item()
        return default if value is None else value

    def array(self, key: str) -> Any:
        """Return the value of a key as it is."""
        return self._left.pop(key, None)

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0; DataError for another value, or none."""
        if type(value := self.get(key, default)) is not int or value < 1:
            raise DataError(f"{self._where}: {self._name}.{key}={value}: must be 1 or more")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """ConfigError where a key is there with another value."""
        if (value := self.get(key)) is not None and value not in allowed:
            raise self.fail(key, value, f"supported: {', '.join(map(str, allowed))}")

    def fail(self, key: str, value: Any, why: str) -> ConfigError:
        return ConfigError(f"{self._where}: {self._name}.{key}={quoted(value)}: {why}")

    def check_read(self) -> None:
        """ConfigError for keys that nobody has asked for."""
        if unknown := sorted(self._left.keys() - HARMLESS):
            raise ConfigError(
                f"{self._where}: {listed([f'{self._name}.{key}' for key in unknown])}: not known "
                "here, and may change what the model computes; use the model's safetensors"
            )


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return config.json. ConfigError for an architecture or a key that is not supported, DataError
    for sizes that are missing."""
    _check_kind(file)
    name = file.value("general.architecture", str)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: general.architecture={quoted(name)} is not supported; of GGUF files "
            f"these are read: {', '.join(ARCHITECTURES)}"
        )
    if (table := file.entries.get("token_embd.weight")) is None or len(table.shape) != 2:
        raise DataError(f"{file.path}: has no tensor token_embd.weight, which every model has")
    keys, kind = Keys(file, name), ARCHITECTURES[name]
    config: dict[str, Any] = {theirs: keys.size(key) for key, theirs in SIZES.items()}
    config["rms_norm_eps"] = keys.get(EPSILON)
    # Before lists of layers are made.
    if config["num_hidden_layers"] > len(file.entries):
        raise DataError(f"{file.path}: has fewer tensors than {name}.block_count")
    if name == "llama":
        kind = _llama(file)
        bias = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
        config |= {key: tensor in file.entries for key, tensor in bias.items()}
    config |= {"architectures": [kind.class_name], "model_type": kind.model_type, **kind.constants}
    config |= {
        theirs: value for key, theirs in kind.keys.items() if (value := keys.get(key)) is not None
    }
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = keys.size("attention.head_count_kv", heads)
    config["head_dim"] = keys.size("attention.key_length", config["hidden_size"] // heads)
    keys.expect("attention.value_length", config["head_dim"])
    config["vocab_size"] = table.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.entries
    keys.expect("attention.causal", True)
    keys.expect("expert_gating_func", 1, *([3] if name == "gpt-oss" else []))
    config |= _positions(file, keys, name, config)
    if kind.largest:
        largest = config["num_hidden_layers"] == kind.largest
        scalar = config["hidden_size"] // heads if largest else config["head_dim"]
        config["query_pre_attn_scalar"] = scalar
    keys.check_read()
    return config


def _check_kind(file: GgufFile) -> None:
    """ConfigError for a file that is no whole model."""
    kind, parts = file.value("general.type", str), file.value("split.count", int)
    if kind not in (None, "model"):
        raise ConfigError(f"{file.path}: general.type={quoted(kind)}: is no model")
    if parts and parts > 1:
        raise ConfigError(
            f"{file.path}: is one of {parts} parts; join them: llama-gguf-split --merge FIRST OUT"
        )


def _llama(file: GgufFile) -> Architecture:
    """Return which of the models that llama.cpp calls llama a file holds."""
    if file.value("llama.expert_count", int):
        return MIXTRAL
    return MISTRAL if file.value("llama.attention.sliding_window", int) else LLAMA


def _positions(file: GgufFile, keys: Keys, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of rotary positions, and of the layers that they differ in."""
    theta, width = keys.get("rope.freq_base", 10_000.0), config["head_dim"]
    rotated = keys.size("rope.dimension_count", width)
    rope = {"rope_theta": theta} | _scaling(file, keys, config)
    if name == "gpt-oss":
        # Published with this setting, which the file does not have.
        rope["truncate"] = False
    if name == "phi3":
        # Phi-4 says 0 for no window.
        return {
            "rope_parameters": rope | {"partial_rotary_factor": rotated / width},
            "original_max_position_embeddings": rope.get(ORIGINAL),
            "sliding_window": config.get("sliding_window") or None,
        }
    if rotated != width:
        raise keys.fail("rope.dimension_count", rotated, f"heads of {width} are rotated whole")
    if name != "gemma3":
        keys.expect("rope.freq_base_swa", theta)
        return {"rope_parameters": rope}
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10_000.0)}
    return {
        "rope_parameters": {FULL: rope, SLIDING: local},
        "layer_types": _layer_types(keys, config),
    }


def _layer_types(keys: Keys, config: Mapping[str, Any]) -> list[str]:
    """Return Gemma 3's layer types: every sixth one is full, or as the file says."""
    layers = range(config["num_hidden_layers"])
    pattern = keys.array("attention.sliding_window_pattern")
    if not config.get("sliding_window"):
        return [FULL for _ in layers]
    if not isinstance(pattern, np.ndarray):
        step = pattern or 6
        return [SLIDING if (layer + 1) % step else FULL for layer in layers]
    if len(pattern) != len(layers):
        raise keys.fail("attention.sliding_window_pattern", pattern.tolist(), "one a layer")
    return [SLIDING if slides else FULL for slides in pattern]


def _scaling(file: GgufFile, keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling of rotary positions, by keys and by tensors of divisors."""
    kind = keys.get("rope.scaling.type", "linear")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0.0))
    length = config["max_position_embeddings"]
    original = keys.size("rope.scaling.original_context_length", length)
    attention = keys.get("rope.scaling.attn_factor")
    keys.expect("rope.scaling.yarn_ext_factor", 1, -1)
    yarn = {
        theirs: keys.get(f"rope.scaling.yarn_{key}", default)
        for key, theirs, default in (
            ("beta_fast", "beta_fast", 32.0),
            ("beta_slow", "beta_slow", 1.0),
            ("attn_factor", "attention_factor", None),
        )
    }
    one, long, short = (_divisors(file, name) for name in ROPE_FACTORS)
    if one or long or short:
        if bool(long) != bool(short) or kind == "yarn" or factor not in (0, 1):
            raise keys.fail("rope.scaling.type", kind, "does not fit the tensors of rope factors")
        return {
            "rope_type": "longrope",
            "short_factor": short or one,
            "long_factor": long or one,
            "factor": 1.0 if one else length / original,
            "attention_factor": 1.0 if one else attention,
            ORIGINAL: original,
        }
    if attention not in (None, 1):
        raise keys.fail("rope.scaling.attn_factor", attention, "is read beside rope factors alone")
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.fail("rope.scaling.type", kind, "supported: none, linear, yarn, longrope")
    return {"rope_type": "yarn", "factor": factor, ORIGINAL: original, **yarn}


def _divisors(file: GgufFile, name: str) -> list[float]:
    """Return the numbers of a tensor of rope factors; none where it is absent."""
    if (entry := file.entries.get(name)) is None:
        return []
    file.check_sizes()
    return file.floats(entry).astype(np.float64).ravel().tolist()
