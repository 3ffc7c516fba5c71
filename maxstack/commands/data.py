"""`maxstack data tokenizer|prepare|removed|show`: work on a run's data, from the same files that
training reads."""

import os
from argparse import Namespace
from typing import TYPE_CHECKING

from maxstack.command import CONFIG, OVERRIDES, argument, command, group, load_config, positive
from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.schema.data import DataConfig


@command(
    "data tokenizer",
    "Train a SentencePiece tokenizer on the training documents of a config.",
    "data tokenizer configs/quickstart.yml --vocab 4096 --out python.model",
    CONFIG,
    OVERRIDES,
    argument(
        "--vocab",
        type=positive,
        required=True,
        help="number of tokens; the 256 bytes, 4 special ones and the characters of the text "
        "come first",
    ),
    argument(
        "--model", choices=("bpe", "unigram"), default="bpe", help="kind of model (default: bpe)"
    ),
    argument("--out", required=True, metavar="FILE", help="the .model file to write"),
    argument(
        "--megabytes",
        type=positive,
        default=100,
        help="text to learn from at most, in MB, drawn evenly (default: 100)",
    ),
)
def tokenizer(args: Namespace) -> None:
    """Train the tokenizer and write it."""
    from maxstack.data.vocabulary import train
    from maxstack.load import load_alone

    data = load_alone(args.config, args.overrides).data
    train(data, args.out, vocab=args.vocab, model=args.model, megabytes=args.megabytes)
    print(
        f"{args.out}: {args.vocab} tokens ({args.model}). In a config: data: {{tokenizer: {{kind: "
        f"sentencepiece, path: {args.out}}}}} and model.vocab at least {args.vocab}"
    )


@command(
    "data prepare",
    "Tokenize every document once, into shards that train fast; started again, it goes on where "
    "it stopped.",
    "data prepare configs/quickstart.yml --out tokens --workers 4",
    CONFIG,
    OVERRIDES,
    argument("--out", required=True, metavar="DIR", help="folder for the shards and manifest.json"),
    argument(
        "--workers",
        type=positive,
        help="processes (default: the number of cores, of all nodes with --engine ray)",
    ),
    argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="processes of this machine, or of a Ray cluster (default: local)",
    ),
    argument(
        "--address",
        metavar="HOST:PORT",
        help="the Ray cluster, of which this machine is a node (default: one of this machine "
        "alone, started for the purpose)",
    ),
    argument(
        "--shard-size",
        type=positive,
        metavar="N",
        help="documents in a shard (default: a 16th of the source, 10000 at most)",
    ),
)
def prepare(args: Namespace) -> None:
    """Write the shards."""
    from maxstack.data import engines, vocabulary
    from maxstack.data.prepare import prepare
    from maxstack.load import load_alone

    if args.address and args.engine == "local":
        raise ConfigError("--address names a Ray cluster: add --engine ray")
    engine = (
        engines.Ray(args.workers, args.address)
        if args.engine == "ray"
        else engines.Processes(args.workers or os.cpu_count() or 1)
    )
    cfg = load_alone(args.config, args.overrides)
    vocabulary.learn(cfg)
    data = cfg.data
    prepare(data, args.out, engine, shard_size=args.shard_size, task_texts=_task_texts(data))


def _task_texts(data: "DataConfig") -> dict[str, list[str]]:
    """Texts of the evaluation tasks that data.steps name."""
    names = [name for step in data.steps if step.kind == "decontaminate" for name in step.tasks]
    if not names:
        return {}
    from maxstack.evals.task_texts import texts_of

    return {name: texts_of(name) for name in names}


@command(
    "data removed",
    "Print the documents that data.steps removed, as JSON lines with step, rule, value, source, "
    "where and text.",
    "data removed tokens --step gopher_quality --limit 3",
    argument("folder", metavar="OUT", help="the folder that `maxstack data prepare` wrote"),
    argument("--step", metavar="NAME", help="of this step alone"),
    argument("--source", metavar="NAME", help="of this source alone"),
    argument("--limit", type=positive, metavar="N", help="so many at most (default: all)"),
)
def removed(args: Namespace) -> None:
    """Print the rows."""
    import json

    from maxstack.data.steps.removed import rows

    for row in rows(args.folder, args.step, args.source, args.limit):
        print(json.dumps(row, ensure_ascii=False))


@command(
    "data show",
    "Print what a config feeds the model: decoded rows, document boundaries, masks; or draw its "
    "pictures.",
    "data show configs/quickstart.yml --rows 2 data.seq_len=256",
    CONFIG,
    OVERRIDES,
    argument("--rows", type=positive, default=4, help="rows of each batch (default: 4)"),
    argument("--batches", type=positive, default=1, help="batches (default: 1)"),
    argument(
        "--full",
        action="store_true",
        help="print documents whole instead of their beginning and end",
    ),
    argument("--eval", action="store_true", help="what evaluation reads instead of training"),
    argument(
        "--out", default="images.png", metavar="FILE", help="for pictures (default: images.png)"
    ),
)
def show(args: Namespace) -> None:
    """Print the rows."""
    from maxstack.commands.show import show
    from maxstack.data import vocabulary

    cfg = load_config(args)
    vocabulary.learn(cfg)
    show(cfg, args.batches, args.rows, args.out, full=args.full, evaluation=args.eval)


main = group(
    "data",
    "Work on a run's data without training.",
    "data show configs/quickstart.yml",
    tokenizer,
    prepare,
    removed,
    show,
)
