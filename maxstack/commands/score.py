"""`maxstack score`: log-probabilities and perplexity of texts under a model."""

import os
from argparse import Namespace
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


@command(
    "score",
    "Write the log-probability of each token of some texts, and print the perplexity.",
    "score runs/quickstart --data texts.jsonl --out scores.npz",
    MODEL,
    OVERRIDES,
    argument(
        "--data",
        metavar="FILE.jsonl",
        help='texts, one {"text": ...} a line; BOS as the tokenizer says, no EOS',
    ),
    argument(
        "--tokens", metavar="FILE.npz", help="instead: tokens int32 [B, T] and lengths int32 [B]"
    ),
    argument(
        "--records",
        metavar="FILE.jsonl",
        help="instead: conversations, preferences or labelled answers; written to --out FILE.jsonl "
        "with the log-probability of each answer (objective.reference=stored), or its reward",
    ),
    argument(
        "--kind",
        choices=("chat", "pairs", "labelled"),
        help="of these records (default: what --preset gives, or pairs)",
    ),
    argument(
        "--preset", metavar="NAME", help="their shape, as record.preset: alpaca, hh-rlhf, ..."
    ),
    argument(
        "--train",
        choices=("assistant", "last", "all"),
        default="assistant",
        help="tokens of a conversation that count (default: assistant)",
    ),
    argument(
        "--top",
        type=positive,
        default=0,
        metavar="K",
        help="also the K likeliest tokens at each of them (objective.top)",
    ),
    argument(
        "--out",
        required=True,
        metavar="FILE",
        help="npz of logprobs float32 [B, T], tokens and lengths; of records, JSON lines",
    ),
    argument("--logits", action="store_true", help="also logits float32 [B, T, V]"),
    argument(
        "--adapter",
        action="append",
        default=[],
        metavar="FOLDER",
        help="in PEFT's format: score with it too, into FILE.NAME.npz; may be given several times",
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
            f"{args.model}: was trained by objective.kind={run.cfg.objective.kind}, which gives no "
            "token a probability by those before it; eval_loss in metrics.jsonl is its figure"
        )
    if args.records:
        _score_records(run, read_weights(args.model, run, own), args)
        return
    if run.cfg.decoder.head.scores:
        raise ConfigError(f"{args.model}: is a reward model, which scores records; give --records")
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

    from maxstack.config.spelling import did_you_mean
    from maxstack.inference.records import score_records
    from maxstack.schema.data import OF_PRESETS, Record

    if args.preset not in (None, *OF_PRESETS):
        raise ConfigError(
            f"--preset {args.preset}: no such shape{did_you_mean(args.preset, OF_PRESETS)}; there "
            f"are {', '.join(OF_PRESETS)}"
        )
    kinds = OF_PRESETS[args.preset] if args.preset else ("pairs",)
    kind = args.kind or next((name for name in kinds if name != "prompts"), "prompts")
    if args.preset and kind not in kinds:
        raise ConfigError(f"--kind {kind}: --preset {args.preset} gives {' or '.join(kinds)}")
    said = {"kind": kind, "preset": args.preset} | ({"train": args.train} if kind == "chat" else {})
    record = TypeAdapter(Record).validate_python(said)
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


def _files_by_adapter(args: Namespace) -> dict[str, str]:
    """The file for each adapter; ConfigError or DataError for arguments that are wrong whatever the
    model is."""
    from maxstack.config import storage

    given = [file for file in (args.data, args.tokens, args.records) if file is not None]
    if len(given) != 1:
        raise ConfigError(
            "maxstack score: give one of --data FILE.jsonl, --tokens FILE.npz and --records "
            "FILE.jsonl"
        )
    if args.records and (args.adapter or args.logits):
        raise ConfigError("--records: goes with neither --adapter nor --logits")
    if args.top and not args.records:
        raise ConfigError("--top: is of the tokens of --records FILE.jsonl")
    check_writable("--out", args.out)
    (texts,) = given
    if storage.kind(texts) != "file":
        raise DataError(f"{texts}: no such file")
    if args.data and args.data.endswith(".npz"):
        raise ConfigError(f"--data {args.data}: npz goes to --tokens; --data takes texts as JSONL")
    stem, suffix = os.path.splitext(args.out)
    files = {folder: f"{stem}.{Path(folder).resolve().name}{suffix}" for folder in args.adapter}
    if len({args.out, *files.values()}) <= len(files):
        raise ConfigError("--adapter: two folders of one name; their results would lie in one file")
    return files


def _score(run: "Run", params: Any, rows: "Rows", out: str, args: Namespace) -> None:
    """Score, and print the perplexity. DataError for a token without a finite log-probability,
    unless weights that are not finite are allowed."""
    import numpy as np

    from maxstack.inference.score import mean_loss, score

    logprobs = score(run, params, rows, out, batch_size=args.batch_size, logits=args.logits)
    odd = np.argwhere(~np.isfinite(logprobs))
    if len(odd) and not run.cfg.checkpoint.allow_nonfinite:
        row, position = odd[0]
        raise DataError(
            f"{out}: {len(odd)} of {rows.scored} scored tokens have a log-probability that is NaN "
            f"or infinite, the first at row {row}, position {position}; the weights are damaged, "
            "or too large for model.dtype: try model.dtype=float32, or take it as it is with "
            "--allow-nonfinite"
        )
    mean = mean_loss(logprobs, rows)
    print(
        f"{out}: {len(rows.lengths)} rows, {rows.scored} scored tokens, mean negative "
        f"log-likelihood {mean:.6f}, perplexity {np.exp(mean):.4f}"
    )
