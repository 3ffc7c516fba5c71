"""presets.json.gz: for every preset of configs/models the names and shapes of the tensors that
transformers has for it.

A preset becomes a config.json by maxstack's own table, and that a transformers model on the meta
device, which holds no numbers. Names are those on disk, each number in them written as #, with the
shapes that occur and how often: {"model.layers.#.mlp.experts.#.up_proj.weight": {"768x2048":
6144}}. Presets are made one at a time, and the others stay; the family of a new one is that of the
preset whose name begins most alike.
"""

import gzip
import json
import math
import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers
from make_goldens import GOLDENS, ROOT
from transformers.core_model_loading import revert_weight_conversion

from maxstack.hf.families import FAMILIES
from maxstack.load import load

PRESETS = (path.stem for path in (ROOT / "configs" / "models").glob("*.yml"))
NAMES = sorted(name for name in PRESETS if not name.startswith("dit-"))  # those are of diffusers
CLOSE = 0.0
FILE = "presets.json.gz"
DATA = {"sources": [{"kind": "synthetic", "vocab": 2}]}


def make(name: str, out: Path) -> None:
    """Write the file with a new entry for one preset."""
    kept = GOLDENS / FILE
    found = json.loads(gzip.decompress(kept.read_bytes())) if kept.is_file() else {}
    found = {preset: entry for preset, entry in found.items() if preset in NAMES}
    near = max(found, key=lambda other: len(os.path.commonprefix([name, other])))
    found[name] = golden(name, found[near]["model_type"])
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    (out / FILE).write_bytes(gzip.compress(text.encode(), mtime=0))


def golden(name: str, model_type: str) -> dict[str, Any]:
    """The entry of a preset. ValueError if the family's table cannot express the model."""
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
