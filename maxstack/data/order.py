"""The global order of a source: its documents, shuffled anew each epoch, by random access without
storage.

A stored permutation of a billion documents would take 8 GB and a pass to make, in every process. A
Feistel network (Luby and Rackoff 1988) is a permutation that is computed for one position at a
time: the halves of an index are mixed round by round with hashes of each other, seeded by source
and epoch. Grain's index shuffle is one. Its default of four rounds, as in grain.MapDataset.shuffle,
leaves neighbours of a million documents correlated by 0.47, where numpy's permutation has 0.00, and
eight rounds still by 0.02; from twelve on only noise is left (EXPERIMENTS.md), so orders are drawn
with sixteen. The network walks a domain of at least 65,536 numbers, which takes milliseconds a
document for small sources; up to that size the order of an epoch is that of hashed numbers.
"""

import functools
from typing import Any

import numpy as np

from maxstack.data.documents import record_hashes, text_hash

SMALL = 1 << 16
ROUNDS = 16
EVEN = "\x1f16 rounds"
"""Mark in the key of a source whose order is drawn in ROUNDS rounds. Runs that began before it was
introduced have keys without it, and go on with four."""
_CACHED_ENTRIES = 1 << 20


class Order:
    """order[p] is the document at position p of an endless sequence of epochs.

    Of 4**k + 1 documents Grain 0.2.18 draws one twice and another never. There it shuffles all but
    the last one, which is then exchanged with the document at a hashed index.
    """

    def __init__(self, seed: str, documents: int):
        self._seed = seed
        self._documents = documents
        self._left_over = (
            documents > SMALL
            # documents == 4**k + 1: one less is a power of two, and of four if the length is odd.
            and (documents - 1).bit_count() == 1
            and documents.bit_length() % 2 == 1
        )
        if documents > SMALL:
            self._large = _sixteen_rounds if EVEN in seed else _four_rounds
        # Two epochs at least: lanes pass from one to the next at different steps.
        self._small = functools.lru_cache(max(2, _CACHED_ENTRIES // documents))(self._shuffled)

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes get mixtures by pickle, and a cached function cannot be pickled.
        return Order, (self._seed, self._documents)  # without the cache

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self._documents)
        if self._documents <= SMALL:
            return int(self._small(epoch)[index])
        size = self._documents
        if self._left_over:
            size -= 1
            last = size
            exchanged = text_hash(f"{self._seed} {epoch}") % self._documents
            if index == exchanged:
                return last
            index = exchanged if index == last else index
        return self._large(self._seed, size, epoch, index)

    def _shuffled(self, epoch: int) -> np.ndarray:
        seed = np.uint64(text_hash(f"{self._seed} {epoch}"))
        return np.argsort(record_hashes(seed, self._documents), kind="stable")


def _sixteen_rounds(seed: str, documents: int, epoch: int, index: int) -> int:
    from grain.experimental import index_shuffle

    # Grain takes seeds of 32 bits.
    return index_shuffle(index, documents - 1, text_hash(f"{seed} {epoch}") >> 32, ROUNDS)


def _four_rounds(seed: str, documents: int, epoch: int, index: int) -> int:
    # Kept for runs that began with it: another order would repeat documents.
    return int(_dataset(seed, documents)[epoch * documents + index])


@functools.lru_cache(maxsize=64)
def _dataset(seed: str, documents: int) -> Any:
    import grain

    return grain.MapDataset.range(documents).shuffle(seed=text_hash(seed) >> 32)
