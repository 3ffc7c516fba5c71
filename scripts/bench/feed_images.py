"""Images a second of maxstack's feed over the folder that torch_loader.py reads, with the same
changes.

example: python scripts/bench/feed_images.py photos --workers 2 --batches 20
"""

import argparse
import json
import time

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("folder")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--batches", type=int, default=20)
parser.add_argument("--size", type=int, default=224)
args = parser.parse_args()

from maxstack.data.feed import Feed  # noqa: E402
from maxstack.schema.data import DataConfig  # noqa: E402
from maxstack.schema.objective import RowField  # noqa: E402


def main() -> None:
    """Measure; worker processes import this file again."""
    cfg = DataConfig.model_validate(
        {
            "sources": [{"kind": "images", "files": [f"{args.folder}/*/*.jpg"]}],
            "seq_len": 1,
            "packing": "none",
            "workers": args.workers,
            "image": {"randaugment": {}},
        }
    )
    fields = {
        "image": RowField("batch", "uint8", (args.size, args.size, 3)),
        "label": RowField("batch", "int32"),
        "real": RowField("batch", "float32"),
    }
    feed = Feed(cfg, [*range(args.batch)], args.batch, evaluation=False, fields=fields)
    for _ in range(2):
        next(feed)
    start = time.perf_counter()
    for _ in range(args.batches):
        next(feed)
    seconds = time.perf_counter() - start
    feed.close()
    print(json.dumps({"images_per_second": args.batches * args.batch / seconds}))


if __name__ == "__main__":
    main()
