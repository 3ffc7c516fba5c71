"""Compare maxstack with other libraries; print what differs, and write the tables of the docs.

language       model families with transformers: logits, gradients, folders read and written;
               adapters with peft; tokenizers (docs/MODELS.md)
images         image models with transformers and diffusers
post_training  the losses of ten steps with TRL's trainers; answers and rewards of exported
               models (docs/POSTTRAINING.md)

`make oracle` makes the environment that they need, and checks the goldens first.

example: python scripts/oracle.py                              all of it
         python scripts/oracle.py language --only llama gemma2
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from bench import arguments

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]
os.environ["JAX_PLATFORMS"] = "cpu"
PARTS = "language", "images", "post_training"
BEGIN, END = "<!-- written by make oracle -->", "<!-- end -->"


def main() -> int:
    """Compare; 1 if something is not at par."""
    parser = arguments.parser(__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, help="(default: all)")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these of a part; the docs stay as they are"
    )
    args = parser.parse_args()
    bad = []
    for part in [args.part] if args.part else PARTS:
        bad += importlib.import_module(f"oracles.{part}").compare(args.only)
    if bad:
        print(f"not at par: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def report(lines: list[str], page: str | None) -> None:
    """Print a table, and write it into a page of the docs if one is given."""
    text = "\n".join(lines)
    print(text)
    if page:
        arguments.write_block(ROOT / "docs" / page, BEGIN, END, text)


def maxstack(*words: object) -> None:
    """Run a command of maxstack silently; it must succeed."""
    command = [sys.executable, "-m", "maxstack.cli", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def same_tensors(folder: Path, out: Path) -> bool:
    """Whether two model folders hold the same tensors, bit for bit."""
    from safetensors.numpy import load_file

    ours, theirs = (load_file(next(path.glob("*.safetensors"))) for path in (out, folder))
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and np.array_equal(ours[name], theirs[name])
        for name in theirs
    )


if __name__ == "__main__":
    sys.exit(main())
