"""The global order of a source: its documents, shuffled anew each epoch, by random access without
storage."""

import functools

import numpy as np

from maxstack.data.documents import record_hashes, text_hash

_SMALL = 1 << 16
_CACHED_ENTRIES = 1 << 20


class Order:
    """order[p] is the document at position p of an endless sequence of epochs.

    Grain shuffles large sources. Its index shuffle walks a domain of at least 65536 numbers, which
    takes milliseconds a document for small sources, so up to that size each epoch is the order of
    hashed numbers instead. Of 4**k + 1 documents Grain 0.2.18 draws one twice and another never:
    there it shuffles all but the last, which is then exchanged with a document at a hashed index.
    """

    def __init__(self, seed: str, documents: int):
        self._seed, self._documents = seed, documents
        self._left_over = (
            documents > _SMALL
            and (documents - 1).bit_count() == 1
            and documents.bit_length() % 2 == 1
        )
        if documents > _SMALL:
            import grain

            self._large = grain.MapDataset.range(documents - self._left_over).shuffle(
                seed=text_hash(seed) >> 32
            )
        self._small = functools.lru_cache(max(2, _CACHED_ENTRIES // documents))(self._shuffled)

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self._documents)
        if self._documents <= _SMALL:
            return int(self._small(epoch)[index])
        if self._left_over:
            last = self._documents - 1
            exchanged = text_hash(f"{self._seed} {epoch}") % self._documents
            if index == exchanged:
                return last
            index = exchanged if index == last else index
        return int(self._large[epoch * len(self._large) + index])

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.argsort(
            record_hashes(np.uint64(text_hash(f"{self._seed} {epoch}")), self._documents),
            kind="stable",
        )
