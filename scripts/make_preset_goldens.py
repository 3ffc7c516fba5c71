"""Makes tests/goldens/presets.json.gz: for every preset of configs/models the names and shapes of
the tensors that transformers has for it.

A preset becomes a config.json by maxstack's own table, and that a transformers model on the meta
device, which holds no numbers. Names are those on disk, each number in them written as #, with the
shapes that occur and how often: {"model.layers.#.mlp.experts.#.up_proj.weight": {"768x2048":
6144}}. Needs torch and transformers.

example: python scripts/make_preset_goldens.py --preset qwen3-0.6b
"""

import gzip
import json
import math
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from bench import arguments

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from maxstack.hf.families import FAMILIES  # noqa: E402
from maxstack.load import load  # noqa: E402

GOLDEN = ROOT / "tests" / "goldens" / "presets.json.gz"
DATA = {"sources": [{"kind": "synthetic", "vocab": 2}]}
# What the names of presets begin with -> model_type in config.json; the longest beginning counts.
MODEL_TYPES = {
    "code-llama": "llama",
    "deepseek-r1": "deepseek_v3",
    "deepseek-v2": "deepseek_v2",
    "deepseek-v3": "deepseek_v3",
    "dinov2": "dinov2",
    "dinov3": "dinov3_vit",
    "distilgpt2": "gpt2",
    "gemma-2-": "gemma2",
    "gemma-2b": "gemma",
    "gemma-3": "gemma3_text",
    "gemma-4": "gemma4_text",
    "gemma-7b": "gemma",
    "glm-4": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "gpt2": "gpt2",
    "kimi-k2": "deepseek_v3",
    "llama": "llama",
    "llama-4": "llama4_text",
    "ministral": "mistral",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "moonlight": "deepseek_v3",
    "olmo-2": "olmo2",
    "olmo-3": "olmo3",
    "phi": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3-235b": "qwen3_moe",
    "qwen3-30b": "qwen3_moe",
    "qwen3-coder": "qwen3_moe",
    "qwen3-next": "qwen3_next",
    "qwen3.5": "qwen3_5_text",
    "qwen3.5-122b": "qwen3_5_moe_text",
    "qwen3.5-35b": "qwen3_5_moe_text",
    "qwen3.5-397b": "qwen3_5_moe_text",
    "siglip": "siglip_vision_model",
    "smollm2": "llama",
    "smollm3": "smollm3",
    "tinyllama": "llama",
    "vit": "vit",
}


def main() -> int:
    """Make or check the presets; returns the exit code."""
    presets = (path.stem for path in (ROOT / "configs" / "models").glob("*.yml"))
    names = sorted(name for name in presets if not name.startswith("dit-"))  # of diffusers
    parser = arguments.parser(__doc__)
    parser.add_argument(
        "--preset",
        action="append",
        choices=names,
        metavar="NAME",
        help="only this one; may be repeated; the others stay",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where the file differs"
    )
    args = parser.parse_args()
    kept = json.loads(gzip.decompress(GOLDEN.read_bytes())) if GOLDEN.is_file() else {}
    made, failed = {}, []
    for name in args.preset or names:
        try:
            made[name] = golden(name)
        except Exception as error:  # the others are still made, and the exit code is 1
            failed.append(name)
            print(f"{name:24} {type(error).__name__}: {error}", flush=True)
            continue
        result = made[name]["model_type"]
        if args.check:
            result = "same" if made[name] == kept.get(name) else "differs"
        print(f"{name:24} {made[name]['parameters']:>18,} parameters  {result}", flush=True)
    if args.check:
        return 1 if failed or any(made[name] != kept.get(name) for name in made) else 0
    found = (kept | made) if args.preset else made
    found = {name: entry for name, entry in found.items() if name in names}
    GOLDEN.write_bytes(
        gzip.compress(json.dumps(found, sort_keys=True, separators=(",", ":")).encode(), mtime=0)
    )
    print(
        f"{GOLDEN.relative_to(ROOT)}: {len(found)} presets, {GOLDEN.stat().st_size:,} bytes"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def golden(name: str) -> dict[str, Any]:
    """The entry of a preset. ValueError if MODEL_TYPES names no family, or the family's table
    cannot express the model."""
    if not (starts := [start for start in MODEL_TYPES if name.startswith(start)]):
        raise ValueError(f"MODEL_TYPES in {Path(__file__).name} has no beginning of this name")
    model_type = MODEL_TYPES[max(starts, key=len)]
    family = FAMILIES[model_type]
    model = load({"model": {"preset": name}, "data": DATA}).model
    shapes = tensors(family.write(model))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for tensor, shape in shapes.items():
        counts[re.sub(r"\d+(?=\.)", "#", tensor)]["x".join(map(str, shape))] += 1
    total = sum(math.prod(shape) for shape in shapes.values())
    return {"model_type": model_type, "parameters": total, "tensors": counts}


def tensors(config_json: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names on disk and shapes of what transformers builds from a config.json."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    rest = {
        key: value
        for key, value in config_json.items()
        if key not in ("model_type", "architectures")
    }
    settings = transformers.AutoConfig.for_model(config_json["model_type"], **rest)
    with torch.device("meta"):
        (architecture,) = config_json["architectures"]
        model = getattr(transformers, architecture)(settings)
    tied = (
        set(model.all_tied_weights_keys)
        if getattr(settings, "tie_word_embeddings", False)
        else set()
    )
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return {
        name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()
    }


if __name__ == "__main__":
    sys.exit(main())
