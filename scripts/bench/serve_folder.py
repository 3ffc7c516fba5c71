"""Models of bench_serve.py: Llama shapes with random weights, each a Hugging Face folder that every
program loads."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SIZES = {
    "tiny": dict(hidden_size=64, layers=2, heads=4, kv=2, intermediate_size=128, vocab_size=512),
    "0.1": dict(
        hidden_size=768, layers=12, heads=12, kv=4, intermediate_size=2048, vocab_size=32000
    ),
    "0.5": dict(
        hidden_size=896, layers=24, heads=14, kv=2, intermediate_size=4864, vocab_size=151936
    ),
}
"""By billions of weights; 0.5 has the shape of Qwen2.5-0.5B."""
DEVIATION = 0.02


def write(folder: Path, size: str) -> int:
    """Write config.json and model.safetensors in float32 -> the number of weights."""
    config = dict(SIZES[size])
    layers, heads, kv = (config.pop(name) for name in ("layers", "heads", "kv"))
    embed, hidden = config["hidden_size"], config["intermediate_size"]
    dim = embed // heads
    shapes = {"embed_tokens": (config["vocab_size"], embed), "norm": (embed,)}
    for i in range(layers):
        block = {
            "input_layernorm": (embed,),
            "self_attn.q_proj": (embed, embed),
            "self_attn.k_proj": (kv * dim, embed),
            "self_attn.v_proj": (kv * dim, embed),
            "self_attn.o_proj": (embed, embed),
            "post_attention_layernorm": (embed,),
            "mlp.gate_proj": (hidden, embed),
            "mlp.up_proj": (hidden, embed),
            "mlp.down_proj": (embed, hidden),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape, np.float32) * np.float32(DEVIATION)
        tensors[f"model.{name}.weight"] = np.ones_like(drawn) if len(shape) == 1 else drawn
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **config,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    return sum(tensor.size for tensor in tensors.values())
