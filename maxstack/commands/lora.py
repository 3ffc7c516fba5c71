"""`maxstack lora`: export adapters in PEFT's format from runs, and merge them into model folders or
out of them."""

import functools
from argparse import Namespace
from pathlib import Path

from maxstack.command import ALLOW_NONFINITE, WEIGHTS, argument, command, group
from maxstack.commands.convert import ARCHITECTURE, CHECKPOINT, OUT_FOLDER
from maxstack.errors import ConfigError

MERGING = (
    argument(
        "model",
        metavar="FOLDER",
        help="Hugging Face model folder, or Org/Name on the hub",
    ),
    argument("--adapter", required=True, metavar="FOLDER", help="adapter in PEFT's format"),
    ALLOW_NONFINITE,
    OUT_FOLDER,
)


@command(
    "lora export",
    "Export the adapter that a run has trained, in PEFT's format.",
    "lora export runs/tuned --out ./adapter",
    CHECKPOINT,
    argument(
        "--base",
        metavar="NAME",
        help="base model named in adapter_config.json (default: the folder that the run started "
        "from)",
    ),
    ARCHITECTURE,
    OUT_FOLDER,
    WEIGHTS,
    on_cpu=True,
)
def export(args: Namespace) -> None:
    """Write the adapter of a checkpoint, with embedding and head where they are trained or have
    more rows than those of the folder that the run started from. ConfigError for a run without
    lora."""
    from maxstack.checkpoint.weights import with_newest_step

    with_newest_step(args.run, functools.partial(_export, args))


def _export(args: Namespace, step: Path) -> None:
    import numpy as np

    from maxstack.checkpoint.weights import WeightsReader
    from maxstack.convert import configured, source_of
    from maxstack.hf import peft
    from maxstack.hf.binding import bind
    from maxstack.hf.export import choose_family
    from maxstack.hf.folder import Folder
    from maxstack.hf.writer import new_folder
    from maxstack.models.model import weights_of
    from maxstack.schema.config import Config
    from maxstack.weights.rewrite import Rewrite

    reader = WeightsReader(step)
    cfg = Config.model_validate(configured(args.run, reader))
    chosen = reader.choose(args.weights or "evaluated", cfg.optimizer.ema)
    if cfg.lora is None:
        raise ConfigError(
            f"{args.run}: was trained without lora, so it has no adapter; use maxstack export for "
            "its weights"
        )
    source = source_of(args.run, cfg.model)
    settings = Folder(source, weights=False).config if source else {}
    architecture = args.architecture or (settings.get("architectures") or [None])[0]
    rewrite = Rewrite(cfg)
    if odd := sorted(rewrite.saved - {"embed", "head"}):
        raise ConfigError(
            f"{args.run}: {', '.join(odd)} is trained in full beside the adapter, which PEFT "
            "cannot name without matching other weights; use maxstack export for the merged model"
        )
    family, _ = choose_family(cfg.model, architecture, must=args.architecture is not None)
    shapes = {path: leaf.shape for path, leaf in weights_of(cfg.model).items()}
    tables = {*rewrite.saved}
    rows = shapes.get("embed", (0,))[0]
    if rows > (settings.get("vocab_size") or rows):
        tables |= {"embed", "head"} & shapes.keys()
    try:
        bound = bind(family, cfg.model, shapes)
    except ValueError as error:
        raise ConfigError(f"cannot be exported: {error}") from error

    def base(path: str) -> np.ndarray:
        return np.asarray(rewrite.base_weight(path, reader.under(path)))

    adapted = {path: spec.contract for path, spec in rewrite.adapted.items()}
    with new_folder(args.out) as folder:
        count = peft.write(
            folder,
            cfg.lora,
            adapted,
            bound,
            reader.read,
            base,
            args.base or cfg.model.weights,
            tables,
        )
    notes = f" and {', '.join(sorted(tables))} in full" if tables else ""
    notes += f" of {family.architecture}"
    if chosen:
        notes += f", {chosen}"
    print(f"{args.run} step {reader.step} -> {args.out}: adapters of {count} modules{notes}")


@command(
    "lora merge",
    "Merge an adapter into a model folder, and write the result to a new folder.",
    "lora merge ./Qwen3-0.6B --adapter ./adapter --out ./merged",
    *MERGING,
    on_cpu=True,
)
def merge(args: Namespace) -> None:
    """Merge the adapter."""
    count = _merge(args, 1)
    print(f"{args.out}: {args.adapter} merged into {count} tensors of {args.model}")


@command(
    "lora unmerge",
    "Subtract an adapter from a merged model folder, and write the result to a new folder.",
    "lora unmerge ./merged --adapter ./adapter --out ./plain",
    *MERGING,
    on_cpu=True,
)
def unmerge(args: Namespace) -> None:
    """Subtract the adapter again."""
    count = _merge(args, -1)
    print(f"{args.out}: {args.adapter} subtracted from {count} tensors of {args.model}")


def _merge(args: Namespace, sign: int) -> int:
    """Add or subtract the adapter; return the number of tensors that it changes."""
    from tqdm import tqdm

    from maxstack.hf.adapter import Adapter
    from maxstack.hf.merge import merge

    finite = not args.allow_nonfinite
    with tqdm(unit="B", unit_scale=True, desc="writing", disable=None) as bar:
        adapter = Adapter(args.adapter, finite=finite)
        return merge(args.model, adapter, args.out, sign, bar.update, finite)


main = group(
    "lora",
    "Export, merge and unmerge adapters in PEFT's format (adapter_config.json and safetensors).",
    "lora export runs/tuned --out ./adapter\n"
    "lora merge ./Qwen3-0.6B --adapter ./adapter --out ./merged",
    export,
    merge,
    unmerge,
)
