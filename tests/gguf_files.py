"""GGUF files as llama.cpp's converter writes them, made of small model folders by the gguf package;
without maxstack."""

import json
import math
import re

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt_oss": "gpt-oss",
}
"""By model_type."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "experts.gate_proj": "ffn_gate_exps",
    "experts.w1": "ffn_gate_exps",
    "experts.up_proj": "ffn_up_exps",
    "experts.w3": "ffn_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "experts.w2": "ffn_down_exps",
}
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
FLOATS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def write_gguf(path, folder, quantize=None, vocab=None, **changes):
    """Write the model of a folder of float32; matrices whose rows divide are quantized to the type
    of that name. `vocab`: metadata of a tokenizer; `changes`: of the metadata, None for absence."""
    config = json.loads((folder / "config.json").read_text())
    metadata = {**metadata_of(config), **tokens_of(config), **(vocab or {})}
    metadata |= changes
    writer = GGUFWriter(path, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, array in tensors_of(config, load_file(folder / "model.safetensors")).items():
        kind = GGMLQuantizationType[quantize] if quantize and array.ndim > 1 else None
        if kind and array.shape[-1] % 32 == 0:
            writer.add_tensor(name, quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer, key, value):
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_string(key, value)


def metadata_of(config):
    """The keys of an architecture."""
    name = ARCHITECTURES[config["model_type"]]
    keys = {key: config.get(theirs) for key, theirs in SIZES.items()}
    keys |= {key: config.get(theirs) for key, theirs in FLOATS.items()}
    if name == "gpt-oss":
        keys["expert_feed_forward_length"] = config["intermediate_size"]
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        keys["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    keys["rope.freq_base"] = rope["rope_theta"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if name in ("llama", "phi3"):
        keys["rope.dimension_count"] = int(width * rope.get("partial_rotary_factor", 1))
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] in ("yarn", "longrope"):
        original = rope["original_max_position_embeddings"]
        keys |= {"rope.scaling.original_context_length": original}
    if rope["rope_type"] == "yarn":
        keys |= {f"rope.scaling.yarn_{key}": rope[key] for key in ("beta_fast", "beta_slow")}
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / original
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    metadata = {f"{name}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": name, "general.name": "A small model", **metadata}


def tokens_of(config):
    """A vocabulary of bytes, padded to the model's."""
    count = config["vocab_size"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"{i}" for i in range(count)],
        "tokenizer.ggml.token_type": [1] * count,
        "tokenizer.ggml.merges": ["1 2"],
        "tokenizer.ggml.eos_token_id": 2,
    }


def tensors_of(config, tensors):
    """The tensors by llama.cpp's names and in its order of numbers."""
    kind, made, experts = config["model_type"], {}, {}
    for name, array in tensors.items():
        begin = re.match(r"model\.layers\.(\d+)\.", name)
        before = f"blk.{begin[1]}." if begin else ""
        rest = name.removeprefix(begin[0]) if begin else name
        if kind == "gpt_oss" and "experts" in rest:
            made |= _experts_of_gpt_oss(before, rest, array)
            continue
        if of_expert := re.fullmatch(r"[\w.]*?(experts)\.(\d+)(\.\w+)\.weight", rest):
            theirs = f"{before}{NAMES[of_expert[1] + of_expert[3]]}.weight"
            experts.setdefault(theirs, {})[int(of_expert[2])] = array
            continue
        stem, _, suffix = rest.rpartition(".") if rest[-5:] != "sinks" else (rest, "", "weight")
        theirs = NAMES[stem]
        if kind in ("gemma2", "gemma3_text", "gpt_oss") and stem == "post_attention_layernorm":
            theirs = "post_attention_norm"
        if kind in ("llama", "mistral", "mixtral") and theirs in ("attn_q", "attn_k"):
            key = "num_attention_heads" if theirs == "attn_q" else "num_key_value_heads"
            halves = array.reshape(config[key], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if kind.startswith("gemma") and theirs.endswith("norm"):
            array = array + 1
        made[f"{before}{theirs}.{suffix}"] = array
    made |= {name: np.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}
    return made | _rope_factors(config)


def _experts_of_gpt_oss(before, rest, array):
    stem, suffix = re.fullmatch(r"mlp\.experts\.(\w+?)_proj(_bias)?", rest).groups()
    turned = array if suffix else array.swapaxes(1, 2)
    end = "bias" if suffix else "weight"
    if stem == "down":
        return {f"{before}ffn_down_exps.{end}": turned}
    return {
        f"{before}ffn_gate_exps.{end}": turned[:, ::2],
        f"{before}ffn_up_exps.{end}": turned[:, 1::2],
    }


def _rope_factors(config):
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        sizes = ("long", "short")
        return {f"rope_factors_{n}.weight": np.float32(rope[f"{n}_factor"]) for n in sizes}
    if rope.get("rope_type") != "llama3":
        return {}
    pairs = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    lengths = 2 * np.pi * rope["rope_theta"] ** pairs
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / lengths - low) / (high - low)
    smooth = smooth.clip(0, 1)
    return {"rope_freqs.weight": np.float32(1 / ((1 - smooth) / rope["factor"] + smooth))}
