"""Documents to batches: sources, tokenizers, packing into lanes, the feed. Importing this package
imports nothing heavy."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxstack.data.feed import Feed
    from maxstack.schema.data import DataConfig


def make_feed(
    cfg: "DataConfig",
    lanes: Sequence[int],
    batch_size: int,
    *,
    evaluation: bool = False,
    whole: bool = False,
    fields: Collection[str] = (),
) -> "Feed":
    """The batches of `cfg`, rows `lanes` of each global batch of `batch_size` rows, with at least
    the `fields` that an objective needs.

    Training repeats forever. With `evaluation` the held-out documents pass once, in order, and
    batches carry `bytes`, how many bytes of text each target stands for (NaN: not known); rows past
    the end are padding. `whole` also evaluates all documents of sources that hold nothing out (for
    `eval.data`). DataError if a source or tokenizer cannot be used.
    """
    from maxstack.data.feed import Feed

    return Feed(cfg, lanes, batch_size, evaluation=evaluation, whole=whole, fields=fields)


def fits(cfg: "DataConfig", vocab: int) -> None:
    """DataError if the tokenizer of `cfg`, which synthetic sources do not need, has ids beyond a
    model's `vocab` embedding rows."""
    from maxstack.data.tokenizers import check_fits, open_tokenizer

    if any(source.kind != "synthetic" for source in cfg.sources):
        check_fits(open_tokenizer(cfg.tokenizer), vocab)
