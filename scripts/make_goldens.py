"""Makes tests/goldens: for every model family of goldens.yml a tiny random transformers model, and
its logits and gradient on a few documents.

A folder holds config.json and model.safetensors as transformers writes them, and golden.npz:
`tokens` int32 [B, T] padded on the right, `lengths` int32 [B], `logits` float32 [B, T, V] (zero at
padding) and `embed_grad` float32 [V, D], the gradient of the mean negative log-likelihood of all
next tokens with respect to the embedding table (the head's share included where it is tied). Needs
torch and transformers.

example: python scripts/make_goldens.py --family gemma2 --check
"""

import filecmp
import itertools
import json
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from bench import arguments

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"
ROUNDING = 1e-4
"""Share of the deviation by which another CPU's results may differ; up to 3.4e-5 were measured."""
MAX_BYTES = 200_000
VOCAB = 128
LENGTHS = (28, 13)
"""One document beyond every window, chunk and original RoPE length of goldens.yml, and one within
the original RoPE length."""
CLEAR = 2e-3
"""Least lead of the best logit of every position, in standard deviations of the logits, so that
rounding cannot change the argmax."""

TABLE = yaml.safe_load((ROOT / "scripts" / "goldens.yml").read_text(encoding="utf-8"))
FAMILIES: dict[str, dict[str, Any]] = TABLE["families"]


def main() -> int:
    """Make or check the families; returns the exit code."""
    parser = arguments.parser(__doc__)
    parser.add_argument(
        "--family",
        action="append",
        choices=FAMILIES,
        metavar="NAME",
        help=f"only this one; may be repeated: {', '.join(FAMILIES)}",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="make them anew elsewhere and compare; write nothing; exit 1 where one differs",
    )
    args = parser.parse_args()
    try:
        import torch
        import transformers
    except ImportError as error:
        sys.exit(
            f"goldens are made by torch and transformers, and {error.name} is not "
            "installed; pip install torch transformers"
        )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    wrong, total = 0, 0
    for family in args.family or FAMILIES:
        with tempfile.TemporaryDirectory() as temporary:
            made = Path(temporary) / family
            made.mkdir()
            tensors, numbers = make(family, made)
            faults = []
            if args.check:
                faults = differences(made, GOLDENS / family)
            else:
                shutil.rmtree(GOLDENS / family, ignore_errors=True)
                shutil.copytree(made, GOLDENS / family)
            size = sum(path.stat().st_size for path in made.iterdir())
        if size > MAX_BYTES:
            faults.append(f"{size:,} bytes are more than {MAX_BYTES:,}: make it smaller")
        wrong, total = wrong + bool(faults), total + size
        result = "; ".join(faults) or ("same" if args.check else "written")
        print(
            f"{family:18} {tensors:4} tensors {numbers:7,} numbers {size / 1000:6.1f} kB {result}",
            flush=True,
        )
    print(f"{total / 1e6:.2f} MB in all" + (f"; {wrong} differ or are too large" if wrong else ""))
    return 1 if wrong else 0


def make(family: str, folder: Path) -> tuple[int, int]:
    """Write the family's files into the folder -> (tensors, numbers in them)."""
    import torch
    import transformers
    from safetensors.numpy import load_file

    settings = dict(FAMILIES[family])
    name = settings.pop("class")
    seed = zlib.crc32(family.encode())
    torch.manual_seed(seed)
    has_text_part = hasattr(transformers, f"{name}TextConfig")
    if name != "GPT2":
        settings = TABLE["dims"] | settings
    config = getattr(transformers, f"{name}{'Text' if has_text_part else ''}Config")(**settings)
    model = (
        transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
        .float()
        .eval()
    )
    perturb(model)
    real = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    for attempt in itertools.count(seed):
        tokens = np.where(
            real, np.random.default_rng(attempt).integers(3, VOCAB, real.shape), 0
        ).astype(np.int32)
        logits, grad = evaluate(model, tokens)
        best = np.sort(logits[real], axis=-1)
        if (best[:, -1] - best[:, -2]).min() > CLEAR * logits[real].std():
            break
        model.zero_grad()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(
        folder / "golden.npz",
        tokens=tokens,
        lengths=np.array(LENGTHS, np.int32),
        logits=logits,
        embed_grad=grad,
    )
    saved = load_file(folder / "model.safetensors").values()
    return len(saved), sum(tensor.size for tensor in saved)


def perturb(model: Any) -> None:
    """Add noise to every parameter and saved buffer: norms at one, biases at zero and weights too
    small to matter hide mistakes.

    Larger weights would make the deep models chaotic: rounding alone would move their logits by
    more than the tolerance of parity.
    """
    import torch

    embed = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, tensor in {
            **dict(model.named_parameters()),
            **{n: b for n, b in model.named_buffers() if n in model.state_dict()},
        }.items():
            if not tensor.is_floating_point():
                raise SystemExit(
                    f"{type(model).__name__}: {name} is {tensor.dtype}; only "
                    "floating-point tensors are known"
                )
            if tensor is embed:
                spread = 0.5
            elif tensor.ndim > 1 and tensor.shape[-1] > 1:
                spread = 0.6 * tensor.shape[-1] ** -0.5
            else:
                spread = 0.25
            tensor.add_(torch.randn(tensor.shape) * spread)


def evaluate(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B, T, V] and the gradient [V, D]. Each document runs alone and unpadded, so that
    neither padding nor other documents can matter."""
    import torch

    logits = np.zeros((*tokens.shape, VOCAB), np.float32)
    total = torch.zeros(())
    for row, length in enumerate(LENGTHS):
        ids = torch.from_numpy(tokens[row : row + 1, :length]).long()
        out = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
        ).logits.float()
        total = total + torch.nn.functional.cross_entropy(out[0, :-1], ids[0, 1:], reduction="sum")
        logits[row, :length] = out[0].detach().numpy()
    (total / sum(length - 1 for length in LENGTHS)).backward()
    grad = model.get_input_embeddings().weight.grad.numpy()
    for name, array in (("logits", logits), ("gradient", grad)):
        if not (np.isfinite(array).all() and array.any()):
            raise SystemExit(f"{type(model).__name__}: {name} are not finite or all zero")
    return logits, grad


def differences(made: Path, kept: Path) -> list[str]:
    """Differences of two folders, apart from rounding and the version of transformers."""
    from safetensors.numpy import load_file

    if not kept.is_dir():
        return [f"{os.path.relpath(kept)} is missing; run without --check"]
    names = {folder: sorted(path.name for path in folder.iterdir()) for folder in (made, kept)}
    if names[made] != names[kept]:
        return [f"files {names[kept]} instead of {names[made]}"]
    faults = []
    if without_version(made) != without_version(kept):
        faults.append("config.json differs")
    for name, load in (
        ("model.safetensors", load_file),
        ("golden.npz", lambda path: dict(np.load(path))),
    ):
        if filecmp.cmp(made / name, kept / name, shallow=False):
            continue
        new, old = load(made / name), load(kept / name)
        if new.keys() != old.keys():
            faults.append(f"{name}: tensors {sorted(new.keys() ^ old.keys())} are in one alone")
        faults += [
            f"{name}: {key} differs"
            for key in sorted(new.keys() & old.keys())
            if new[key].shape != old[key].shape
            or not np.allclose(new[key], old[key], rtol=1e-4, atol=ROUNDING * old[key].std())
        ]
    return faults


def without_version(folder: Path) -> dict[str, Any]:
    """config.json without the version that wrote it."""
    read = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in read.items() if key != "transformers_version"}


if __name__ == "__main__":
    sys.exit(main())
