"""`maxstack sample`: sample texts from a masked diffusion model, or images from a flow model."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack import strict_json
from maxstack.command import (
    ALLOW_NONFINITE,
    GUIDANCE,
    MODEL,
    OVERRIDES,
    SEED,
    SOLVER,
    TEMPERATURE,
    WEIGHTS,
    argument,
    check_writable,
    command,
    model_overrides,
    positive,
    write,
)
from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.run import Run


SETTINGS = "samples.json"
"""File in a folder of images that records their settings."""


def classes(text: str) -> list[int]:
    """Parse numbers and ranges such as `0-9,12`."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise argparse.ArgumentTypeError(f"{text!r}: give numbers and ranges, such as 0-9,12")
        found += range(int(first), int(last if dash else first) + 1)
    return found


@command(
    "sample",
    "Sample texts from a model trained with masked diffusion, or images from one trained with flow "
    "matching.",
    "sample runs/masked-diffusion --count 2 --length 256\n"
    "sample runs/dit-digits --classes 0-9 --count 100 --out digits.png",
    MODEL,
    OVERRIDES,
    argument("--count", type=positive, default=4, help="number of texts or images (default: 4)"),
    argument("--length", type=positive, help="text: length in tokens (default: data.seq_len)"),
    argument(
        "--steps",
        type=positive,
        help="number of sampling steps (default: one per token; images: 50)",
    ),
    argument(
        "--order",
        choices=("random", "confidence", "margin", "entropy"),
        default="random",
        help="text: order in which positions are filled (default: random)",
    ),
    TEMPERATURE,
    SEED,
    argument("--prompt", default="", metavar="TEXT", help="text: prefix of every sample"),
    argument(
        "--out",
        metavar="FILE",
        help='text: .jsonl file with "text" and "tokens" per line; images: .png file for a grid '
        "(default: images.png), or a folder, where an earlier sampling resumes if it had the same "
        "settings; latents: .npz file",
    ),
    argument(
        "--classes",
        type=classes,
        metavar="0-9,12",
        help="images: classes to cycle through (default: all)",
    ),
    GUIDANCE,
    SOLVER,
    WEIGHTS,
    ALLOW_NONFINITE,
)
def main(args: argparse.Namespace) -> None:
    """Sample; ConfigError for a model of another objective, or a prompt that does not fit."""
    if args.out and Path(args.out).suffix:
        check_writable("--out", args.out)
    from maxstack.inference.trained_model import assemble_model, read_weights
    from maxstack.load import run_folder

    for override in args.overrides:
        if override.startswith("objective") and run_folder(args.model):
            raise ConfigError(f"{override}: a trained model's objective cannot be changed")
    run, own = assemble_model(args.model, model_overrides(args))
    params = read_weights(args.model, run, own)
    if run.cfg.objective.kind == "flow":
        _draw(args, run, params)
    else:
        _write(args, run, params)


def _draw(args: argparse.Namespace, run: "Run", params: Any) -> None:
    """Draw images into a grid or a folder. ConfigError for classes that the model does not have."""
    import numpy as np

    from maxstack.data.images import to_image
    from maxstack.inference.images import Sampler, tile_images
    from maxstack.report.progress import progress
    from maxstack.schema.dit import DiTConfig

    model = run.cfg.model
    assert isinstance(model, DiTConfig)
    known = model.classes
    wanted = args.classes or [*range(known)]
    if max(wanted) >= known:
        raise ConfigError(
            f"--classes: {max(wanted)} is not one of the model's classes, 0 to {known - 1}"
        )
    labels = np.array([wanted[i % len(wanted)] for i in range(args.count)], np.int32)
    steps = args.steps or 50
    sampler = Sampler(run, params, steps, args.solver, args.guidance)
    out = Path(args.out or ("latents.npz" if sampler.latents else "images.png"))
    if sampler.latents != (out.suffix == ".npz"):
        kind = "latents; give a .npz" if sampler.latents else "pictures; give a .png or a folder"
        raise ConfigError(f"--out {out}: a model of {model.channels} channels makes {kind}")
    settings = {"model": str(Path(args.model).absolute()), "classes": wanted, "seed": args.seed}
    settings |= {"steps": steps, "solver": args.solver, "guidance": args.guidance}
    folder = None if out.suffix in (".png", ".npz") else out
    done = 0
    if folder:
        _claim(folder, settings)
        while done < args.count and (folder / f"{done:06}.png").exists():
            done += 1
    made = []
    with progress(args.count, "sampling", "images", done) as shown:
        for i, image in enumerate(sampler(labels[done:], done, args.seed), done):
            if folder:
                part = folder / f".{i:06}.png"
                to_image(image).save(part)
                part.rename(folder / f"{i:06}.png")
            else:
                made.append(image)
            shown.update()
    if sampler.latents:
        np.savez(out, latents=np.stack(made).astype(np.float16), label=labels)
    elif made:
        tile_images(made, len(wanted)).save(out)
    print(out)


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Create the folder, or resume in it. ConfigError if it holds images of other settings or other
    files, or cannot be created."""
    record = folder / SETTINGS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not record.exists():
            if any(folder.iterdir()):
                raise ConfigError(f"--out {folder}: holds other files; give a new folder")
            record.write_text(json.dumps(settings, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be created: {error.strerror}") from error
    before = strict_json.read_object(record)
    changed = [f"{key}={before.get(key)}" for key in settings if before.get(key) != settings[key]]
    if changed:
        raise ConfigError(
            f"--out {folder}: holds images made with {', '.join(changed)}; give another folder"
        )


def _write(args: argparse.Namespace, run: "Run", params: Any) -> None:
    """Write texts to the console or a file."""
    import numpy as np

    from maxstack.data.tokenizers import open_prompt_tokenizer
    from maxstack.inference.diffusion import sample

    shift = getattr(run.cfg.objective, "shift", False)
    # Without shift no training sequence holds BOS.
    tokenizer = open_prompt_tokenizer(run.cfg.data.tokenizer, bos=shift)
    prompt = tokenizer.encode(os.fsencode(args.prompt))
    length = args.length or run.cfg.data.seq_len
    if len(prompt) >= length:
        raise ConfigError(
            f"--prompt: has {len(prompt)} tokens, which leaves no room in --length {length}"
        )
    if shift and not len(prompt):
        raise ConfigError("--prompt: is needed with objective.shift, for the first token")
    tokens = np.zeros((args.count, length), np.int32)
    tokens[:, : len(prompt)] = prompt
    in_prompt = np.broadcast_to(np.arange(length) < len(prompt), tokens.shape)
    rows = sample(
        run,
        params,
        tokens,
        in_prompt,
        steps=args.steps or length,
        order=args.order,
        temperature=args.temperature,
        seed=args.seed,
    )
    texts = [tokenizer.decode(row).decode(errors="replace") for row in rows]
    if args.out:
        lines = [
            json.dumps({"text": text, "tokens": row.tolist()})
            for text, row in zip(texts, rows, strict=True)
        ]
        write("--out", args.out, "\n".join(lines) + "\n")
    else:
        print("\n\n".join(f"--- {i} ---\n{text}" for i, text in enumerate(texts)))
