"""The vocabulary of a run: learning a SentencePiece model from its documents, and the check that a
model has a row for each id."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from maxstack.config import storage
from maxstack.data.sources import open_sources
from maxstack.data.tokenizers import check_fits, open_tokenizer
from maxstack.errors import ConfigError, DataError
from maxstack.report.progress import progress
from maxstack.schema.data import DataConfig, SentencePieceTokenizer

if TYPE_CHECKING:
    from maxstack.schema.config import Config

_LONGEST_LINE = 4000
_MEGABYTES = 20
"""Text from which data.tokenizer.learn learns at most."""


def check_vocabulary(cfg: DataConfig, vocab: int) -> None:
    """DataError if the tokenizer of data, which synthetic sources do not need, has ids beyond a
    model's `vocab` embedding rows."""
    if any(source.kind != "synthetic" for source in cfg.sources):
        check_fits(open_tokenizer(cfg.tokenizer), vocab)


def learn_vocabulary(cfg: "Config") -> None:
    """Write the tokenizer that a configuration wants learnt, where it is not there and the run has
    no checkpoints, whose weights would be of another."""
    tokenizer = cfg.data.tokenizer
    if not isinstance(tokenizer, SentencePieceTokenizer) or tokenizer.learn is None:
        return
    begun = Path(cfg.run.output_dir, cfg.run.name, "checkpoints").exists()
    if storage.kind(tokenizer.path) is None and not begun:
        size = train_vocabulary(
            cfg.data.model_copy(update={"steps": []}),
            tokenizer.path,
            vocab=tokenizer.learn,
            megabytes=_MEGABYTES,
            most=True,
            key="data.tokenizer.learn",
        )
        print(f"{tokenizer.path}: {size} tokens, learnt from the training documents", flush=True)


def train_vocabulary(
    cfg: DataConfig,
    out: str,
    *,
    vocab: int,
    model: str = "bpe",
    megabytes: int = 100,
    most: bool = False,
    key: str = "--vocab",
) -> int:
    """Write a SentencePiece model of `vocab` tokens, which `key` asks for, or where that is the
    `most` of as many as there are, learnt from at most `megabytes` of the training documents -> how
    many it has.

    Text is kept as it is (no normalisation, spaces and line ends are tokens like others) and
    unknown characters fall back to bytes, so that decoding inverts encoding. NUL alone is left out
    of the training text, since the trainer ends a line there. DataError if a document is not UTF-8,
    ConfigError if the text does not yield `vocab` tokens.
    """
    import sentencepiece

    learnt = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(cfg, megabytes * 1_000_000),
            model_writer=learnt,
            vocab_size=vocab,
            hard_vocab_limit=not most,
            model_type=model,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            split_digits=True,
            max_sentence_length=8 * _LONGEST_LINE,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain(error, f"{key} {vocab}", key) from error
    with storage.replacing(out) as unfinished:
        unfinished.write_bytes(learnt.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=learnt.getvalue()).vocab_size()


def _explain(error: RuntimeError, asked: str, key: str) -> ValueError:
    """SentencePiece names the sizes that are possible in its message alone."""
    if too_many := re.search(r"too high.*<= *(\d+)", str(error), re.DOTALL):
        return ConfigError(
            f"{asked}: this text yields {too_many[1]} tokens at most; use a {key} of at most "
            f"{too_many[1]}, or more text"
        )
    if too_few := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
        return ConfigError(
            f"{asked}: the 256 bytes, the special tokens and the characters of this text are "
            f"{too_few[1]} tokens already; use a {key} above {too_few[1]}"
        )
    return DataError(f"{asked}: SentencePiece cannot learn them from this text: {error}")


def _lines(cfg: DataConfig, limit: int) -> Iterator[str]:
    """Yield lines of documents in random order until `limit` bytes, with a progress bar."""
    documents = [(source, index) for source in open_sources(cfg) for index in range(len(source))]
    with progress(len(documents), "reading", "documents") as bar:
        for i in np.random.default_rng(cfg.seed).permutation(len(documents)):
            source, index = documents[i]
            document = source[index]
            if not isinstance(document, bytes):
                raise DataError(
                    f"{source.where(index)}: these are tokens; a tokenizer is learnt from text "
                    "sources; give the one that made them, or data.tokenizer={kind: bytes}"
                )
            try:
                text = document.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{source.where(index)}: not UTF-8 at byte {error.start}; exclude the document"
                ) from error
            for line in text.split("\n"):
                for at in range(0, len(line), _LONGEST_LINE):
                    yield line[at : at + _LONGEST_LINE].replace("\0", "")
            bar.update()
            limit -= len(document)
            if limit <= 0:
                break
        bar.set_description("learning")
