"""The global order of a source: all its documents shuffled, anew each epoch, with random access and nothing to store."""

import functools
import hashlib

import numpy as np

from maxstack.data.sources import record_hashes

_SMALL = 1 << 16
_CACHED_ENTRIES = 1 << 20


class Order:
    """order[p] is the document at position p of an endless sequence of epochs.

    Grain shuffles large sources. Its index shuffle walks a domain of at least 65536 numbers, which takes milliseconds a document for sources of a
    few, so up to that size each epoch is the order of hashed numbers instead.
    """

    def __init__(self, seed: str, documents: int):
        self._seed, self._documents = seed, documents
        if documents > _SMALL:
            import grain
            self._grain = grain.MapDataset.range(documents).shuffle(seed=number(seed) >> 32).repeat()
        self._epoch = functools.lru_cache(max(2, _CACHED_ENTRIES // documents))(self._shuffled)

    def __getitem__(self, position: int) -> int:
        if self._documents > _SMALL:
            return int(self._grain[position])
        epoch, place = divmod(position, self._documents)
        return int(self._epoch(epoch)[place])

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.argsort(record_hashes(np.uint64(number(f"{self._seed} {epoch}")), self._documents), kind="stable")


def number(text: str) -> int:
    """A 64-bit hash, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
