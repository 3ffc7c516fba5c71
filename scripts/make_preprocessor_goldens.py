"""Makes tests/goldens/preprocessors.npz: `picture` uint8 [H, W, 3], and for each preprocessor of
tests/goldens/preprocessors.json, which have the shapes of published ones with small sizes, what
transformers' Pillow processors make of it, float32 [S, S, 3]. Needs transformers.

example: python scripts/make_preprocessor_goldens.py
"""

import json
import re
from pathlib import Path

import numpy as np
from bench import arguments

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"


def main() -> None:
    """Write the file."""
    arguments.parser(__doc__).parse_args()
    import transformers

    made = {"picture": np.random.default_rng(0).integers(0, 256, (23, 37, 3), np.uint8)}
    for name, said in json.loads((GOLDENS / "preprocessors.json").read_text()).items():
        kind = said.get("image_processor_type") or said["feature_extractor_type"]
        kind = re.sub("(FeatureExtractor|ImageProcessor)(Fast)?$", "ImageProcessorPil", kind)
        own = {key: value for key, value in said.items() if not key.endswith("_type")}
        processor = getattr(transformers, kind)(**own)
        (pixels,) = processor(made["picture"], input_data_format="channels_last").pixel_values
        made[name] = np.moveaxis(pixels, 0, -1).astype(np.float32)
    np.savez_compressed(GOLDENS / "preprocessors.npz", **made)


if __name__ == "__main__":
    main()
