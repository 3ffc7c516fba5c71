"""`maxstack lora`: adapters in PEFT's format out of runs, and into or out of model folders."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from maxstack import cli
from maxstack.config import ConfigError


def main(argv: Sequence[str]) -> int:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(
        prog="maxstack lora",
        description="Adapters in PEFT's format (adapter_config.json and safetensors).",
        epilog="example: maxstack lora export runs/tuned --out ./adapter && maxstack lora merge "
        "./Qwen3-0.6B --adapter ./adapter --out ./merged",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    export = commands.add_parser(
        "export",
        help="the adapter of a run",
        description="The adapter that a run has trained, as peft loads it.",
    )
    export.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="a run's folder (its newest checkpoint), or one step inside",
    )
    export.add_argument(
        "--base",
        metavar="NAME",
        help="what adapter_config.json says of the base (default: the folder that the run "
        "began from)",
    )
    export.add_argument(
        "--architecture",
        metavar="NAME",
        help="the class of transformers to write for (default: the one that fits)",
    )
    for name, words in (
        ("merge", "a model folder with an adapter merged into it"),
        ("unmerge", "a merged model folder without it again"),
    ):
        command = commands.add_parser(name, help=words, description=f"Make {words}.")
        command.add_argument(
            "model",
            metavar="FOLDER",
            help="a Hugging Face model folder, or a model of the hub, Org/Name",
        )
        command.add_argument(
            "--adapter", required=True, metavar="FOLDER", type=Path, help="in PEFT's format"
        )
        cli.takes_weights(command)
    for command in commands.choices.values():
        command.add_argument(
            "--out", required=True, metavar="FOLDER", type=Path, help="the folder to make"
        )
    args = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return (
        _export(args)
        if args.command == "export"
        else _merge(args, -1 if args.command == "unmerge" else 1)
    )


def _export(args: argparse.Namespace) -> int:
    import numpy as np
    from flax import nnx

    from maxstack.checkpoint.weights import WeightsReader
    from maxstack.commands.convert import configured, source_of
    from maxstack.hf import peft
    from maxstack.hf.binding import bind
    from maxstack.hf.exported import choose
    from maxstack.hf.writer import new_folder
    from maxstack.models import decoder
    from maxstack.schema.config import Config
    from maxstack.weights.rewrite import Treatment

    reader = WeightsReader(args.run)
    cfg = Config.model_validate(configured(args.run, reader))
    if cfg.lora is None:
        raise ConfigError(
            f"{args.run}: was trained without lora, so it has no adapter; maxstack "
            "export gives its weights"
        )
    source = source_of(args.run, cfg.model)
    known = (
        json.loads((source / "config.json").read_text()).get("architectures", [None])[0]
        if source
        else None
    )
    treatment, family = (
        Treatment(cfg),
        choose(cfg.model, args.architecture or known, args.architecture is not None)[0],
    )
    plain = nnx.traversals.flatten_mapping(
        nnx.to_pure_dict(decoder.abstract(cfg.model)[1]), sep="/"
    )
    try:
        bound = bind(family, cfg.model, {path: leaf.shape for path, leaf in plain.items()})
    except ValueError as error:
        raise ConfigError(f"cannot be exported: {error}") from error

    def base(path: str) -> np.ndarray:
        return np.asarray(treatment.floats(path, reader.under(path)))

    adapted = {path: place.contract for path, place in treatment.adapted.items()}
    with new_folder(args.out) as folder:
        count = peft.write(
            folder, cfg.lora, adapted, bound, reader.read, base, args.base or cfg.model.weights
        )
    print(
        f"{args.run} step {reader.step} -> {args.out}: adapters of {count} modules of "
        f"{family.architecture}"
    )
    return 0


def _merge(args: argparse.Namespace, sign: int) -> int:
    from tqdm import tqdm

    from maxstack.hf.merge import merge
    from maxstack.hf.peft import Adapter

    with tqdm(unit="B", unit_scale=True, desc="writing", disable=None) as bar:
        finite = not args.allow_nonfinite
        adapter = Adapter(args.adapter, finite=finite)
        count = merge(args.model, adapter, args.out, sign, bar.update, finite)
    print(
        f"{args.out}: {args.adapter} {'merged into' if sign > 0 else 'taken out of'} "
        f"{count} tensors of {args.model}"
    )
    return 0
