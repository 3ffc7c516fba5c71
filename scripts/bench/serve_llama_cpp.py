"""llama.cpp through llama-cpp-python, for serve_worker.py. int8 is Q8_0 of every matrix. A folder's
GGUF file is written beside it once for each dtype."""

import json
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import load_file

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROWS = 512
"""Tokens of a call at most, as in llama.cpp's own defaults."""


def load(folder: str, dtype: str, threads: int, length: int) -> Any:
    """See serve_worker."""
    file = Path(folder) / f"{dtype}.gguf"
    if not file.exists():
        convert(Path(folder), TYPES[dtype], file)
    model = llama_cpp.llama_model_load_from_file(
        str(file).encode(), llama_cpp.llama_model_default_params()
    )
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max, settings.n_batch = 32 * length, 32, ROWS
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise NotImplementedError("the context was not made")
    batch = llama_cpp.llama_batch_init(ROWS, 0, 1)
    vocab = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]

    def step(rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute (request, position, token, is its logits wanted) -> next token by request."""
        batch.n_tokens = len(rows)
        for i, (request, position, token, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, request
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        return {
            request: int(
                np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocab,)).argmax()
            )
            for i, (request, _, _, wanted) in enumerate(rows)
            if wanted
        }

    def ask(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        begin, seconds = time.perf_counter(), []
        rows = [
            (request, i, token, i == len(prompt) - 1)
            for request, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
        ]
        answers: list[list[int]] = [[] for _ in prompts]
        for made in range(tokens):
            for start in range(0, len(rows), ROWS):
                for request, token in step(rows[start : start + ROWS]).items():
                    answers[request].append(token)
            seconds.append(time.perf_counter() - begin)
            rows = [
                (request, len(prompts[request]) + made, answer[-1], True)
                for request, answer in enumerate(answers)
            ]
        return answers, seconds

    return ask


def convert(folder: Path, kind: Any, file: Path) -> None:
    """Write a Llama model as GGUF, without a tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, array in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleaved(array, config["head_dim"])
        if array.ndim == 1:
            writer.add_tensor(renamed(name), array)
        else:
            data = gguf.quants.quantize(array, kind)
            writer.add_tensor(renamed(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def renamed(name: str) -> str:
    """The name of a tensor in GGUF."""
    parts = name.removesuffix(".weight").split(".")[1:]
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{NAMES['.'.join(parts[2:])]}.weight"
    return {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[0]]


def interleaved(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of queries or keys with each rotated pair side by side, as llama.cpp rotates them."""
    halves = array.reshape(-1, 2, head_dim // 2, array.shape[1])
    return halves.swapaxes(1, 2).reshape(array.shape)
