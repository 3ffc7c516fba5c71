"""Models of bench_serve.py: Llama shapes with random weights, each a Hugging Face folder that every
program loads."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SIZES = {
    "tiny": dict(embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=128, vocab=512),
    "0.1": dict(embed=768, layers=12, heads=12, kv_heads=4, head_dim=64, hidden=2048, vocab=32000),
    "0.5": dict(embed=896, layers=24, heads=14, kv_heads=2, head_dim=64, hidden=4864, vocab=151936),
}
"""By billions of weights; 0.5 has the shape of Qwen2.5-0.5B."""
POSITIONS = 2048
DEVIATION = 0.02


def write(folder: Path, size: str) -> int:
    """Write config.json and model.safetensors in float32 -> the number of weights."""
    shape = SIZES[size]
    embed, hidden = shape["embed"], shape["hidden"]
    queries, keys = (shape[name] * shape["head_dim"] for name in ("heads", "kv_heads"))
    shapes = {"model.embed_tokens.weight": (shape["vocab"], embed), "model.norm.weight": (embed,)}
    for i in range(shape["layers"]):
        shapes |= {
            f"model.layers.{i}.{name}.weight": dims
            for name, dims in {
                "input_layernorm": (embed,),
                "self_attn.q_proj": (queries, embed),
                "self_attn.k_proj": (keys, embed),
                "self_attn.v_proj": (keys, embed),
                "self_attn.o_proj": (embed, queries),
                "post_attention_layernorm": (embed,),
                "mlp.gate_proj": (hidden, embed),
                "mlp.up_proj": (hidden, embed),
                "mlp.down_proj": (embed, hidden),
            }.items()
        }
    rng = np.random.default_rng(0)
    tensors = {
        name: np.ones(dims, np.float32)
        if len(dims) == 1
        else rng.standard_normal(dims, np.float32) * np.float32(DEVIATION)
        for name, dims in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(size), indent=1))
    return sum(tensor.size for tensor in tensors.values())


def _config(size: str) -> dict[str, object]:
    shape = SIZES[size]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["embed"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "intermediate_size": shape["hidden"],
        "vocab_size": shape["vocab"],
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
