"""Images a second of maxstack's feed over the folder that torch_loader.py reads, with the same
changes.

example: python scripts/bench/feed_images.py photos --workers 2 --batches 20
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import feeding  # noqa: E402

args = feeding.parser(__doc__).parse_args()

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
    feeding.measure(lambda: next(feed), args)
    feed.close()


if __name__ == "__main__":
    main()
