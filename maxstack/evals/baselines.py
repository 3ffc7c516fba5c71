"""Bits per byte of simple compressors on the held-out documents: the numbers that a small model's
bits per byte stand beside."""

import gzip
from collections.abc import Iterable

import numpy as np

from maxstack.data.documents import Documents
from maxstack.data.quarantine import Quarantine
from maxstack.data.sources import open_sources
from maxstack.data.tokenizers import Tokenizer, open_tokenizer, sized_tokens_of
from maxstack.errors import DataError
from maxstack.schema.data import DataConfig

_LONGEST_STRETCH = 1 << 22


def baselines(
    train: DataConfig, evaluation: DataConfig | None = None, train_bytes: int = 20_000_000
) -> dict[str, float]:
    """Bits per byte on the held-out documents of `train`, or on `evaluation` (eval.data) where
    given.

    `gzip`: `gzip -9` of each document on its own. `order2`: the probability of a byte after the two
    before it, from counts in at most `train_bytes` of the training documents, interpolated with
    orders 1 and 0 by method C of Witten and Bell (IEEE Trans. Inf. Theory 37(4), 1991).
    """
    held_cfg = evaluation or train
    held = [
        text
        for text in texts_of(
            held_cfg, open_sources(held_cfg, evaluation=True, whole=evaluation is not None)
        )
        if text
    ]
    total = sum(map(len, held))
    if not total:
        raise DataError("the held-out documents are all empty: there is nothing to compare with")
    zipped = sum(len(gzip.compress(text, 9)) for text in held)
    model = Order2(_limited(texts_of(train, open_sources(train), shuffle=True), train_bytes))
    return {"gzip": 8 * zipped / total, "order2": sum(model.bits(text) for text in held) / total}


class Order2:
    """A static model of a byte given the two before it; a document begins after two zero bytes."""

    def __init__(self, texts: Iterable[bytes]):
        counts = np.zeros(1 << 24, np.int32)
        for stretch in _stretches(texts):
            counts += np.bincount(stretch, minlength=1 << 24).astype(np.int32)
        self._counts: list[np.ndarray] = [counts.reshape(65536, 256)]
        self._counts.append(self._counts[0].reshape(256, 256, 256).sum(0, np.int64))
        self._counts.append(self._counts[1].sum(0, keepdims=True))
        self._totals = [table.sum(1, np.int64) for table in self._counts]
        self._kinds = [np.count_nonzero(table, axis=1) for table in self._counts]

    def bits(self, text: bytes) -> float:
        """The length of the ideal code of a text, in bits."""
        pairs = _trigrams(text)
        chance = np.full(len(text), 1 / 256)
        for order, contexts in ((0, 1), (1, 256), (2, 65536)):
            context, byte = pairs // 256 % contexts, pairs % 256
            seen, total, kinds = (
                self._counts[2 - order][context, byte],
                self._totals[2 - order][context],
                self._kinds[2 - order][context],
            )
            chance = np.where(
                total > 0, (seen + kinds * chance) / np.maximum(total + kinds, 1), chance
            )
        return float(-np.log2(chance).sum())


def _trigrams(text: bytes) -> np.ndarray:
    data = np.frombuffer(b"\0\0" + text, np.uint8).astype(np.int32)
    return data[:-2] * 65536 + data[1:-1] * 256 + data[2:]


def _stretches(texts: Iterable[bytes]) -> Iterable[np.ndarray]:
    """Trigrams of many texts together, so that few tables are added."""
    waiting: list[np.ndarray] = []
    size = 0
    for text in texts:
        waiting.append(_trigrams(text))
        size += len(text)
        if size > _LONGEST_STRETCH:
            yield np.concatenate(waiting)
            waiting, size = [], 0
    if waiting:
        yield np.concatenate(waiting)


def texts_of(cfg: DataConfig, sources: list[Documents], shuffle: bool = False) -> Iterable[bytes]:
    """The texts of all documents as UTF-8, in their order or in one drawn by seed 0; those that
    cannot be read count by data.quarantine."""
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
        yield document if isinstance(document, bytes) else _decoded(source, index, tokenizer)


def _decoded(source: Documents, index: int, tokenizer: Tokenizer) -> bytes:
    """The text of a document of tokens. DataError where decoding does not give it back."""
    ids, sizes = sized_tokens_of(source, index, tokenizer)
    text = tokenizer.decode(ids)
    if len(text) != sizes.sum(dtype=np.float64):
        raise DataError(
            f"{source.where(index)}: tokens of {tokenizer.name}, which do not give their "
            "text back, so that compressors have nothing to be measured on"
        )
    return text


def _limited(texts: Iterable[bytes], limit: int) -> Iterable[bytes]:
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return
