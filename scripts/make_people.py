"""Writes made-up conversations, preferences, labelled answers and questions about made-up people,
on which the recipes of post-training learn, as JSON lines: chat.jsonl, pairs.jsonl, labelled.jsonl
and prompts.jsonl.

example: python scripts/make_people.py --out people --records 2000
"""

import json
import sys
from pathlib import Path

from bench import arguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maxstack.data import people  # noqa: E402

KINDS = {
    "chat": people.chat,
    "pairs": people.pairs,
    "labelled": people.labelled,
    "prompts": people.prompts,
}


def main() -> None:
    """Write the files."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder, made where it lacks")
    parser.add_argument("--records", type=int, default=2000, help="of each kind (default: 2000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: 0)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for kind, make in KINDS.items():
        with (args.out / f"{kind}.jsonl").open("w", encoding="utf-8") as file:
            for index in range(args.first, args.first + args.records):
                file.write(json.dumps(make(index)) + "\n")


if __name__ == "__main__":
    main()
