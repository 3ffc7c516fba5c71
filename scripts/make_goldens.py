"""Make the goldens of tests/goldens with the libraries that maxstack is held to, or check them.

families       tiny random models of transformers: weights, logits, a gradient, greedy answers
vision         the same for image models of transformers and diffusers
adapters       adapters of peft on these models, and the logits of both together
presets        names and shapes of the tensors of each preset of configs/models
absent         what transformers reads where a key of config.json is absent
preprocessors  a picture as transformers' image processors see it
low_bits       matrices packed by bitsandbytes and compressed-tensors
tiktoken_ids   token ids of tiktoken by the patterns of Kimi K2, Qwen 1 and Llama 3
tasks          results of lm-evaluation-harness (needs lm_eval)
smollm2        answers, perplexity and adapter losses of a published model, from its GGUF file
trl            values and gradients of TRL's losses

`make oracle` makes the environment that they need. Each is a module of scripts/golden, which
describes its files.

example: python scripts/make_goldens.py families --only gemma2 --check
         python scripts/make_goldens.py absent low_bits trl --check
"""

import gzip
import importlib
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from bench import arguments

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
GOLDENS = ROOT / "tests" / "goldens"
MODULES = [path.stem for path in sorted((ROOT / "scripts" / "golden").glob("[a-z]*.py"))]
SETS = [name for name in MODULES if not name.startswith("trl_")]
TABLE = yaml.safe_load((ROOT / "scripts" / "goldens.yml").read_text(encoding="utf-8"))
"""The models and settings of all sets."""
MAX_BYTES = 200_000
VERSIONS = "transformers_version", "trl", "torch"
"""Keys of JSON files that differ between installations."""


def main() -> int:
    """Make or check; 1 if a file differs or is too large."""
    parser = arguments.parser(__doc__)
    parser.add_argument("set", nargs="+", choices=SETS, metavar="SET", help=", ".join(SETS))
    parser.add_argument("--only", action="append", metavar="NAME", help="one of the set's models")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a file would differ"
    )
    args = parser.parse_args()
    wrong = 0
    for name in args.set:
        module = importlib.import_module(f"golden.{name}")
        for item in args.only or module.NAMES:
            with tempfile.TemporaryDirectory() as temporary:
                made = Path(temporary)
                module.make(item, made)
                faults = differences(made, module.CLOSE) if args.check else keep(made)
            print(f"{name} {item}: {'; '.join(faults) or 'ok'}", flush=True)
            wrong += bool(faults)
    return 1 if wrong else 0


def files(made: Path) -> list[Path]:
    """The files that a set wrote, relative to tests/goldens."""
    return sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())


def keep(made: Path) -> list[str]:
    """Replace the kept files; faults if there are too many bytes."""
    if (size := sum((made / file).stat().st_size for file in files(made))) > MAX_BYTES:
        return [f"{size:,} bytes are more than {MAX_BYTES:,}; make the model smaller"]
    for folder in {file.parent for file in files(made)} - {Path()}:
        shutil.rmtree(GOLDENS / folder, ignore_errors=True)
    shutil.copytree(made, GOLDENS, dirs_exist_ok=True)
    return []


def differences(made: Path, close: float) -> list[str]:
    """How the kept files differ from new ones, by more than `close` of an array's deviation."""
    faults = []
    for file in files(made):
        if not (GOLDENS / file).is_file():
            faults.append(f"{file} is missing; run without --check")
        elif not same(read(made / file), read(GOLDENS / file), close):
            faults.append(f"{file} differs")
    for folder in {file.parent for file in files(made)} - {Path()}:
        names = {path.name for path in (GOLDENS / folder).glob("*")}
        if extra := names - {path.name for path in (made / folder).iterdir()}:
            faults.append(f"{folder} has files that are made no more: {', '.join(sorted(extra))}")
    return faults


def read(path: Path) -> Any:
    """The contents of a file as arrays or JSON; else its bytes."""
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        return load_file(path)
    if path.suffix in (".json", ".gz"):
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return path.read_bytes()


def same(new: Any, old: Any, close: float) -> bool:
    """Whether two values are equal, apart from rounding and versions."""
    if isinstance(new, dict):
        kept = new.keys() - VERSIONS
        return kept == old.keys() - VERSIONS and all(same(new[k], old[k], close) for k in kept)
    if isinstance(new, list):
        return len(new) == len(old) and all(map(same, new, old, [close] * len(new)))
    if isinstance(new, float):
        return math.isclose(new, old, rel_tol=close)
    if not isinstance(new, np.ndarray):
        return new == old
    if new.shape != old.shape or not np.issubdtype(old.dtype, np.inexact):
        return np.array_equal(new, old)
    return np.allclose(new, old, rtol=close, atol=close * float(old.std()))


if __name__ == "__main__":
    sys.exit(main())
