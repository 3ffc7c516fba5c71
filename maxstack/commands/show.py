"""Printing what a config feeds the model."""

import sys

import numpy as np

from maxstack.data import make_feed
from maxstack.data.lanes import Batch
from maxstack.data.tokenizers import Tokenizer, open_tokenizer
from maxstack.schema.data import DataConfig

_SHOWN = 240
_STYLES = {"head": "\033[1m", "mark": "\033[36m", "faint": "\033[2m"}


def show(
    cfg: DataConfig,
    batch_size: int,
    *,
    batches: int = 1,
    rows: int = 4,
    full: bool = False,
    evaluation: bool = False,
    whole: bool = False,
) -> None:
    """Print the first rows of the first batches: each document of a row decoded, where it begins,
    which targets count, the padding."""
    feed = make_feed(
        cfg, range(min(rows, batch_size)), batch_size, evaluation=evaluation, whole=whole
    )
    tokenizer = open_tokenizer(cfg.tokenizer)
    print("\n".join(feed.describe()))
    try:
        for number in range(batches):
            batch = next(feed)
            for line in feed.damaged():
                print(line, file=sys.stderr)
            for row in range(len(batch["tokens"])):
                print(
                    _styled("head", f"\nbatch {number}, row {row} of {batch_size}"),
                    _summary({key: array[row] for key, array in batch.items()}),
                )
                _print_row({key: array[row] for key, array in batch.items()}, tokenizer, full)
    finally:
        feed.close()


def _summary(row: Batch) -> str:
    used = int((row["segments"] > 0).sum())
    return (
        f"({len(row['tokens'])} tokens: {used} in {row['segments'].max()} documents, "
        f"{len(row['tokens']) - used} padding; "
        f"{int(row['mask'].sum())} targets)"
    )


def _print_row(row: Batch, tokenizer: Tokenizer, full: bool) -> None:
    for segment in range(1, int(row["segments"].max()) + 1):
        at = np.flatnonzero(row["segments"] == segment)
        counted = int(row["mask"][at].sum())
        print(
            _styled(
                "mark",
                f"-- document {segment}: columns {at[0]}..{at[-1]}, positions "
                f"{row['positions'][at[0]]}..{row['positions'][at[-1]]}, "
                f"{counted} of {len(at)} targets count --",
            )
        )
        ids = np.append(row["tokens"][at], row["targets"][at[-1]])
        text = (
            tokenizer.decode(ids).decode(errors="replace")
            if ids.max() < tokenizer.vocab_size
            else " ".join(map(str, ids))
        )
        print(
            _visible(text)
            if full or len(text) <= 2 * _SHOWN
            else _visible(text[:_SHOWN])
            + _styled("faint", f" [... {len(text) - 2 * _SHOWN} characters ...] ")
            + _visible(text[-_SHOWN:])
        )


def _visible(text: str) -> str:
    """Control characters from documents never reach the terminal."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text
    )


def _styled(style: str, text: str) -> str:
    return f"{_STYLES[style]}{text}\033[0m" if sys.stdout.isatty() else text
