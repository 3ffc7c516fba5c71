"""`maxstack quantize`: a recipe applied to a trained model, with what that changes; `maxstack
quantize show`: what a recipe takes."""

import argparse
import dataclasses
import json
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack import cli
from maxstack.config import ConfigError

if TYPE_CHECKING:
    from maxstack.inference.score import Rows
    from maxstack.run import Run
    from maxstack.schema.config import Config

WORST = 12


def main(argv: Sequence[str]) -> int:
    """Do what the arguments say."""
    if argv and argv[0] == "show":
        return show(argv[1:])
    parser = argparse.ArgumentParser(
        prog="maxstack quantize",
        description="Post-training quantization: a run whose weights are kept in low "
        "precision, and "
        "a report of what that "
        "changes on your texts. `maxstack quantize show CONFIG` lists what a recipe takes.",
        epilog="example: maxstack quantize runs/quickstart --recipe int4 --calibrate "
        "texts.jsonl --out runs/quickstart-int4",
    )
    parser.add_argument(
        "model",
        metavar="RUN_OR_HF",
        help="a run's folder, one of its checkpoints, a Hugging Face folder, or Org/Name of "
        "the hub",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="replaces a value of the run's configuration",
    )
    parser.add_argument(
        "--recipe",
        required=True,
        metavar="NAME",
        help="a preset of configs/quantization, or a YAML file with rules",
    )
    parser.add_argument(
        "--calibrate",
        required=True,
        metavar="FILE",
        help='texts to measure on: JSONL with {"text": ...} a line, or tokens in an npz file '
        "as maxstack score takes them",
    )
    parser.add_argument(
        "--out", metavar="RUN", type=Path, help="the run to make; without it, only the report"
    )
    parser.add_argument(
        "--batch-size", type=cli.positive, default=8, help="rows at a time (default: 8)"
    )
    cli.takes_weights(parser)
    args = parser.parse_intermixed_args(argv)
    args.overrides += ["checkpoint.allow_nonfinite=true"] * args.allow_nonfinite
    if args.out and args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(f"--out {args.out}: is there already; choose another name, or delete it")
    if not Path(args.calibrate).is_file():
        raise ConfigError(
            f"--calibrate {args.calibrate}: no such file; give texts as JSONL, or tokens as npz"
        )
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from maxstack.inference.opened import config_of, open_model
    from maxstack.inference.score import read_texts, read_tokens

    saved, own = config_of(args.model, args.overrides)
    if saved.lora:
        raise ConfigError(
            f"{args.model}: has adapters; merge them first: maxstack export {args.model} "
            "--out FOLDER"
        )
    if any((rule.mode or saved.quantization.mode) == "ptq" for rule in saved.quantization.rules):
        raise ConfigError(
            f"{args.model}: is in low precision already; quantize what it was made of"
        )
    cfg = _kept(config_of(args.model, [*args.overrides, f"quantization={args.recipe}"])[0])
    if not any(rule.weight_qtype for rule in cfg.quantization.rules):
        raise ConfigError(
            f"--recipe {args.recipe}: takes nothing, for want of a rule with "
            "weight_qtype; give one, or a preset such as int8"
        )
    tokens = args.calibrate.endswith(".npz")
    rows = (
        read_tokens(args.calibrate, cfg.model.vocab)
        if tokens
        else read_texts(args.calibrate, args.model, args.overrides, "--calibrate FILE.npz")
    )
    whole, params = open_model(args.model, [*args.overrides, "quantization={mode: qt, rules: []}"])
    report = _measured(whole, params, cfg, rows, args.batch_size, args.out)
    print("\n".join(lines(report)))
    if args.out:
        _finish(Path(args.model), own, args.out, cfg, report)
        print("\n".join(further(args.out, own is not None)))
    return 0


def further(out: Path, has_data: bool) -> list[str]:
    """Commands for the run that was made."""
    run, file, name = (
        shlex.quote(f"{word}") for word in (out, out / "config.yml", f"run.name={out.name}-lora")
    )
    first = "" if has_data else f"; first give data.sources in {out / 'config.yml'}"
    return [
        f"{out} holds the weights; to score texts, and to train adapters beside them{first}:",
        f"  maxstack score {run} --data FILE.jsonl --out scores.npz",
        f"  maxstack train {file} {name} lora='{{rank: 8}}'",
    ]


def show(argv: Sequence[str]) -> int:
    """Every weight, the rule that takes it, and its bytes before and after."""
    parser = argparse.ArgumentParser(
        prog="maxstack quantize show",
        description="Every weight of a run, the rule that takes it, and its bytes before "
        "and after.",
        epilog="example: maxstack quantize show quickstart quantization=int8",
    )
    cli.takes_config(parser)
    args = parser.parse_intermixed_args(argv)

    from maxstack.load import load

    cfg = load(args.config, args.overrides)
    os.environ["JAX_PLATFORMS"] = "cpu"
    print("\n".join(table(cfg)))
    return 0


def table(cfg: "Config") -> list[str]:
    """The lines of `show`."""
    from flax import nnx

    from maxstack.models.model import abstract
    from maxstack.state import of_weights
    from maxstack.weights.rewrite import Rewrite

    rewrite = Rewrite(cfg)
    before, after = (
        nnx.traversals.flatten_mapping(of_weights(state)[0], sep="/")
        for state in (abstract(cfg.model)[1], rewrite.state)
    )
    rows, totals = (
        [
            (
                "weight",
                "shape",
                "rule",
                "mode",
                "weights",
                "activations",
                "gradients",
                "bytes before",
                "after",
            )
        ],
        [0, 0],
    )
    for path, leaf in before.items():
        sizes = (
            _bytes(leaf),
            sum(
                _bytes(kept)
                for name, kept in after.items()
                if name == path or name.startswith(f"{path}/")
            ),
        )
        use, adapter = rewrite.matches.get(path), " + adapter" * (path in rewrite.adapted)
        said = (
            (
                str(use.number),
                use.mode + adapter,
                _type(use.rule.weight_qtype, use.rule.tile_size),
                use.rule.act_qtype or "-",
                use.rule.bwd_qtype or "-",
            )
            if use
            else ("-", adapter.removeprefix(" + ") or "-", str(leaf.dtype), "-", "-")
        )
        rows.append((path, "x".join(map(str, leaf.shape)), *said, f"{sizes[0]:,}", f"{sizes[1]:,}"))
        totals = [total + size for total, size in zip(totals, sizes, strict=True)]
    rows.append(("all", "", "", "", "", "", "", f"{totals[0]:,}", f"{totals[1]:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i > 6 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _type(qtype: str | None, tile: int | float | None) -> str:
    return f"{qtype} / {tile}" if tile else f"{qtype}"


def _bytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def _kept(cfg: "Config") -> "Config":
    """The configuration whose rules all keep what they take in low precision; nothing is trained,
    so there are no gradients to quantize."""
    rules = [
        rule.model_copy(update={"mode": None, "bwd_qtype": None}) for rule in cfg.quantization.rules
    ]
    return cfg.model_copy(
        update={
            "quantization": cfg.quantization.model_copy(
                update={"mode": "ptq", "rules": tuple(rules)}
            )
        }
    )


def _measured(
    whole: "Run", params: Any, cfg: "Config", rows: "Rows", batch_size: int, out: Path | None
) -> dict[str, Any]:
    """The report; `out` gets the weights."""
    from flax import nnx

    from maxstack.run import assemble
    from maxstack.state import count
    from maxstack.weights.observe import Errors
    from maxstack.weights.rewrite import Rewrite

    errors, cfg = Errors(), whole.cfg.model_copy(update={"quantization": cfg.quantization})
    observed = Rewrite(cfg, errors)
    before = _perplexity(
        dataclasses.replace(whole, rewrite=observed, graph=observed.graph),
        observed.applied(params),
        rows,
        batch_size,
    )
    quantized = assemble(cfg, whole.mesh, trains=False)
    kept = quantized.rewritten(nnx.traversals.flatten_mapping(params, sep="/").items())
    if out:
        _write(out, kept)
    after = _perplexity(quantized, quantized.tree(kept), rows, batch_size)
    return {
        "bytes": {"before": count(params)[1], "after": count(kept)[1]},
        "perplexity": {"before": before, "after": after},
        "tokens": rows.scored,
        "layers": [
            {"weight": path, "layer": layer, "error": error}
            for (path, layer), error in errors.relative().items()
        ],
        "rules": [rule.model_dump(exclude_defaults=True) for rule in cfg.quantization.rules],
    }


def _perplexity(run: "Run", params: Any, rows: "Rows", batch_size: int) -> float:
    from maxstack.inference.score import score

    with tempfile.TemporaryDirectory() as folder:
        logprobs = score(
            run, params, rows, Path(folder) / "scores.npz", batch_size=batch_size, logits=False
        )
    return math.exp(-float(logprobs.sum(dtype="float64")) / rows.scored)


def _write(out: Path, kept: Mapping[str, Any]) -> None:
    """Step 0 of the run at `out`, weights alone."""
    import jax
    import numpy as np

    from maxstack.checkpoint.weights import WeightsWriter

    writer = WeightsWriter(
        out, {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in kept.items()}
    )
    for path, leaf in kept.items():
        writer.fill(path, 0, np.asarray(leaf).__getitem__)
    writer.finish()


def _finish(
    model: Path, own: Path | None, out: Path, cfg: "Config", report: Mapping[str, Any]
) -> None:
    """The run's configuration, what the model came with, and the report."""
    from maxstack.commands.convert import BESIDE, PLACEHOLDER, resolved
    from maxstack.hf.contents import opened
    from maxstack.hf.exported import record

    if own is None:
        assert cfg.model.weights
        record(opened(cfg.model.weights), out / BESIDE)
    elif (own / BESIDE).is_dir():
        shutil.copytree(own / BESIDE, out / BESIDE)
    run = cfg.run.model_copy(update={"name": out.resolve().name, "output_dir": str(out.parent)})
    cfg = cfg.model_copy(
        update={
            "run": run,
            "model": cfg.model.model_copy(update={"weights": None}),
            "checkpoint": cfg.checkpoint.model_copy(update={"restore": str(out.resolve())}),
        }
    )
    (out / "quantization.json").write_text(json.dumps(report, indent=1) + "\n")
    placeholder = "" if own else PLACEHOLDER
    (out / "config.yml").write_text(
        f"# Quantized by maxstack of {model}.\n{placeholder}" + resolved(cfg)
    )


def lines(report: Mapping[str, Any]) -> list[str]:
    """The report for people: sizes, perplexity, and the weights that change most."""
    size, perplexity = report["bytes"], report["perplexity"]
    change = perplexity["after"] / perplexity["before"] - 1
    found = [
        f"bytes of weights: {size['before']:,} -> {size['after']:,} "
        f"({size['before'] / size['after']:.2f} times smaller)",
        f"perplexity on {report['tokens']:,} tokens: {perplexity['before']:.4f} -> "
        f"{perplexity['after']:.4f} ({change:+.2%})",
        "what each weight gives, root mean square of the change over that of the whole, "
        "where it is largest:",
    ]
    worst = sorted(report["layers"], key=lambda row: -row["error"])[:WORST]
    return [*found, *(f"  {row['error']:8.2%}  {row['weight']}{_layer(row)}" for row in worst)]


def _layer(row: Mapping[str, Any]) -> str:
    """Nothing of a weight that is in no stack."""
    return f", layer {row['layer']} of its stack" if row["weight"].startswith("blocks/") else ""
