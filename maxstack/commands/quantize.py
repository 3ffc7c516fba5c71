"""`maxstack quantize`: a recipe applied to a trained model, with what that changes; `maxstack
quantize show`: what a recipe takes."""

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
    """`quantize show` where that is the first word, else `quantize`."""
    return show(argv[1:]) if argv[:1] == ["show"] else quantize(argv)


@command(
    "quantize",
    "Post-training quantization: a run whose weights are kept in low precision, and a report of "
    "what that changes on your texts. `maxstack quantize show CONFIG` lists what a recipe takes.",
    "quantize runs/quickstart --recipe int4 --calibrate texts.jsonl --out runs/quickstart-int4",
    MODEL,
    OVERRIDES,
    argument(
        "--recipe",
        required=True,
        metavar="NAME",
        help="a preset of configs/quantization, or a YAML file with rules",
    ),
    argument(
        "--calibrate",
        required=True,
        metavar="FILE",
        help='texts to measure on: JSONL with {"text": ...} a line, or tokens in an npz file '
        "as maxstack score takes them",
    ),
    argument(
        "--out",
        metavar="RUN",
        type=local_folder,
        help="the run to make; without it, only the report",
    ),
    BATCH_SIZE,
    WEIGHTS,
    ALLOW_NONFINITE,
    on_cpu=True,
)
def quantize(args: Namespace) -> None:
    """Print the report, and make the run at --out."""
    from maxstack.config import storage

    model, out, overrides = args.model, args.out, model_overrides(args)
    from maxstack.config import atomic

    if out:
        atomic.check_absent(out)
    if storage.kind(args.calibrate) != "file":
        raise ConfigError(
            f"--calibrate {args.calibrate}: no such file; give texts as JSONL, or tokens as npz"
        )
    from maxstack.inference.score import read_texts, read_tokens
    from maxstack.inference.trained_model import config_of, open_model

    saved, own = config_of(model, overrides)
    if saved.lora:
        raise ConfigError(
            f"{model}: has adapters; merge them first: maxstack export {model} --out FOLDER"
        )
    if any((rule.mode or saved.quantization.mode) == "ptq" for rule in saved.quantization.rules):
        raise ConfigError(f"{model}: is in low precision already; quantize what it was made of")
    cfg = _stored(config_of(model, [*overrides, f"quantization={args.recipe}"])[0])
    if not any(rule.weight_qtype for rule in cfg.quantization.rules):
        raise ConfigError(
            f"--recipe {args.recipe}: takes nothing, for want of a rule with "
            "weight_qtype; give one, or a preset such as int8"
        )
    if args.calibrate.endswith(".npz"):
        rows = read_tokens(args.calibrate, cfg.decoder.vocab)
    else:
        rows = read_texts(args.calibrate, model, overrides, "--calibrate FILE.npz")
    whole, params = open_model(model, [*overrides, "quantization={mode: qt, rules: []}"])
    report = _measured(whole, params, cfg, rows, args.batch_size, out)
    print(text(report))
    if out:
        _finish(model, own, out, cfg, report)
        run, file = shlex.quote(f"{out}"), shlex.quote(f"{out / 'config.yml'}")
        data = "" if own else f"; first give data.sources in {out / 'config.yml'}"
        print(
            f"{out} holds the weights; to score texts, and to train adapters beside them{data}:\n"
            f"  maxstack score {run} --data FILE.jsonl --out scores.npz\n"
            f"  maxstack train {file} {shlex.quote(f'run.name={out.name}-lora')} lora='{{rank: 8}}'"
        )


@command(
    "quantize show",
    "Every weight of a run, the rule that takes it, and its bytes before and after.",
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
    total = total_after = 0
    for path, leaf in weights_of(cfg.model).items():
        size = _bytes(leaf)
        size_after = sum(
            _bytes(kept) for name, kept in after.items() if f"{name}/".startswith(f"{path}/")
        )
        total, total_after = total + size, total_after + size_after
        number, dtype, operands = "-", f"{leaf.dtype}", ("-", "-")
        modes = ["adapter"] * (path in rewrite.adapted)
        if use := rewrite.matches.get(path):
            rule, number, modes = use.rule, f"{use.number}", [use.mode, *modes]
            dtype = f"{rule.weight_qtype}" + (f" / {rule.tile_size}" if rule.tile_size else "")
            operands = rule.act_qtype or "-", rule.bwd_qtype or "-"
        shape, mode = "x".join(map(str, leaf.shape)), " + ".join(modes) or "-"
        rows.append((path, shape, number, mode, dtype, *operands, f"{size:,}", f"{size_after:,}"))
    rows.append(("all", *[""] * 6, f"{total:,}", f"{total_after:,}"))
    words = "weight shape rule mode weights activations gradients".split()
    print(table("lllllllrr", rows, [*words, "bytes before", "after"]))


def _bytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def _stored(cfg: "Config") -> "Config":
    """The configuration whose rules all keep what they take in low precision; nothing is trained,
    so there are no gradients to quantize."""
    rules = tuple(
        rule.model_copy(update={"mode": None, "bwd_qtype": None}) for rule in cfg.quantization.rules
    )
    recipe = cfg.quantization.model_copy(update={"mode": "ptq", "rules": rules})
    return cfg.model_copy(update={"quantization": recipe})


def _measured(
    whole: "Run", params: Any, cfg: "Config", rows: "Rows", batch_size: int, out: Path | None
) -> dict[str, Any]:
    """The report; writes the weights of the quantized run to `out`."""
    import jax
    import numpy as np

    from maxstack.checkpoint.weights import WeightsWriter
    from maxstack.run import assemble
    from maxstack.state import count, flat, tree
    from maxstack.weights.quantization_errors import Errors
    from maxstack.weights.rewrite import Rewrite

    errors, cfg = Errors(), whole.cfg.model_copy(update={"quantization": cfg.quantization})
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
    """Write the run's configuration, what the model was imported with, and the report."""
    from maxstack.commands.convert import BESIDE, PLACEHOLDER, settings_of
    from maxstack.config import dump, trust
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
        f"# Quantized by maxstack of {model}.\n{placeholder}{dump(settings)}"
    )
    trust.vouch(out / "config.yml")


def text(report: Mapping[str, Any]) -> str:
    """The report for people: sizes, perplexity, and the weights that change most."""
    size, perplexity = report["bytes"], report["perplexity"]
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
        "change of each weight's product, root mean square over that of the product, where it is "
        f"largest:\n{table('rll', rows)}"
    )
