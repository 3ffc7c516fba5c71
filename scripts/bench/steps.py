"""MB/s on a core of each kind of data.steps, over files of text cut into documents.

example: python scripts/bench/steps.py docs/DATA.md --megabytes 5
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import arguments  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

from maxstack.data.steps.duplicates import signatures  # noqa: E402
from maxstack.data.steps.kinds import found, opened  # noqa: E402
from maxstack.schema.steps import GLOBAL, AnyStep  # noqa: E402

WHOLE = {"duplicate_lines": 1.0, "duplicate_paragraphs": 1.0, "duplicate_line_characters": 1.0}
"""Bounds that let the rules after them run over texts that repeat lines."""
STEPS = (
    {"kind": "normalize"},
    {"kind": "normalize", "ftfy": True},
    {"kind": "language", "languages": ["en"], "min_confidence": 0.0},
    {"kind": "length", "min": 1},
    {"kind": "regex", "pattern": "lorem ipsum"},
    {"kind": "gopher_quality"},
    {"kind": "gopher_repetition", **WHOLE},
    {"kind": "c4"},
    {"kind": "exact_duplicates"},
    {"kind": "near_duplicates"},
    {"kind": "decontaminate", "files": ["README.md"]},
    {"kind": "pii"},
)


def texts_of(args: argparse.Namespace) -> list[str]:
    """Documents of 4,000 characters, again and again until there are enough."""
    whole = "".join(Path(path).read_text(encoding="utf-8") for path in args.files)
    cut = [whole[at : at + 4000] for at in range(0, len(whole), 4000)]
    return cut * max(1, round(args.megabytes * 1e6 / len(whole)))


def main() -> None:
    """Measure."""
    parser = arguments.parser(__doc__)
    parser.add_argument("files", nargs="+", help="files of text")
    parser.add_argument("--megabytes", type=float, default=5)
    args = parser.parse_args()
    texts = texts_of(args)
    size = sum(len(text.encode()) for text in texts) / 1e6
    for keys in STEPS:
        section = TypeAdapter(AnyStep).validate_python(keys)
        if isinstance(section, GLOBAL):
            began = time.process_time()
            for at in range(0, len(texts), 256):
                signatures(section, texts[at : at + 256])
        else:
            step = opened([section], found([section], {}))[0]
            step(texts[0])
            began = time.process_time()
            for text in texts:
                step(text)
        seconds = time.process_time() - began
        print(
            f"{' '.join(f'{key}={value}' for key, value in keys.items()):70} {size / seconds:8.1f}"
        )


if __name__ == "__main__":
    main()
