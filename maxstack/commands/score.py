"""`maxstack score`: log-probabilities and perplexity of texts under a model."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxstack import cli
from maxstack.config import ConfigError
from maxstack.config.errors import DataError
from maxstack.inference.opened import adapted_run, assembled, read_weights, with_adapter
from maxstack.inference.score import Rows, read_texts, read_tokens, score

if TYPE_CHECKING:
    from maxstack.run import Run


def main(argv: Sequence[str]) -> int:
    """Score what the arguments say; the exit code."""
    args = _arguments(argv)
    out = Path(args.out)
    places = {
        folder: out.with_suffix(f".{Path(folder).resolve().name}{out.suffix}")
        for folder in args.adapter
    }
    if len({out, *places.values()}) <= len(places):
        raise ConfigError("--adapter: two folders of one name; their results would lie in one file")
    run, own = assembled(args.model, args.overrides)
    adapted = {folder: adapted_run(run, folder) for folder in places}
    rows = (
        read_tokens(args.tokens, run.cfg.model.vocab)
        if args.tokens
        else read_texts(args.data, args.model, args.overrides, "--tokens FILE.npz")
    )
    params = read_weights(args.model, run, own)
    _report(run, params, rows, out, args)
    for folder, place in places.items():
        further = with_adapter(adapted[folder], params, folder)
        _report(adapted[folder], further, rows, place, args)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, checked as far as no run is needed."""
    parser = argparse.ArgumentParser(
        prog="maxstack score",
        description="Write the log-probability of each token of some texts, and print the "
        "perplexity.",
        epilog="example: maxstack score runs/quickstart --data texts.jsonl --out scores.npz",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run's folder, one of its checkpoints, a Hugging Face model folder, or "
        "Org/Name of the hub",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="replaces a value of the run's configuration, such as model.dtype=float32",
    )
    parser.add_argument(
        "--data",
        metavar="FILE.jsonl",
        help='texts, one {"text": ...} a line; BOS as the tokenizer says, no EOS',
    )
    parser.add_argument(
        "--tokens", metavar="FILE.npz", help="instead: tokens int32 [B, T] and lengths int32 [B]"
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE.npz",
        help="logprobs float32 [B, T], tokens and lengths",
    )
    parser.add_argument("--logits", action="store_true", help="also logits float32 [B, T, V]")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="FOLDER",
        help="in PEFT's format: score with it too, into FILE.NAME.npz; may be given several times",
    )
    parser.add_argument(
        "--batch-size", type=cli.positive, default=8, help="rows at a time (default: 8)"
    )
    cli.takes_weights(parser)
    args = parser.parse_intermixed_args(argv)
    args.overrides += ["checkpoint.allow_nonfinite=true"] * args.allow_nonfinite
    if (args.data is None) == (args.tokens is None):
        raise ConfigError("maxstack score: give either --data FILE.jsonl or --tokens FILE.npz")
    out = Path(args.out)
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(
            f"--out {out}: "
            f"{'is a folder' if out.is_dir() else f'the folder {out.parent} does not exist'}"
        )
    for file in (args.data, args.tokens):
        if file and not Path(file).is_file():
            raise DataError(f"{file}: no such file")
    if args.data and args.data.endswith(".npz"):
        raise ConfigError(f"--data {args.data}: npz goes to --tokens; --data takes texts as JSONL")
    return args


def _report(run: "Run", params: Any, rows: Rows, out: Path, args: argparse.Namespace) -> None:
    """Score, and print the perplexity. DataError for a token without a finite log-probability,
    unless weights that are not finite are allowed."""
    logprobs = score(run, params, rows, out, batch_size=args.batch_size, logits=args.logits)
    odd = np.argwhere(~np.isfinite(logprobs))
    if len(odd) and not run.cfg.checkpoint.allow_nonfinite:
        row, place = odd[0]
        raise DataError(
            f"{out}: {len(odd)} of {rows.scored} scored tokens have a log-probability that is NaN "
            f"or infinite, the first at row {row}, position {place}; the weights are damaged, or "
            "too large for model.dtype: try model.dtype=float32, or take it as it is with "
            "--allow-nonfinite"
        )
    mean = -float(logprobs.sum(dtype=np.float64)) / rows.scored
    print(
        f"{out}: {len(rows.lengths)} rows, {rows.scored} scored tokens, mean negative "
        f"log-likelihood {mean:.6f}, perplexity {np.exp(mean):.4f}"
    )
