"""The global order of a source: its documents, shuffled anew each epoch, by random access without
storage."""

import functools
from typing import Any

import numpy as np

from maxstack.data.documents import record_hashes, text_hash

SMALL = 1 << 16
EVEN, ROUNDS = "\x1f16 rounds", 16
"""What the key of a source has in it whose order is drawn in ROUNDS rounds."""
_CACHED_ENTRIES = 1 << 20


class Order:
    """order[p] is the document at position p of an endless sequence of epochs.

    Grain's index shuffle, a Feistel network, puts large sources in order. It walks a domain of at
    least 65536 numbers, which takes milliseconds a document for small sources, so up to that size
    each epoch is the order of hashed numbers instead. Of 4**k + 1 documents Grain 0.2.18 draws one
    twice and another never: there it shuffles all but the last, which is then exchanged with a
    document at a hashed index.

    The four rounds of grain.MapDataset.shuffle leave neighbours of a million documents correlated
    by 0.47, where numpy's permutation has 0.00 (EXPERIMENTS.md), and eight still by 0.02; from
    twelve on nothing is left but noise. Orders whose seed has no EVEN in it, of runs that began
    before, go on with four.
    """

    def __init__(self, seed: str, documents: int):
        self._seed, self._documents = seed, documents
        self._left_over = (
            documents > SMALL
            and (documents - 1).bit_count() == 1
            and documents.bit_length() % 2 == 1
        )
        if documents > SMALL:
            self._large = _sixteen_rounds if EVEN in seed else _four_rounds
        self._small = functools.lru_cache(max(2, _CACHED_ENTRIES // documents))(self._shuffled)

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self._documents)
        if self._documents <= SMALL:
            return int(self._small(epoch)[index])
        size = self._documents - self._left_over
        if self._left_over:
            last = self._documents - 1
            exchanged = text_hash(f"{self._seed} {epoch}") % self._documents
            if index == exchanged:
                return last
            index = exchanged if index == last else index
        return self._large(self._seed, size, epoch, index)

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.argsort(
            record_hashes(np.uint64(text_hash(f"{self._seed} {epoch}")), self._documents),
            kind="stable",
        )


def _sixteen_rounds(seed: str, documents: int, epoch: int, index: int) -> int:
    from grain.experimental import index_shuffle

    return index_shuffle(index, documents - 1, text_hash(f"{seed} {epoch}") >> 32, ROUNDS)


def _four_rounds(seed: str, documents: int, epoch: int, index: int) -> int:
    return int(_dataset(seed, documents)[epoch * documents + index])


@functools.lru_cache(maxsize=64)
def _dataset(seed: str, documents: int) -> Any:
    import grain

    return grain.MapDataset.range(documents).shuffle(seed=text_hash(seed) >> 32)
