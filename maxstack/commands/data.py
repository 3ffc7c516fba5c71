"""`maxstack data tokenizer|prepare|show`: the commands that work on data alone, from the same files
that training reads."""

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxstack.schema.config import Config


def main(argv: Sequence[str]) -> int:
    """Run a subcommand. ConfigError for a user's mistake, DataError for bad data; `maxstack` turns
    them into exit codes."""
    args = _arguments(argv)
    args.run(args)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Overrides may also stand after options, where argparse alone does not look for them."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or "=" not in word]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.overrides = [*args.overrides, *rest]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="maxstack data",
        description="Work on a run's data without training.",
        epilog="example: maxstack data show configs/quickstart.yml",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    tokenizer = _command(
        commands,
        "tokenizer",
        "Train a SentencePiece tokenizer on the training documents of a config.",
        "maxstack data tokenizer configs/quickstart.yml --vocab 4096 --out python.model",
        _tokenizer,
    )
    tokenizer.add_argument(
        "--vocab",
        type=_positive,
        required=True,
        help="number of tokens; the 256 bytes, 4 special ones and the characters of the text "
        "come first",
    )
    tokenizer.add_argument(
        "--model", choices=("bpe", "unigram"), default="bpe", help="kind of model (default: bpe)"
    )
    tokenizer.add_argument("--out", required=True, metavar="FILE", help="the .model file to write")
    tokenizer.add_argument(
        "--megabytes",
        type=_positive,
        default=100,
        help="text to learn from at most, in MB, drawn evenly (default: 100)",
    )

    prepare = _command(
        commands,
        "prepare",
        "Tokenize every document once, into shards that train fast; started again, it "
        "goes on where it stopped.",
        "maxstack data prepare configs/quickstart.yml --out tokens --workers 4",
        _prepare,
    )
    prepare.add_argument(
        "--out", required=True, metavar="DIR", help="folder for the shards and manifest.json"
    )
    prepare.add_argument(
        "--workers",
        type=_positive,
        default=os.cpu_count() or 1,
        help="processes (default: the number of cores)",
    )
    prepare.add_argument(
        "--shard-size",
        type=_positive,
        metavar="N",
        help="documents in a shard (default: a 16th of the source, 10000 at most)",
    )

    show = _command(
        commands,
        "show",
        "Print what a config feeds the model: decoded rows, document boundaries, masks.",
        "maxstack data show configs/quickstart.yml --rows 2 data.seq_len=256",
        _show,
    )
    show.add_argument("--rows", type=_positive, default=4, help="rows of each batch (default: 4)")
    show.add_argument("--batches", type=_positive, default=1, help="batches (default: 1)")
    show.add_argument(
        "--full",
        action="store_true",
        help="print documents whole instead of their beginning and end",
    )
    show.add_argument(
        "--eval", action="store_true", help="what evaluation reads instead of training"
    )
    return parser


def _command(commands, name: str, description: str, example: str, run) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=description, description=description, epilog=f"example: {example}"
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, as for training")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b.c=value", help="change a value of the file"
    )
    parser.set_defaults(run=run)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _load(args: argparse.Namespace) -> "Config":
    from maxstack.load import load

    return load(args.config, args.overrides)


def _tokenizer(args: argparse.Namespace) -> None:
    from maxstack.data.vocabulary import train

    train(_load(args).data, args.out, vocab=args.vocab, model=args.model, megabytes=args.megabytes)


def _prepare(args: argparse.Namespace) -> None:
    from maxstack.data.prepare import prepare

    prepare(_load(args).data, args.out, workers=args.workers, shard_size=args.shard_size)


def _show(args: argparse.Namespace) -> None:
    from maxstack.commands.show import show

    cfg = _load(args)
    if args.eval:
        show(
            cfg.eval.data or cfg.data,
            cfg.eval.batch_size or cfg.train.batch_size,
            batches=args.batches,
            rows=args.rows,
            full=args.full,
            evaluation=True,
            whole=cfg.eval.data is not None,
        )
    else:
        show(cfg.data, cfg.train.batch_size, batches=args.batches, rows=args.rows, full=args.full)
