"""Images a second of torch's DataLoader over a folder of JPEG files: Pillow, a random part of
inception's kind resized to 224 pixels, a mirror, and two changes of RandAugment's kind, by the same
functions as maxstack's feed; only what loads and collates differs.

Needs torch==2.13.0 (CPU build).
example: python scripts/bench/torch_loader.py photos --workers 2 --batches 20
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import feeding  # noqa: E402

from maxstack.data.images import opened, pixels_of  # noqa: E402
from maxstack.schema.data import ImageConfig  # noqa: E402

args = feeding.parser(__doc__).parse_args()

import torch  # noqa: E402

CHANGES = ImageConfig.model_validate({"randaugment": {}})


class Pictures(torch.utils.data.Dataset[Any]):
    """Pictures of a folder, changed as in training."""

    def __init__(self) -> None:
        self.paths = sorted(args.folder.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        picture = opened(self.paths[index].read_bytes(), 3)
        random = np.random.Generator(np.random.PCG64(index))
        return pixels_of(picture, (args.size, args.size, 3), CHANGES, random), index % 10


def forever(loader: Any) -> Any:
    """Batches of epoch after epoch."""
    while True:
        yield from loader


torch.set_num_threads(1)
loader = forever(
    torch.utils.data.DataLoader(
        Pictures(),
        args.batch,
        shuffle=True,
        num_workers=args.workers,
        drop_last=True,
        persistent_workers=args.workers > 0,
    )
)
feeding.measure(lambda: next(loader), args)
