"""`maxstack data`: train a tokenizer, prepare token shards, and show what training reads."""

import os
from argparse import Namespace
from typing import TYPE_CHECKING

from maxstack.command import CONFIG, OVERRIDES, argument, command, group, load_config, positive
from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.schema.data import DataConfig


@command(
    "data tokenizer",
    "Train a SentencePiece tokenizer on the training documents of a configuration.",
    "data tokenizer configs/quickstart.yml --vocab 4096 --out python.model",
    CONFIG,
    OVERRIDES,
    argument(
        "--vocab",
        type=positive,
        required=True,
        help="vocabulary size, including 256 bytes, 4 special tokens and the text's characters",
    ),
    argument(
        "--model", choices=("bpe", "unigram"), default="bpe", help="model type (default: bpe)"
    ),
    argument("--out", required=True, metavar="FILE", help="the .model file to write"),
    argument(
        "--megabytes",
        type=positive,
        default=100,
        help="maximum size of the training sample in MB, drawn evenly (default: 100)",
    ),
)
def tokenizer(args: Namespace) -> None:
    """Train the tokenizer and write it."""
    from maxstack.data.vocabulary import train_vocabulary
    from maxstack.load import load_alone

    data = load_alone(args.config, args.overrides).data
    train_vocabulary(data, args.out, vocab=args.vocab, model=args.model, megabytes=args.megabytes)
    print(
        f"{args.out}: {args.vocab} tokens ({args.model}). To use it, set data: {{tokenizer: "
        f"{{kind: sentencepiece, path: {args.out}}}}} and model.vocab to {args.vocab} or more"
    )


@command(
    "data prepare",
    "Tokenize all documents into shards that are fast to read. Run the command again to resume it.",
    "data prepare configs/quickstart.yml --out tokens --workers 4",
    CONFIG,
    OVERRIDES,
    argument(
        "--out", required=True, metavar="DIR", help="output folder for the shards and manifest.json"
    ),
    argument(
        "--workers",
        type=positive,
        help="number of processes (default: one per core; with --engine ray, on all nodes)",
    ),
    argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="run processes on this machine or on a Ray cluster (default: local)",
    ),
    argument(
        "--address",
        metavar="HOST:PORT",
        help="address of a Ray cluster with this machine in it (default: start one here)",
    ),
    argument(
        "--shard-size",
        type=positive,
        metavar="N",
        help="documents per shard (default: 1/16 of the source's, at most 10,000)",
    ),
)
def prepare(args: Namespace) -> None:
    """Write the shards."""
    from maxstack.data import engines, vocabulary
    from maxstack.data.prepare import prepare
    from maxstack.load import load_alone

    if args.address and args.engine == "local":
        raise ConfigError("--address: names a Ray cluster; add --engine ray")
    engine: engines.Ray | engines.Processes
    if args.engine == "ray":
        engine = engines.Ray(args.workers, args.address)
    else:
        engine = engines.Processes(args.workers or os.cpu_count() or 1)
    cfg = load_alone(args.config, args.overrides)
    vocabulary.learn_vocabulary(cfg)
    data = cfg.data
    prepare(data, args.out, engine, shard_size=args.shard_size, task_texts=_task_texts(data))


def _task_texts(data: "DataConfig") -> dict[str, list[str]]:
    """Return the texts of the evaluation tasks that data.steps name."""
    names = [name for step in data.steps if step.kind == "decontaminate" for name in step.tasks]
    if not names:
        return {}
    from maxstack.evals.task_files import texts_of

    return {name: texts_of(name) for name in names}


@command(
    "data removed",
    "Print the documents that data.steps removed, as JSON lines with the fields step, rule, value, "
    "source, where and text.",
    "data removed tokens --step gopher_quality --limit 3",
    argument("folder", metavar="OUT", help="output folder of `maxstack data prepare`"),
    argument("--step", metavar="NAME", help="only documents removed by this step"),
    argument("--source", metavar="NAME", help="only documents of this source"),
    argument(
        "--limit", type=positive, metavar="N", help="print at most N documents (default: all)"
    ),
)
def removed(args: Namespace) -> None:
    """Print the rows."""
    import json

    from maxstack.data.filters.removals import read_removed

    for row in read_removed(args.folder, args.step, args.source, args.limit):
        print(json.dumps(row, ensure_ascii=False))


@command(
    "data show",
    "Print the model's input for a configuration: decoded rows, document boundaries and loss "
    "masks. For image models, draw the pictures.",
    "data show configs/quickstart.yml --rows 2 data.seq_len=256",
    CONFIG,
    OVERRIDES,
    argument("--rows", type=positive, default=4, help="rows per batch to print (default: 4)"),
    argument("--batches", type=positive, default=1, help="number of batches (default: 1)"),
    argument(
        "--full",
        action="store_true",
        help="print whole documents, not just their beginning and end",
    ),
    argument(
        "--eval", action="store_true", help="show the evaluation data instead of the training data"
    ),
    argument(
        "--out",
        default="images.png",
        metavar="FILE",
        help="PNG file for pictures (default: images.png)",
    ),
)
def show(args: Namespace) -> None:
    """Print or draw the rows."""
    from maxstack.commands.show import show
    from maxstack.data import vocabulary

    cfg = load_config(args)
    vocabulary.learn_vocabulary(cfg)
    show(cfg, args.batches, args.rows, args.out, full=args.full, evaluation=args.eval)


main = group(
    "data",
    "Work with a run's data without training.",
    "data show configs/quickstart.yml",
    tokenizer,
    prepare,
    removed,
    show,
)
