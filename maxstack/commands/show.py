"""Prints or draws the model's input, for `maxstack data show`."""

import itertools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from maxstack.data.examples import OF_SEQUENCES
from maxstack.data.feed import Feed
from maxstack.data.lanes import Batch
from maxstack.data.tokenizers import Tokenizer, open_tokenizer
from maxstack.schema.objective import RowField

if TYPE_CHECKING:
    from maxstack.schema.config import Config

SHOWN = 240
"""Characters that are printed of the beginning and of the end of a long document."""
BOLD = "\033[1m"
CYAN = "\033[36m"
FAINT = "\033[2m"
GREEN = "\033[32m"


def show(cfg: "Config", batches: int, rows: int, out: str, *, full: bool, evaluation: bool) -> None:
    """Print the first rows of the first batches: decoded documents, their boundaries, which targets
    count, and padding. For images, print the classes and draw them into the PNG file `out`.
    `evaluation`: show the batches of evaluation."""
    data = cfg.data
    batch_size = cfg.train.batch_size
    if evaluation:
        data = cfg.eval.data or data
        batch_size = cfg.eval.batch_size or batch_size
    feed = Feed(
        data,
        range(min(rows, batch_size)),
        batch_size,
        evaluation=evaluation,
        whole=evaluation and cfg.eval.data is not None,
        fields=_fields(cfg),
    )
    if cfg.model.tokens is not None:
        return _draw(feed, batches, out)
    tokenizer = open_tokenizer(data.tokenizer)
    print("\n".join(feed.describe()))
    print(_ends(tokenizer))
    if cfg.train.epochs and not evaluation:
        print("train.epochs: training also moves documents between rows, so that all end together")
    try:
        for number in range(batches):
            batch = next(feed)
            for line in feed.skipped():
                print(line, file=sys.stderr)
            for i in range(len(batch["tokens"])):
                row = {key: array[i] for key, array in batch.items()}
                title = f"\nbatch {number}, row {i} of {batch_size}"
                print(_style(BOLD, title), _summary(row))
                _print_row(row, tokenizer, full)
    finally:
        feed.close()


def _ends(tokenizer: Tokenizer) -> str:
    """Describe the tokens that begin and end documents."""
    begins, ends = (
        " ".join(map(tokenizer.text_of, ids)) or "nothing" for ids in (tokenizer.bos, tokenizer.eos)
    )
    return f"documents begin with {begins} and end with {ends} (data.tokenizer.bos, .eos)"


def _fields(cfg: "Config") -> Mapping[str, RowField]:
    """Return the arrays of rows beside tokens, of text by the objective's section alone, since
    objectives import jax; rollouts have none before sampling."""
    if cfg.model.tokens is None:
        return {} if cfg.rollout else cfg.objective.row_fields
    from maxstack.objectives.objective import objective_of

    return objective_of(cfg).fields


def _draw(feed: Feed, batches: int, out: str) -> None:
    """Draw pictures as a grid with a batch per row, and print their classes."""
    from maxstack.data.images import image_grid

    print("\n".join(feed.describe()))
    pictures = []
    try:
        for number in range(batches):
            batch = next(feed)
            for line in feed.skipped():
                print(line, file=sys.stderr)
            real = batch["real"] > 0
            pictures.append(batch["image"])
            print(f"batch {number}: classes {' '.join(map(str, batch['label'][real]))}")
    finally:
        feed.close()
    image_grid(np.concatenate(pictures), len(pictures[0])).save(out)
    print(out)


def _summary(row: Batch) -> str:
    length = len(row["tokens"])
    used = int((row["segments"] > 0).sum())
    return (
        f"({length} tokens: {used} in {row['segments'].max()} documents, {length - used} padding; "
        f"{int(row['mask'].sum())} targets)"
    )


def _print_row(row: Batch, tokenizer: Tokenizer, full: bool) -> None:
    for segment in range(1, int(row["segments"].max()) + 1):
        columns = np.flatnonzero(row["segments"] == segment)
        first = columns[0]
        last = columns[-1]
        line = (
            f"-- document {segment}: columns {first}..{last}, positions "
            f"{row['positions'][first]}..{row['positions'][last]}, "
            f"{int(row['mask'][columns].sum())} of {len(columns)} targets count"
            + "".join(f", {name} {row[name][first]:g}" for name in OF_SEQUENCES if name in row)
            + " --"
        )
        print(_style(CYAN, line))
        ids = np.append(row["tokens"][columns], row["targets"][last])
        counted = np.append(False, row["mask"][columns] > 0)
        if "ends" in row:
            # What counts is the score at an input; its target has no meaning.
            ids, counted = ids[:-1], counted[1:]
        if ids.max() >= tokenizer.vocab_size:
            text = " ".join(map(str, ids))
        elif counted[1:].all():
            text = tokenizer.decode(ids).decode(errors="replace")
        else:
            print(_marked(ids, counted, tokenizer))
            continue
        if not full and (left_out := len(text) - 2 * SHOWN) > 0:
            gap = _style(FAINT, f" [... {left_out} characters ...] ")
            print(_visible(text[:SHOWN]) + gap + _visible(text[-SHOWN:]))
        else:
            print(_visible(text))


def _marked(ids: np.ndarray, counted: np.ndarray, tokenizer: Tokenizer) -> str:
    """Decode ids with their special tokens, and mark what counts: [[so]], or in green on a
    terminal."""
    parts = []
    for counts, group in itertools.groupby(range(len(ids)), key=lambda i: bool(counted[i])):
        text = ""
        for special, run in itertools.groupby(
            group, key=lambda i: int(ids[i]) in tokenizer.special
        ):
            own = ids[[*run]]
            if special:
                text += "".join(tokenizer.special[int(token)] for token in own)
            else:
                text += tokenizer.decode(own).decode(errors="replace")
        text = _visible(text)
        if counts:
            text = _style(GREEN, text) if sys.stdout.isatty() else f"[[{text}]]"
        parts.append(text)
    return "".join(parts)


def _visible(text: str) -> str:
    """Escape control characters, so that none reaches the terminal."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text
    )


def _style(style: str, text: str) -> str:
    return f"{style}{text}\033[0m" if sys.stdout.isatty() else text
