"""preprocessors.npz: `picture` uint8 [H, W, 3], and for each preprocessor of preprocessors.json,
which have the shapes of published ones with small sizes, what transformers' Pillow processors make
of it, float32 [S, S, 3]."""

import json
import re
from pathlib import Path

import numpy as np
import transformers
from make_goldens import GOLDENS

NAMES, CLOSE = ["preprocessors"], 0.0


def make(name: str, out: Path) -> None:
    """Write the file."""
    made = {"picture": np.random.default_rng(0).integers(0, 256, (23, 37, 3), np.uint8)}
    for kind, settings in json.loads((GOLDENS / "preprocessors.json").read_text()).items():
        named = settings.get("image_processor_type") or settings["feature_extractor_type"]
        pillow = re.sub("(FeatureExtractor|ImageProcessor)(Fast)?$", "ImageProcessorPil", named)
        own = {key: value for key, value in settings.items() if not key.endswith("_type")}
        processor = getattr(transformers, pillow)(**own)
        (pixels,) = processor(made["picture"], input_data_format="channels_last").pixel_values
        made[kind] = np.moveaxis(pixels, 0, -1).astype(np.float32)
    np.savez_compressed(out / "preprocessors.npz", **made)
