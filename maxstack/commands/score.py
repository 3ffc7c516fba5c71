"""`maxstack score`: compute log-probabilities of texts and records, or rewards of records."""

import os
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack.command import (
    ALLOW_NONFINITE,
    BATCH_SIZE,
    MODEL,
    OVERRIDES,
    WEIGHTS,
    argument,
    check_writable,
    command,
    model_overrides,
    positive,
)
from maxstack.errors import ConfigError, DataError

if TYPE_CHECKING:
    from maxstack.inference.score import Rows
    from maxstack.run import Run


def _column(text: str) -> tuple[str, str]:
    key, _, column = text.partition("=")
    if not (key and column):
        raise ArgumentTypeError(f"{text} is not KEY=COLUMN")
    return key, column


@command(
    "score",
    "Compute the log-probability of every token of some texts, and print the perplexity.",
    "score runs/quickstart --data texts.jsonl --out scores.npz",
    MODEL,
    OVERRIDES,
    argument(
        "--data",
        metavar="FILE.jsonl",
        help='texts to score, {"text": ...} per line, with the tokenizer\'s BOS and without EOS',
    ),
    argument(
        "--tokens",
        metavar="FILE.npz",
        help="score tokens instead: tokens int32 [B, T] and lengths int32 [B]",
    ),
    argument(
        "--records",
        metavar="FILE.jsonl",
        help="score records instead: conversations, preference pairs or labelled answers; --out "
        "FILE.jsonl gets them with the log-probability of each answer (for "
        "objective.reference=stored), or its reward",
    ),
    argument(
        "--kind",
        help="with --records: kind of record, chat, pairs or labelled (default: that of --preset, "
        "otherwise pairs)",
    ),
    argument(
        "--preset",
        metavar="NAME",
        help="with --records: their format, as in record.preset, such as alpaca or hh-rlhf",
    ),
    argument(
        "--column",
        type=_column,
        action="append",
        default=[],
        metavar="KEY=COLUMN",
        help="with --records: column that holds a key, as in record.columns; repeatable",
    ),
    argument(
        "--train",
        choices=("assistant", "last", "all"),
        default="assistant",
        help="with --records: which turns of a conversation to score (default: assistant)",
    ),
    argument(
        "--top",
        type=positive,
        default=0,
        metavar="K",
        help="with --records: also write the K likeliest tokens at each position (for "
        "objective.top)",
    ),
    argument(
        "--out",
        required=True,
        metavar="FILE",
        help="output file: npz with logprobs float32 [B, T], tokens and lengths; with --records, "
        "JSONL",
    ),
    argument("--logits", action="store_true", help="also write logits float32 [B, T, V]"),
    argument(
        "--adapter",
        action="append",
        default=[],
        metavar="FOLDER",
        help="also score with this adapter in PEFT's format, into FILE.NAME.npz; repeatable",
    ),
    BATCH_SIZE,
    WEIGHTS,
    ALLOW_NONFINITE,
)
def main(args: Namespace) -> None:
    """Score the texts, without and with each adapter."""
    files = _files_by_adapter(args)
    from maxstack.inference.score import check_length, read_texts, read_tokens
    from maxstack.inference.trained_model import (
        adapt_run,
        add_adapter,
        assemble_model,
        read_weights,
    )

    overrides = model_overrides(args)
    run, own = assemble_model(args.model, overrides)
    if not run.cfg.objective.FORWARD:
        raise ConfigError(
            f"{args.model}: was trained with objective.kind={run.cfg.objective.kind}, which does "
            "not predict tokens from those before them; see eval_loss in metrics.jsonl instead"
        )
    if args.records:
        _score_records(run, read_weights(args.model, run, own), args)
        return
    if run.cfg.decoder.head.scores:
        raise ConfigError(f"{args.model}: is a reward model, which scores records; use --records")
    adapted = {folder: adapt_run(run, folder) for folder in files}
    if args.tokens:
        rows = read_tokens(args.tokens, run.cfg.decoder.vocab)
    else:
        rows = read_texts(args.data, args.model, overrides, "--tokens FILE.npz")
    check_length(run, int(rows.lengths.max()), f"row {rows.lengths.argmax()}")
    params = read_weights(args.model, run, own)
    _score(run, params, rows, args.out, args)
    for folder, file in files.items():
        both = add_adapter(adapted[folder], params, folder)
        _score(adapted[folder], both, rows, file, args)


def _score_records(run: "Run", params: Any, args: Namespace) -> None:
    from pydantic import TypeAdapter

    from maxstack.inference.records import score_records
    from maxstack.schema.data import Record

    kind = _record_kind(args)
    settings = {"kind": kind, "preset": args.preset, "columns": dict(args.column)}
    if kind == "chat":
        settings["train"] = args.train
    record = TypeAdapter(Record).validate_python(settings)
    count = score_records(
        run,
        params,
        f"{args.model} {args.overrides}",
        args.records,
        record,
        args.out,
        batch_size=args.batch_size,
        top=args.top,
    )
    print(f"{args.out}: {count:,} records")


def _record_kind(args: Namespace) -> str:
    """Return the kind of --records. ConfigError for arguments that contradict one another."""
    from maxstack.config.spelling import did_you_mean
    from maxstack.schema.data import ANSWERS, OF_PRESETS

    if args.preset not in (None, *OF_PRESETS):
        raise ConfigError(
            f"--preset {args.preset}: no such preset{did_you_mean(args.preset, OF_PRESETS)}; there "
            f"are {', '.join(OF_PRESETS)}"
        )
    kinds = OF_PRESETS[args.preset] if args.preset else ("pairs",)
    # GSM8K's are prompts by default, which have no answer to score.
    kind = args.kind or next(name for name in kinds if name in ANSWERS)
    if kind not in ANSWERS:
        raise ConfigError(f"--kind {kind}: is not one of {', '.join(ANSWERS)}")
    if args.preset and kind not in kinds:
        raise ConfigError(f"--kind {kind}: --preset {args.preset} gives {' or '.join(kinds)}")
    if args.top and len(ANSWERS[kind]) > 1:
        # Distillation reads one answer of a record; those of a pair would overwrite each other.
        raise ConfigError("--top: needs records with one answer; give --kind chat or labelled")
    return kind


def _files_by_adapter(args: Namespace) -> dict[str, str]:
    """Return the output file of each adapter; ConfigError or DataError for arguments that are wrong
    for any model."""
    from maxstack.config import storage

    given = [file for file in (args.data, args.tokens, args.records) if file is not None]
    if len(given) != 1:
        raise ConfigError(
            "maxstack score: give one of --data FILE.jsonl, --tokens FILE.npz and --records "
            "FILE.jsonl"
        )
    if args.records and (args.adapter or args.logits):
        raise ConfigError("--records: does not work with --adapter or --logits; leave them out")
    if args.top and not args.records:
        raise ConfigError("--top: needs --records FILE.jsonl")
    if args.records:
        _record_kind(args)
    check_writable("--out", args.out)
    (texts,) = given
    if storage.kind(texts) != "file":
        raise DataError(f"{texts}: no such file")
    if args.data and args.data.endswith(".npz"):
        raise ConfigError(f"--data {args.data}: is not JSONL; give an npz file by --tokens")
    stem, suffix = os.path.splitext(args.out)
    files = {folder: f"{stem}.{Path(folder).resolve().name}{suffix}" for folder in args.adapter}
    if len({args.out, *files.values()}) <= len(files):
        raise ConfigError(
            "--adapter: two folders have the same name, so one file would hold both results"
        )
    return files


def _score(run: "Run", params: Any, rows: "Rows", out: str, args: Namespace) -> None:
    """Score, and print the perplexity. DataError for a token without a finite log-probability,
    unless non-finite weights are allowed."""
    import numpy as np

    from maxstack.inference.score import mean_loss, score

    logprobs = score(run, params, rows, out, batch_size=args.batch_size, logits=args.logits)
    odd = np.argwhere(~np.isfinite(logprobs))
    if len(odd) and not run.cfg.checkpoint.allow_nonfinite:
        row, position = odd[0]
        raise DataError(
            f"{out}: {len(odd)} of {rows.scored} scored tokens have a log-probability that is NaN "
            f"or infinite, the first at row {row}, position {position}; the weights are damaged or "
            "too large for model.dtype: try model.dtype=float32, or accept it with "
            "--allow-nonfinite"
        )
    mean = mean_loss(logprobs, rows)
    print(
        f"{out}: {len(rows.lengths)} rows, {rows.scored} scored tokens, mean negative "
        f"log-likelihood {mean:.6f}, perplexity {np.exp(mean):.4f}"
    )
