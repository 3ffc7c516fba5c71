"""Bits per byte of simple compressors on the held-out documents, beside which a small model's bits
per byte stand.

`gzip` is `gzip -9` of each document on its own. `order2` is the probability of a byte after the two
before it, from counts in the training documents, interpolated with orders 1 and 0 by method C of
Witten and Bell (IEEE Trans. Inf. Theory 37(4), 1991): a context seen n times with k different bytes
gives the share k / (n + k) to the next shorter one.
"""

import gzip
from collections.abc import Iterable

import numpy as np

from maxstack.data.documents import Documents
from maxstack.data.quarantine import Quarantine
from maxstack.data.sources import open_sources
from maxstack.data.tokenizers import Tokenizer, open_tokenizer, tokenize_with_sizes
from maxstack.errors import DataError
from maxstack.schema.data import DataConfig

TRAIN_BYTES = 20_000_000
"""Bytes of training documents that are counted at most."""


def baselines(train: DataConfig, evaluation: DataConfig | None = None) -> dict[str, float]:
    """Return bits per byte on the held-out documents of `train`, or on `evaluation` (eval.data)
    where given."""
    cfg = evaluation or train
    sources = open_sources(cfg, evaluation=True, whole=evaluation is not None)
    held = [text for text in texts_of(cfg, sources) if text]
    total = sum(map(len, held))
    if not total:
        raise DataError("the held-out documents are all empty: there is nothing to compare with")
    zipped = sum(len(gzip.compress(text, 9)) for text in held)
    # Shuffled, so that the bytes that are counted come from all over the training documents.
    model = Order2(_limit(texts_of(train, open_sources(train), shuffle=True), TRAIN_BYTES))
    return {"gzip": 8 * zipped / total, "order2": sum(model.bits(text) for text in held) / total}


class Order2:
    """A static model of a byte given the two before it; a document begins after two zero bytes."""

    def __init__(self, texts: Iterable[bytes]):
        trigrams = np.concatenate([_trigrams(b""), *map(_trigrams, texts)])
        # All three orders in one table of 2**24 counts: the lower orders are sums of it.
        triples = np.bincount(trigrams, minlength=1 << 24)
        pairs = triples.reshape(256, 256, 256).sum(0)
        tables = pairs.sum(0, keepdims=True), pairs, triples.reshape(-1, 256)
        self._orders = [(table, table.sum(1), np.count_nonzero(table, axis=1)) for table in tables]
        """Counts [contexts, 256], and by context their sum and the number of different bytes, from
        order 0 to 2."""

    def bits(self, text: bytes) -> float:
        """Return the length of a text's ideal code in bits."""
        trigrams = _trigrams(text)
        byte = trigrams % 256
        # Below order 0 every byte is equally likely, so no byte of a text has probability 0.
        chance = np.full(len(text), 1 / 256)
        for counts, totals, kinds in self._orders:
            # Order 0 has one context, order 1 as many as bytes, order 2 as many as pairs: the
            # remainder picks the right one in each.
            context = trigrams // 256 % len(counts)
            total, kind = totals[context], kinds[context]
            mixed = (counts[context, byte] + kind * chance) / np.maximum(total + kind, 1)
            chance = np.where(total > 0, mixed, chance)
        return float(-np.log2(chance).sum())


def _trigrams(text: bytes) -> np.ndarray:
    data = np.frombuffer(b"\0\0" + text, np.uint8).astype(np.int32)
    return data[:-2] * 65536 + data[1:-1] * 256 + data[2:]


def texts_of(cfg: DataConfig, sources: list[Documents], shuffle: bool = False) -> Iterable[bytes]:
    """Yield all documents as UTF-8, in their order or shuffled by seed 0; those that cannot be read
    count by data.quarantine."""
    tokenizer = open_tokenizer(cfg.tokenizer)
    places = [(source, index) for source in sources for index in range(len(source))]
    order = np.random.default_rng(0).permutation(len(places)) if shuffle else range(len(places))
    quarantine = Quarantine(cfg.quarantine, "data.quarantine")
    for i in order:
        source, index = places[i]
        try:
            document = source[index]
        except DataError as error:
            quarantine.add(source.where(index), str(error))
            continue
        yield document if isinstance(document, bytes) else _decode(source, index, tokenizer)


def _decode(source: Documents, index: int, tokenizer: Tokenizer) -> bytes:
    """Return the text of a document of tokens. DataError where decoding does not give it back."""
    ids, sizes = tokenize_with_sizes(source, index, tokenizer)
    text = tokenizer.decode(ids)
    # Tokenizers that normalize lose bytes; compressors would be measured on another text than the
    # model.
    if len(text) != sizes.sum(dtype=np.float64):
        raise DataError(
            f"{source.where(index)}: tokens of {tokenizer.name}, which do not give their text "
            "back, so compressors have nothing to be measured on"
        )
    return text


def _limit(texts: Iterable[bytes], limit: int) -> Iterable[bytes]:
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return
