"""Makes tests/goldens/adapters: random adapters as peft saves them, for models of tests/goldens,
and the logits of both together.

A folder is NAME-FAMILY and holds adapter_config.json and adapter_model.safetensors, and golden.npz:
`tokens` int32 [B, T], `lengths` int32 [B] and `logits` float32 [B, T, V] (zero at padding). Needs
torch, transformers and peft: `make oracle` makes an environment.

example: python scripts/make_adapter_goldens.py --check
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from bench import arguments

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": (
        "llama",
        {
            "r": 4,
            "target_modules": [
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            ],
        },
    ),
    "dora": (
        "qwen3",
        {"r": 3, "use_dora": True, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    ),
    "fused": ("phi3", {"r": 4, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj"]}),
    "turned": (
        "gpt2",
        {"r": 4, "use_rslora": True, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_fc"]},
    ),
    "latent": (
        "deepseek_v3",
        {"r": 2, "target_modules": ["q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    ),
}
KEYS = (
    "peft_type",
    "task_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "use_rslora",
    "use_dora",
    "bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
)
CLOSE = 1e-5


def main() -> int:
    """Make the adapters, or with --check compare them; 1 if one differs."""
    parser = arguments.parser(__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; make the logits again of the adapters that are there, and compare",
    )
    args = parser.parse_args()
    wrong = []
    for name, (family, settings) in ADAPTERS.items():
        folder = GOLDENS / "adapters" / f"{name}-{family}"
        if not args.check:
            make(folder, family, settings)
        golden = np.load(folder / "golden.npz")
        values = logits(GOLDENS / family, folder, golden["tokens"], golden["lengths"])
        if np.abs(values - golden["logits"]).max() > CLOSE * golden["logits"].std():
            wrong.append(folder.name)
    print(f"differ: {', '.join(wrong)}" if wrong else f"{len(ADAPTERS)} adapters as they were")
    return 1 if wrong else 0


def make(folder: Path, family: str, settings: dict[str, Any]) -> None:
    """Write a random adapter and its logits."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(
        GOLDENS / family, attn_implementation="eager", dtype=torch.float32
    )
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(task_type="CAUSAL_LM", lora_alpha=6, init_lora_weights=False, **settings),
    )
    with tempfile.TemporaryDirectory() as temporary:
        adapted.save_pretrained(temporary)
        config = json.loads((Path(temporary) / "adapter_config.json").read_text())
        config = {key: config[key] for key in KEYS} | {"base_model_name_or_path": family}
        config["target_modules"].sort()
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        shutil.copyfile(
            Path(temporary) / "adapter_model.safetensors", folder / "adapter_model.safetensors"
        )
    base = np.load(GOLDENS / family / "golden.npz")
    arrays = {"tokens": base["tokens"], "lengths": base["lengths"]}
    values = logits(GOLDENS / family, folder, **arrays)
    np.savez_compressed(folder / "golden.npz", **arrays, logits=values)


def logits(
    model: Path, adapter: Path | None, tokens: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Logits of transformers, with an adapter loaded by peft: float32 [B, T, V], zero at
    padding."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        model, attn_implementation="eager", dtype=torch.float32
    )
    if adapter:
        loaded = peft.PeftModel.from_pretrained(loaded, adapter)
    return logits_of(loaded, tokens, lengths)


def logits_of(model: Any, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Logits of a loaded model, each row alone and unpadded: float32 [B, T, V], zero at padding."""
    import torch

    rows = []
    for row, length in zip(tokens.astype(np.int64), lengths, strict=True):
        with torch.no_grad():
            values = model.eval()(torch.tensor(row[None, :length])).logits[0].numpy()
        rows.append(np.pad(values, ((0, tokens.shape[1] - length), (0, 0))))
    return np.stack(rows).astype(np.float32)


if __name__ == "__main__":
    sys.exit(main())
