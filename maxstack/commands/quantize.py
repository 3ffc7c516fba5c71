"""`maxstack quantize`: quantize a model by a recipe and report the quality change; `maxstack
quantize show`: list the weights that a recipe quantizes."""

import dataclasses
import math
import shlex
import shutil
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack import strict_json
from maxstack.command import (
    ALLOW_NONFINITE,
    BATCH_SIZE,
    CONFIG,
    MODEL,
    OVERRIDES,
    WEIGHTS,
    argument,
    command,
    load_config,
    local_folder,
    model_overrides,
)
from maxstack.errors import ConfigError
from maxstack.report.table import table

if TYPE_CHECKING:
    from maxstack.inference.score import Rows
    from maxstack.run import Run
    from maxstack.schema.config import Config

WORST = 12


def main(argv: Sequence[str]) -> int:
    """Run `quantize show`, or `quantize`."""
    return show(argv[1:]) if argv[:1] == ["show"] else quantize(argv)


@command(
    "quantize",
    "Quantize a trained model: write a run with low-precision weights, and report the "
    "quality change on your texts. `maxstack quantize show CONFIG` lists the weights that a recipe "
    "quantizes.",
    "quantize runs/quickstart --recipe int4 --calibrate texts.jsonl --out runs/quickstart-int4",
    MODEL,
    OVERRIDES,
    argument(
        "--recipe",
        required=True,
        metavar="NAME",
        help="preset in configs/quantization, or YAML file with rules",
    ),
    argument(
        "--calibrate",
        required=True,
        metavar="FILE",
        help='texts to measure on: JSONL with {"text": ...} per line, or an npz file of tokens as '
        "for `maxstack score --tokens`",
    ),
    argument(
        "--out",
        metavar="RUN",
        type=local_folder,
        help="run folder to create (default: only print the report)",
    ),
    BATCH_SIZE,
    WEIGHTS,
    ALLOW_NONFINITE,
    on_cpu=True,
)
def quantize(args: Namespace) -> None:
    """Print the report, and write the run to --out."""
    from maxstack.config import storage

    model, out = args.model, args.out
    overrides = model_overrides(args)
    from maxstack.config import atomic

    if out:
        atomic.check_absent(out)
    if storage.kind(args.calibrate) != "file":
        raise ConfigError(
            f"--calibrate {args.calibrate}: no such file; give texts as JSONL or tokens as npz"
        )
    from maxstack.inference.score import read_texts, read_tokens
    from maxstack.inference.trained_model import config_of, open_model

    saved, own = config_of(model, overrides)
    if saved.lora:
        raise ConfigError(
            f"{model}: has adapters; merge them first: maxstack export {model} --out FOLDER"
        )
    if any((rule.mode or saved.quantization.mode) == "ptq" for rule in saved.quantization.rules):
        raise ConfigError(
            f"{model}: is in low precision already; quantize the model it was made from"
        )
    cfg = _post_training(config_of(model, [*overrides, f"quantization={args.recipe}"])[0])
    if not any(rule.weight_qtype for rule in cfg.quantization.rules):
        raise ConfigError(
            f"--recipe {args.recipe}: quantizes nothing, because no rule sets weight_qtype; add "
            "one, or use a preset such as int8"
        )
    if args.calibrate.endswith(".npz"):
        rows = read_tokens(args.calibrate, cfg.decoder.vocab)
    else:
        rows = read_texts(args.calibrate, model, overrides, "--calibrate FILE.npz")
    whole, params = open_model(model, [*overrides, "quantization={mode: qt, rules: []}"])
    report = _quantize(whole, params, cfg, rows, args.batch_size, out)
    print(text(report))
    if out:
        _finish(model, own, out, cfg, report)
        run, file = shlex.quote(f"{out}"), shlex.quote(f"{out / 'config.yml'}")
        data = "" if own else f" (first set data.sources in {out / 'config.yml'})"
        print(
            f"{out} holds the weights; to score texts, and to train adapters on them{data}:\n"
            f"  maxstack score {run} --data FILE.jsonl --out scores.npz\n"
            f"  maxstack train {file} {shlex.quote(f'run.name={out.name}-lora')} lora='{{rank: 8}}'"
        )


@command(
    "quantize show",
    "List every weight of a run with the rule that quantizes it and its bytes before and after.",
    "quantize show quickstart quantization=int8",
    CONFIG,
    OVERRIDES,
    on_cpu=True,
)
def show(args: Namespace) -> None:
    """Print a row for each weight."""
    from flax import nnx

    from maxstack.models.model import weights_of
    from maxstack.state import flat
    from maxstack.weights.rewrite import Rewrite

    cfg = load_config(args)
    rewrite = Rewrite(cfg)
    after = flat(nnx.to_pure_dict(rewrite.state))
    rows: list[tuple[str, ...]] = []
    total = 0
    total_after = 0
    for path, leaf in weights_of(cfg.model).items():
        size = _bytes(leaf)
        size_after = sum(
            _bytes(kept) for name, kept in after.items() if f"{name}/".startswith(f"{path}/")
        )
        total += size
        total_after += size_after
        cells = ["-", "-", f"{leaf.dtype}", "-", "-"]
        modes = []
        if use := rewrite.matches.get(path):
            rule = use.rule
            modes.append(use.mode)
            dtype = f"{rule.weight_qtype}" + (f" / {rule.tile_size}" if rule.tile_size else "")
            cells = [f"{use.number}", "", dtype, rule.act_qtype or "-", rule.bwd_qtype or "-"]
        if path in rewrite.adapted:
            modes.append("adapter")
        cells[1] = " + ".join(modes) or "-"
        shape = "x".join(map(str, leaf.shape))
        rows.append((path, shape, *cells, f"{size:,}", f"{size_after:,}"))
    rows.append(("all", *[""] * 6, f"{total:,}", f"{total_after:,}"))
    words = "weight shape rule mode weights activations gradients".split()
    print(table("lllllllrr", rows, [*words, "bytes before", "after"]))


def _bytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def _post_training(cfg: "Config") -> "Config":
    """Make all rules keep their weights in low precision. Nothing is trained, so there are no
    gradients to quantize."""
    rules = tuple(
        rule.model_copy(update={"mode": None, "bwd_qtype": None}) for rule in cfg.quantization.rules
    )
    recipe = cfg.quantization.model_copy(update={"mode": "ptq", "rules": rules})
    return cfg.model_copy(update={"quantization": recipe})


def _quantize(
    whole: "Run", params: Any, cfg: "Config", rows: "Rows", batch_size: int, out: Path | None
) -> dict[str, Any]:
    """Write the weights of the quantized run to `out`, and return the report."""
    import jax
    import numpy as np

    from maxstack.checkpoint.weights import WeightsWriter
    from maxstack.run import assemble
    from maxstack.state import count, flat, tree
    from maxstack.weights.quantization_errors import Errors
    from maxstack.weights.rewrite import Rewrite

    errors = Errors()
    cfg = whole.cfg.model_copy(update={"quantization": cfg.quantization})
    observed = Rewrite(cfg, errors)
    weights = dataclasses.replace(whole.weights, rewrite=observed)
    before = _perplexity(
        dataclasses.replace(whole, weights=weights, graph=observed.graph),
        observed.apply(params),
        rows,
        batch_size,
    )
    quantized = assemble(cfg, whole.mesh, trains=False)
    kept = quantized.weights.from_original(flat(params).items())
    if out:
        shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in kept.items()}
        writer = WeightsWriter(out, shapes)
        for path, leaf in kept.items():
            writer.fill(path, 0, np.asarray(leaf).__getitem__)
        writer.finish()
    after = _perplexity(quantized, tree(kept), rows, batch_size)
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
    from maxstack.inference.score import logprobs_of, mean_loss

    return math.exp(mean_loss(logprobs_of(run, params, rows, batch_size), rows))


def _finish(
    model: str, own: Path | None, out: Path, cfg: "Config", report: Mapping[str, Any]
) -> None:
    """Write the run's configuration, the files that the model was imported with, and the report."""
    from maxstack.config import dump, trust
    from maxstack.convert import BESIDE, PLACEHOLDER, settings_of
    from maxstack.hf.contents import open_contents
    from maxstack.hf.export import save_source_files

    if own is None:
        assert cfg.model.weights
        save_source_files(open_contents(cfg.model.weights), out / BESIDE)
    elif (own / BESIDE).is_dir():
        shutil.copytree(own / BESIDE, out / BESIDE)
    settings = settings_of(cfg)
    settings["run"] |= {"name": out.resolve().name, "output_dir": str(out.parent)}
    settings["model"]["weights"] = None
    settings["checkpoint"]["restore"] = str(out.resolve())
    (out / "quantization.json").write_text(strict_json.write(report, indent=1) + "\n")
    placeholder = "" if own else PLACEHOLDER
    (out / "config.yml").write_text(
        f"# Quantized by maxstack from {model}.\n{placeholder}{dump(settings)}"
    )
    trust.vouch(out / "config.yml")


def text(report: Mapping[str, Any]) -> str:
    """Describe the report: sizes, perplexity, and the weights with the largest errors."""
    size = report["bytes"]
    perplexity = report["perplexity"]
    change = perplexity["after"] / perplexity["before"] - 1
    worst = sorted(report["layers"], key=lambda row: -row["error"])[:WORST]
    rows = []
    for row in worst:
        is_stacked = row["weight"].startswith("blocks/")
        layer = f"layer {row['layer']} of its stack" if is_stacked else ""
        rows.append((f"{row['error']:.2%}", row["weight"], layer))
    return (
        f"bytes of weights: {size['before']:,} -> {size['after']:,} "
        f"({size['before'] / size['after']:.2f} times smaller)\n"
        f"perplexity on {report['tokens']:,} tokens: {perplexity['before']:.4f} -> "
        f"{perplexity['after']:.4f} ({change:+.2%})\n"
        "weights with the largest relative error of their product (RMS error over RMS):\n"
        f"{table('rll', rows)}"
    )
