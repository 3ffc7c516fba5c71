"""Makes tests/goldens: for every model family a tiny random transformers model, and its logits and
gradient on a few documents.

A folder holds config.json and model.safetensors as transformers writes them, and golden.npz:
`tokens` int32 [B, T] padded on the right, `lengths` int32 [B], `logits` float32 [B, T, V] (zero at
padding) and `embed_grad` float32 [V, D], the gradient of the mean negative log-likelihood of all
next tokens with respect to the embedding table (the head's share included where it is tied). Needs
torch and transformers.

example: python scripts/make_goldens.py --family gemma2 --check
"""

import argparse
import filecmp
import itertools
import json
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"
ROUNDING = 1e-4
"""Of the deviation: what another CPU may compute otherwise, measured up to 3.4e-5 between two."""
MAX_BYTES = 200_000
VOCAB = 128
LENGTHS = (28, 13)
"""One document beyond every window, chunk and original RoPE length of the table below, and one
within the original RoPE length."""
ORIGINAL = 16
CLEAR = 2e-3
"""In units of the logits' standard deviation: the best logit of every position leads by this, so
that rounding cannot change the argmax."""

DIMS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": ORIGINAL,
}
DEEPSEEK = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.8},
}
QWEN3_MOE = {
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
DELTA = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
MROPE = {
    "rope_parameters": DELTA["rope_parameters"]
    | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
}
SPARSE_DELTA = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 10,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": ORIGINAL,
}
GEMMA4 = {
    "head_dim": 4,
    "global_head_dim": 8,
    "sliding_window": 6,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
PER_LAYER = {
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}
# More than ten layers before the pattern: in the order of their names 10 stands before 2.
MANY = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 13,
    "first_k_dense_replace": 11,
    "intermediate_size": 8,
}

# Folder: config class, without TextConfig or Config, and what differs from DIMS.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 8, "rope_parameters": LLAMA3 | {"factor": 8.0}}),
    "llama_tied": (
        "Llama",
        {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": LLAMA3 | {"factor": 32.0}},
    ),
    "mistral": ("Mistral", {"head_dim": 8, "sliding_window": 6}),
    "mixtral": ("Mixtral", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE),
    "gemma": ("Gemma", {"head_dim": 8, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 8,
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCAB,
            "n_positions": 32,
            "n_embd": 16,
            "n_layer": 3,
            "n_head": 4,
            "layer_norm_epsilon": 1e-3,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,
            "rope_parameters": YARN | {"rope_theta": 15e4, "factor": 32.0, "truncate": False},
        },
    ),
    "olmo2": ("Olmo2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 6,
            "sliding_window": 6,
            "num_key_value_heads": 4,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                "full_attention": YARN | {"rope_theta": 5e5, "attention_factor": 1.2},
            },
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        DEEPSEEK
        | {"q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0}
        | MANY,
    ),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK | {"n_group": 4, "topk_group": 2}),
    "kimi_k2": ("DeepseekV3", DEEPSEEK | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 6,
            "head_dim": 8,
            "intermediate_size": 8,
            "intermediate_size_mlp": 24,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "floor_scale": 8,
            "attn_scale": 0.4,
            "rope_parameters": LLAMA3 | {"factor": 8.0},
        },
    ),
    "phi3": (
        "Phi3",
        {"rope_parameters": LONGROPE | {"short_factor": [1.0, 1.3], "long_factor": [2.5, 5.0]}},
    ),
    "phi4_mini": (
        "Phi3",
        {
            "hidden_size": 32,
            "tie_word_embeddings": True,
            "rope_parameters": LONGROPE
            | {
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.2, 1.4],
                "long_factor": [1.5, 3.0, 6.0],
            },
        },
    ),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 8,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "qwen3_next": ("Qwen3Next", DELTA | SPARSE_DELTA),
    "qwen3_5": ("Qwen3_5", DELTA | MROPE),
    "qwen3_5_moe": ("Qwen3_5Moe", DELTA | MROPE | SPARSE_DELTA),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4_moe": (
        "Gemma4",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 8,
        },
    ),
    "gemma4_per_layer": ("Gemma4", GEMMA4 | PER_LAYER),
}


def main() -> int:
    """Makes or checks the families asked for; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--family",
        action="append",
        choices=FAMILIES,
        metavar="NAME",
        help=f"only this one; may be repeated: {', '.join(FAMILIES)}",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="make them anew elsewhere and compare; write nothing; exit 1 where one differs",
    )
    args = parser.parse_args()
    try:
        import torch
        import transformers
    except ImportError as error:
        sys.exit(
            f"goldens are made by torch and transformers, and {error.name} is not "
            "installed; pip install torch transformers"
        )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    wrong, total = 0, 0
    for family in args.family or FAMILIES:
        with tempfile.TemporaryDirectory() as made:
            tensors, numbers = make(family, Path(made))
            faults = differences(Path(made), GOLDENS / family) if args.check else []
            if not args.check:
                replace(Path(made), GOLDENS / family)
            size = sum(path.stat().st_size for path in Path(made).iterdir())
        faults += (
            [f"{size:,} bytes are more than {MAX_BYTES:,}: make it smaller"]
            if size > MAX_BYTES
            else []
        )
        wrong, total = wrong + bool(faults), total + size
        said = "; ".join(faults) or ("same" if args.check else "written")
        print(
            f"{family:18} {tensors:4} tensors {numbers:7,} numbers {size / 1000:6.1f} kB {said}",
            flush=True,
        )
    print(f"{total / 1e6:.2f} MB in all" + (f"; {wrong} differ or are too large" if wrong else ""))
    return 1 if wrong else 0


def make(family: str, folder: Path) -> tuple[int, int]:
    """Writes the family's files into the folder -> (tensors, numbers in them)."""
    import torch
    import transformers
    from safetensors.numpy import load_file

    name, changes = FAMILIES[family]
    seed = zlib.crc32(family.encode())
    torch.manual_seed(seed)
    has_text_part = hasattr(transformers, f"{name}TextConfig")
    config = getattr(transformers, f"{name}{'Text' if has_text_part else ''}Config")(
        **(changes if name == "GPT2" else DIMS | changes)
    )
    model = (
        transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
        .float()
        .eval()
    )
    perturb(model)
    real = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    for attempt in itertools.count(seed):
        tokens = np.where(
            real, np.random.default_rng(attempt).integers(3, VOCAB, real.shape), 0
        ).astype(np.int32)
        logits, grad = evaluate(model, tokens)
        best = np.sort(logits[real], axis=-1)
        if (best[:, -1] - best[:, -2]).min() > CLEAR * logits[real].std():
            break
        model.zero_grad()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(
        folder / "golden.npz",
        tokens=tokens,
        lengths=np.array(LENGTHS, np.int32),
        logits=logits,
        embed_grad=grad,
    )
    saved = load_file(folder / "model.safetensors").values()
    return len(saved), sum(tensor.size for tensor in saved)


def perturb(model: Any) -> None:
    """Noise on every parameter and saved buffer: norms at one and biases at zero hide mistakes, and
    so do weights too small to matter.

    Larger weights would make the deep models chaotic: rounding alone would move their logits by
    more than the tolerance of parity.
    """
    import torch

    embed = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, tensor in {
            **dict(model.named_parameters()),
            **{n: b for n, b in model.named_buffers() if n in model.state_dict()},
        }.items():
            if not tensor.is_floating_point():
                raise SystemExit(
                    f"{type(model).__name__}: {name} is {tensor.dtype}; only "
                    "floating-point tensors are known"
                )
            spread = (
                0.5
                if tensor is embed
                else 0.6 * tensor.shape[-1] ** -0.5
                if tensor.ndim > 1 and tensor.shape[-1] > 1
                else 0.25
            )
            tensor.add_(torch.randn(tensor.shape) * spread)


def evaluate(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B, T, V] and the gradient [V, D]: each document runs alone and unpadded, so that
    neither padding nor its neighbours can matter."""
    import torch

    logits = np.zeros((*tokens.shape, VOCAB), np.float32)
    total = torch.zeros(())
    for row, length in enumerate(LENGTHS):
        ids = torch.from_numpy(tokens[row : row + 1, :length]).long()
        out = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
        ).logits.float()
        total = total + torch.nn.functional.cross_entropy(out[0, :-1], ids[0, 1:], reduction="sum")
        logits[row, :length] = out[0].detach().numpy()
    (total / sum(length - 1 for length in LENGTHS)).backward()
    grad = model.get_input_embeddings().weight.grad.numpy()
    for name, array in (("logits", logits), ("gradient", grad)):
        if not (np.isfinite(array).all() and array.any()):
            raise SystemExit(f"{type(model).__name__}: {name} are not finite or all zero")
    return logits, grad


def replace(made: Path, folder: Path) -> None:
    """Puts the files that were made in the folder's place."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for path in sorted(made.iterdir()):
        (folder / path.name).write_bytes(path.read_bytes())


def differences(made: Path, kept: Path) -> list[str]:
    """What is not the same in two folders, up to rounding and the version of transformers."""
    from safetensors.numpy import load_file

    if not kept.is_dir():
        return [f"{os.path.relpath(kept)} is missing; run without --check"]
    names = {folder: sorted(path.name for path in folder.iterdir()) for folder in (made, kept)}
    if names[made] != names[kept]:
        return [f"files {names[kept]} instead of {names[made]}"]
    faults = []
    if without_version(made) != without_version(kept):
        faults.append("config.json differs")
    for name, load in (
        ("model.safetensors", load_file),
        ("golden.npz", lambda path: dict(np.load(path))),
    ):
        if filecmp.cmp(made / name, kept / name, shallow=False):
            continue
        new, old = load(made / name), load(kept / name)
        if new.keys() != old.keys():
            faults.append(f"{name}: tensors {sorted(new.keys() ^ old.keys())} are in one alone")
        faults += [
            f"{name}: {key} differs"
            for key in sorted(new.keys() & old.keys())
            if new[key].shape != old[key].shape
            or not np.allclose(new[key], old[key], rtol=1e-4, atol=ROUNDING * old[key].std())
        ]
    return faults


def without_version(folder: Path) -> dict[str, Any]:
    """config.json without the version that wrote it."""
    read = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in read.items() if key != "transformers_version"}


if __name__ == "__main__":
    sys.exit(main())
