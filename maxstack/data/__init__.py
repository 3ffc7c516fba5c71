"""Documents to batches: sources, tokenizers, packing into lanes, the feed. Importing this package
imports nothing heavy."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxstack.schema.data import DataConfig


def fits(cfg: "DataConfig", vocab: int) -> None:
    """DataError if the tokenizer of `cfg`, which synthetic sources do not need, has ids beyond a
    model's `vocab` embedding rows."""
    from maxstack.data.tokenizers import check_fits, open_tokenizer

    if any(source.kind != "synthetic" for source in cfg.sources):
        check_fits(open_tokenizer(cfg.tokenizer), vocab)
