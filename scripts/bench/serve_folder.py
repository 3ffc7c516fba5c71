"""Models of bench_serve.py: shapes of Llama and Qwen3 with random weights, each a Hugging Face
folder that every program loads."""

import json
from pathlib import Path

import numpy as np
import yaml
from safetensors.numpy import save_file

TABLE = yaml.safe_load(Path(__file__).with_name("serve.yml").read_text(encoding="utf-8"))
DEVIATION = 0.02


def write(folder: Path, size: str) -> int:
    """Write config.json and model.safetensors in float32 -> the number of weights."""
    config = TABLE["all"] | TABLE["sizes"][size]
    embed, hidden = config["hidden_size"], config["intermediate_size"]
    dim = config.setdefault("head_dim", embed // config["num_attention_heads"])
    heads = dim * config["num_attention_heads"]
    kv = config["num_key_value_heads"]
    shapes = {"embed_tokens": (config["vocab_size"], embed), "norm": (embed,)}
    for i in range(config["num_hidden_layers"]):
        block = {
            "input_layernorm": (embed,),
            "self_attn.q_proj": (heads, embed),
            "self_attn.k_proj": (kv * dim, embed),
            "self_attn.v_proj": (kv * dim, embed),
            "self_attn.o_proj": (embed, heads),
            "post_attention_layernorm": (embed,),
            "mlp.gate_proj": (hidden, embed),
            "mlp.up_proj": (hidden, embed),
            "mlp.down_proj": (embed, hidden),
        }
        if config["model_type"] == "qwen3":
            block |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (dim,))
        shapes |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape, np.float32) * np.float32(DEVIATION)
        tensors[f"model.{name}.weight"] = np.ones_like(drawn) if len(shape) == 1 else drawn
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return sum(tensor.size for tensor in tensors.values())
