"""A vision transformer's training step as a PyTorch user would run it: transformers'
ViTForImageClassification on the CPU in float32, SGD, images of 224 pixels.

Needs torch==2.13.0 (CPU build) and transformers 5.x, in a venv of its own.
example: python scripts/bench/torch_vit.py vit-ti16 --batch 32 --steps 8 --compile
"""

import argparse
import json
import time

SIZES = {"vit-ti16": (192, 3), "vit-s16": (384, 6), "vit-b16": (768, 12)}
"""Width and heads."""

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("model", choices=SIZES)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--size", type=int, default=224)
parser.add_argument("--compile", action="store_true", help="through torch.compile")
args = parser.parse_args()

import torch  # noqa: E402
from transformers import ViTConfig, ViTForImageClassification  # noqa: E402

torch.manual_seed(0)
width, heads = SIZES[args.model]
model = ViTForImageClassification(
    ViTConfig(
        hidden_size=width,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=args.size,
        num_labels=1000,
    )
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
step_of = torch.compile(model) if args.compile else model
pixels = torch.randn(args.batch, 3, args.size, args.size)
labels = torch.randint(0, 1000, (args.batch,))
seconds = []
for _ in range(args.steps):
    start = time.perf_counter()
    loss = step_of(pixel_values=pixels, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.perf_counter() - start)
median = sorted(seconds[1:])[len(seconds[1:]) // 2]
print(json.dumps({"images_per_second": args.batch / median, "loss": loss.item()}))
