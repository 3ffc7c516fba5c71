"""Filters that compare all documents: exact and near duplicates.

A signature of each document is compared in place of its text: a hash of what counts, or MinHash
numbers (Broder 1997), of which two documents share as large a part as of their n-grams. Comparing
all pairs would be quadratic, so the numbers are cut into bands, documents are sorted by a hash of
each band, and only those with the same hash are compared number by number (locality-sensitive
hashing). Bands are as long as still finds _FOUND of the pairs at the threshold. Pairs that are
alike enough are edges of a graph, whose connected components are the clusters; the first document
of a cluster is kept.
"""

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from maxstack.data.filters.filter import hash_units, missing_package, ngrams, split_words
from maxstack.schema.filters import ExactDuplicatesFilter, NearDuplicatesFilter

_CHUNK = 1 << 16
_FOUND = 0.97
"""Share of the pairs at the threshold that bands must find."""
_SPACE, _PUNCTUATION = re.compile(r"\s+"), re.compile(r"(?:[^\w\s]|_)+")


def signatures(
    cfg: ExactDuplicatesFilter | NearDuplicatesFilter, texts: Sequence[str]
) -> np.ndarray:
    """Return [N, K] numbers: equal rows for equal texts, or MinHash signatures."""
    if isinstance(cfg, ExactDuplicatesFilter):
        keys = b"".join(_digest(cfg, text) for text in texts)
        return np.frombuffer(keys, np.uint64).reshape(-1, 2)
    from rensa import RMinHash

    grams = [shingles(cfg, text) for text in texts]
    ends = np.cumsum([0, *map(len, grams)]).astype(np.uint64)
    flat = np.concatenate([*grams, np.zeros(0, np.uint64)])
    made = RMinHash.digest_matrix_from_flat_token_hashes(flat, ends, cfg.permutations, cfg.seed)
    return np.array(made.to_rows(), np.uint32).reshape(-1, cfg.permutations)


def check_installed() -> None:
    """ConfigError if the package that makes signatures is not installed."""
    try:
        import rensa  # noqa: F401
    except ImportError as error:
        raise missing_package("rensa", "near_duplicates", error) from error


def signature_type(cfg: ExactDuplicatesFilter | NearDuplicatesFilter) -> tuple[int, type]:
    """Return how many numbers a signature has, and their type."""
    return (
        (2, np.uint64) if isinstance(cfg, ExactDuplicatesFilter) else (cfg.permutations, np.uint32)
    )


def shingles(cfg: NearDuplicatesFilter, text: str) -> np.ndarray:
    """Return a hash of each n-gram of a text, uint64; of a text that is shorter than an n-gram or
    has no words, one hash of the whole."""
    # The text itself if it has no words, or all texts of signs would be duplicates of each other.
    units = (split_words(text) if cfg.unit == "words" else [*text.lower()]) or [text]
    return ngrams(hash_units(units), max(1, min(cfg.ngram, len(units))))


def find_keepers(
    cfg: ExactDuplicatesFilter | NearDuplicatesFilter, signatures: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first document of each document's cluster, int64 [N], which is itself if it is
    kept, and their estimated similarity, float32 [N]."""
    count = len(signatures)
    labels = np.arange(count)
    if isinstance(cfg, ExactDuplicatesFilter):
        bands = [slice(0, 2)]
        threshold = 1.0
    else:
        bands = choose_bands(cfg.permutations, cfg.threshold)
        threshold = cfg.threshold
    for band in bands:
        order, starts = _sort_by_band(signatures, band)
        first = order[np.maximum.accumulate(np.where(starts, np.arange(count), 0))]
        # With the first of a run and with the neighbour alone, since all pairs of a run are
        # quadratic; clusters are joined from links, so most pairs need not be compared.
        for others in (first[~starts], np.roll(order, 1)[~starts]):
            # Pairs that are in one cluster by an earlier band cost no comparison.
            new = labels[order[~starts]] != labels[others]
            own = order[~starts][new]
            other = others[new]
            # An equal band only makes a candidate, which may be far below the threshold.
            alike = _similarity(signatures, own, other) >= threshold
            labels = _join_clusters(labels, own[alike], other[alike])
    # May be below the threshold, where links join two documents through others.
    return labels, _similarity(signatures, np.arange(count), labels)


def choose_bands(permutations: int, threshold: float) -> list[slice]:
    """Return bands of as many rows as find _FOUND of the pairs whose similarity is the threshold
    (Leskovec et al., Mining of Massive Datasets, section 3.4)."""

    def share_found(rows: int) -> float:
        return 1 - (1 - threshold**rows) ** (permutations // rows)

    rows = 1
    # Longer bands make fewer candidates, so take the longest that still find enough.
    while rows < permutations and share_found(rows + 1) >= _FOUND:
        rows += 1
    return [slice(at, at + rows) for at in range(0, permutations - rows + 1, rows)]


def _digest(cfg: ExactDuplicatesFilter, text: str) -> bytes:
    if "case" in cfg.ignore:
        text = text.casefold()
    if "punctuation" in cfg.ignore:
        without = _PUNCTUATION.sub("", text)
        text = without if without.strip() else text  # signs alone are what the text is
    if "whitespace" in cfg.ignore:
        text = _SPACE.sub(" ", text).strip()
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _sort_by_band(signatures: np.ndarray, band: slice) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents in the order of a band's hash and then of their place, and True for the
    first of each hash."""
    hashes = np.empty(len(signatures), np.uint64)
    # Chunks, since signatures are a map of a file that may be larger than memory.
    for at in range(0, len(signatures), _CHUNK):
        part = np.ascontiguousarray(signatures[at : at + _CHUNK, band].T).astype(np.uint64)
        hashes[at : at + _CHUNK] = ngrams(part, len(part))[0]
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    return order, np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]


def _similarity(signatures: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the share of equal numbers in the two rows of each pair."""
    made = np.empty(len(left), np.float32)
    for at in range(0, len(left), _CHUNK):
        part = slice(at, at + _CHUNK)
        made[part] = (signatures[left[part]] == signatures[right[part]]).mean(1)
    return made


def _join_clusters(labels: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the first document of each document's cluster after joining further pairs."""
    if not len(left):
        return labels
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(labels)
    rows = np.concatenate([np.arange(count), left])
    columns = np.concatenate([labels, right])
    graph = coo_array((np.ones(len(rows), np.int8), (rows, columns)), (count, count))
    _, component = connected_components(graph, directed=False)
    # The first document in the order of sources, so that the result depends on no engine.
    _, first = np.unique(component, return_index=True)
    return first[component]
