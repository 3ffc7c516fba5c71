"""Fill in the middle: documents in the order beginning, end, middle."""

import random
from typing import Any

import numpy as np

from maxstack.data.documents import Documents, Tokens, text_hash
from maxstack.data.long_texts import LONGEST
from maxstack.data.tokenizers import Tokenizer, name_errors, open_tokenizer, read_document, tokenize
from maxstack.errors import ConfigError
from maxstack.schema.data import Beyond, DataConfig
from maxstack.schema.mixture import FillInTheMiddleConfig


def marks(cfg: FillInTheMiddleConfig, tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Return ids of the tokens before beginning, middle and end. ConfigError if the tokenizer has
    none of them."""
    ids = []
    for key in ("prefix", "middle", "suffix"):
        token = tokenizer.id_of(getattr(cfg, key))
        if token is None:
            raise ConfigError(
                f"data.sources: fill_in_the_middle.{key}: data.tokenizer {tokenizer.name} has no "
                f"token {getattr(cfg, key)!r}; name the one that it has, or add it to the tokenizer"
            )
        ids.append(token)
    return ids[0], ids[1], ids[2]


def check_marks(cfg: DataConfig) -> None:
    """ConfigError if a source is infilled with marks that the tokenizer has not."""
    for source in cfg.sources:
        if source.fill_in_the_middle:
            marks(source.fill_in_the_middle, open_tokenizer(cfg.tokenizer))


def infill(
    documents: Documents,
    index: int,
    tokenizer: Tokenizer,
    cfg: FillInTheMiddleConfig,
    seed: str,
    longest: int = LONGEST,
    beyond: Beyond = "split",
) -> np.ndarray:
    """Return the ids of a document, int32; `seed` decides whether and where it is cut.

    PREFIX beginning SUFFIX end MIDDLE middle, or as SPM (v2 of the paper, which goes on from
    beginning to middle) PREFIX SUFFIX end MIDDLE beginning middle (Bavarian et al. 2022,
    arXiv:2207.14255, section 3 and appendix C). The parts of a text are encoded each by itself.
    """
    draw = random.Random(text_hash(seed))
    if draw.random() >= cfg.rate:
        return tokenize(documents, index, tokenizer, longest, beyond)
    prefix, middle, suffix = marks(cfg, tokenizer)
    with name_errors(documents, index):
        document = read_document(documents, index, longest, beyond)
        if isinstance(document, bytes):
            text = document.decode(errors="surrogateescape")
            parts = [part.encode(errors="surrogateescape") for part in _cut(text, draw)]
        else:
            ids = document.ids if isinstance(document, Tokens) else np.asarray(document)
            parts = _cut(tokenizer.without_ends(ids), draw)
        beginning, center, end = parts
        if draw.random() >= cfg.spm:
            return tokenizer.encode_parts([prefix, beginning, suffix, end, middle, center], longest)
        together = [beginning + center] if isinstance(document, bytes) else [beginning, center]
        return tokenizer.encode_parts([prefix, suffix, end, middle, *together], longest)


def _cut(whole: Any, draw: random.Random) -> list[Any]:
    """Return a text, or ids, in three parts."""
    first, second = sorted(draw.randint(0, len(whole)) for _ in range(2))
    return [whole[:first], whole[first:second], whole[second:]]
