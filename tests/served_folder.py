"""A Hugging Face folder with random weights, a byte-level tokenizer and a chat template, small
enough to be served by tests."""

import json
from pathlib import Path

import numpy as np
import parity
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

MARKS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{% if tools %}Tools, as <tool_call>{"name": ..., "arguments": ...}</tool_call>: {{ tools | tojson }}
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make(folder: Path, length: int = 8192) -> Path:
    """The folder, for texts of at most `length` tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(MARKS)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": MARKS[1]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    golden = parity.GOLDENS / "llama"
    config = json.loads((golden / "config.json").read_text())
    config |= {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": length,
        "eos_token_id": tokenizer.token_to_id(MARKS[1]),
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(golden / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shape = config["vocab_size"], config["hidden_size"]
        tensors[name] = rng.standard_normal(shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
