"""adapters/ and tables/: random adapters as peft saves them, for models of tests/goldens, and the
logits of both together; those of tables/ have an embedding or a head beside them.

A folder is NAME-FAMILY and holds adapter_config.json, adapter_model.safetensors and golden.npz:
`tokens` int32 [B, T], `lengths` int32 [B] and `logits` float32 [B, T, V] (zero at padding). An
adapter that is there stays, since peft's random numbers change; delete its folder for another.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from make_goldens import GOLDENS, TABLE
from transformers import AutoModelForCausalLM

NAMES = [*TABLE["adapters"], *TABLE["tables"]]
KEYS = (
    "peft_type task_type r lora_alpha lora_dropout target_modules use_rslora use_dora bias "
    "fan_in_fan_out rank_pattern alpha_pattern modules_to_save trainable_token_indices"
).split()
"""Kept of adapter_config.json."""
CLOSE = 2.5e-6


def make(name: str, out: Path) -> None:
    """Write an adapter's folder."""
    kind = "adapters" if name in TABLE["adapters"] else "tables"
    entry = TABLE[kind][name]
    family, vocab = entry["model"], entry.get("vocab")
    kept, folder = (root / kind / f"{name}-{family}" for root in (GOLDENS, out))
    arrays = dict(np.load(GOLDENS / family / "golden.npz"))
    if kept.exists():
        shutil.copytree(kept, folder)
        arrays = dict(np.load(kept / "golden.npz"))
    else:
        draw(folder, family, entry["lora"], vocab)
        if kind == "tables":
            tokens = [[3, 100, 5, 7, 9, (vocab or 128) - 1, *range(20, 26)]]
            arrays = {"tokens": np.array(tokens, np.int32), "lengths": np.array([12], np.int32)}
    given = {key: arrays[key] for key in ("tokens", "lengths")}
    values = logits(GOLDENS / family, folder, **given, vocab=vocab)
    np.savez_compressed(folder / "golden.npz", **given, logits=values)


def draw(folder: Path, family: str, settings: dict[str, Any], vocab: int | None) -> None:
    """Write a random adapter for a base of `vocab` tokens."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(
        GOLDENS / family, attn_implementation="eager", dtype=torch.float32
    )
    if vocab:
        model.resize_token_embeddings(vocab, mean_resizing=False)
    given = {"r": 2, "target_modules": ["q_proj"], "lora_alpha": 6, **settings}
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **given)
    )
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name or "trainable_tokens" in name:
            parameter.data += torch.randn_like(parameter)
    with tempfile.TemporaryDirectory() as temporary:
        adapted.save_pretrained(temporary)
        config = json.loads((Path(temporary) / "adapter_config.json").read_text())
        config = {key: config[key] for key in KEYS} | {"base_model_name_or_path": family}
        config["target_modules"].sort()
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        shutil.copy(Path(temporary) / "adapter_model.safetensors", folder)


def logits(
    model: Path,
    adapter: Path | None,
    tokens: np.ndarray,
    lengths: np.ndarray,
    vocab: int | None = None,
) -> np.ndarray:
    """Logits of transformers, with an adapter loaded by peft, onto a base of `vocab` tokens:
    float32 [B, T, V], zero at padding."""
    loaded = AutoModelForCausalLM.from_pretrained(
        model, attn_implementation="eager", dtype=torch.float32
    )
    if vocab:
        loaded.resize_token_embeddings(vocab)
    if adapter:
        loaded = peft.PeftModel.from_pretrained(loaded, adapter)
    return logits_of(loaded, tokens, lengths)


def logits_of(model: Any, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Logits of a loaded model, each row alone and unpadded: float32 [B, T, V], zero at padding."""
    rows = []
    for row, length in zip(tokens.astype(np.int64), lengths, strict=True):
        with torch.no_grad():
            values = model.eval()(torch.tensor(row[None, :length])).logits[0].numpy()
        rows.append(np.pad(values, ((0, tokens.shape[1] - length), (0, 0))))
    return np.stack(rows).astype(np.float32)
