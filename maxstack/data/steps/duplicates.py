"""Steps that compare all documents with each other: keys or signatures of each, and which
document each duplicate stands behind."""

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from maxstack.data.steps.step import hashes_of, missing, ngrams, words_of
from maxstack.schema.steps import ExactDuplicatesStep, NearDuplicatesStep

_CHUNK = 1 << 16
_FOUND = 0.97
"""Share of the pairs at the threshold that bands must find."""
_SPACE, _PUNCTUATION = re.compile(r"\s+"), re.compile(r"(?:[^\w\s]|_)+")


def signatures(cfg: ExactDuplicatesStep | NearDuplicatesStep, texts: Sequence[str]) -> np.ndarray:
    """[N, K] of numbers: equal rows for equal texts, or MinHash signatures."""
    if isinstance(cfg, ExactDuplicatesStep):
        keys = b"".join(_digest(cfg, text) for text in texts)
        return np.frombuffer(keys, np.uint64).reshape(-1, 2)
    from rensa import RMinHash

    grams = [shingles(cfg, text) for text in texts]
    ends = np.cumsum([0, *map(len, grams)]).astype(np.uint64)
    flat = np.concatenate([*grams, np.zeros(0, np.uint64)])
    made = RMinHash.digest_matrix_from_flat_token_hashes(flat, ends, cfg.permutations, cfg.seed)
    return np.array(made.to_rows(), np.uint32).reshape(-1, cfg.permutations)


def check_installed() -> None:
    """ConfigError where what makes signatures is not installed."""
    try:
        import rensa  # noqa: F401
    except ImportError as error:
        raise missing("rensa", "near_duplicates", error) from error


def width(cfg: ExactDuplicatesStep | NearDuplicatesStep) -> tuple[int, type]:
    """Numbers of a signature, and their type."""
    return (2, np.uint64) if isinstance(cfg, ExactDuplicatesStep) else (cfg.permutations, np.uint32)


def shingles(cfg: NearDuplicatesStep, text: str) -> np.ndarray:
    """uint64: a hash of each n-gram of a text, or of all of a short text, or one without words."""
    units = (words_of(text) if cfg.unit == "words" else [*text.lower()]) or [text]
    return ngrams(hashes_of(units), max(1, min(cfg.ngram, len(units))))


def keepers(
    cfg: ExactDuplicatesStep | NearDuplicatesStep, signatures: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of each document, int64 [N]: the first one of its cluster, itself where it is kept; and
    float32 [N]: its estimated similarity to it."""
    count = len(signatures)
    labels = np.arange(count)
    if isinstance(cfg, ExactDuplicatesStep):
        bands, threshold = [slice(0, 2)], 1.0
    else:
        bands, threshold = banded(cfg.permutations, cfg.threshold), cfg.threshold
    for band in bands:
        order, starts = _buckets(signatures, band)
        first = order[np.maximum.accumulate(np.where(starts, np.arange(count), 0))]
        for other in (first[~starts], np.roll(order, 1)[~starts]):
            own = order[~starts]
            new = labels[own] != labels[other]
            own, other = own[new], other[new]
            alike = _similarity(signatures, own, other) >= threshold
            labels = _joined(labels, own[alike], other[alike])
    return labels, _similarity(signatures, np.arange(count), labels)


def banded(permutations: int, threshold: float) -> list[slice]:
    """Bands of as many rows as find _FOUND of the pairs whose similarity is the threshold (Leskovec
    et al., Mining of Massive Datasets, section 3.4)."""
    rows = 1
    while rows < permutations and found(permutations, rows + 1, threshold) >= _FOUND:
        rows += 1
    return [slice(at, at + rows) for at in range(0, permutations - rows + 1, rows)]


def found(permutations: int, rows: int, similarity: float) -> float:
    """Share of pairs of a similarity that are alike in all rows of some band."""
    return 1 - (1 - similarity**rows) ** (permutations // rows)


def _digest(cfg: ExactDuplicatesStep, text: str) -> bytes:
    if "case" in cfg.ignore:
        text = text.casefold()
    if "punctuation" in cfg.ignore:
        without = _PUNCTUATION.sub("", text)
        text = without if without.strip() else text  # signs alone are what the text is
    if "whitespace" in cfg.ignore:
        text = _SPACE.sub(" ", text).strip()
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _buckets(signatures: np.ndarray, band: slice) -> tuple[np.ndarray, np.ndarray]:
    """Documents ordered by a band and then by their place, and True where a bucket begins."""
    hashes = np.empty(len(signatures), np.uint64)
    for at in range(0, len(signatures), _CHUNK):
        part = np.ascontiguousarray(signatures[at : at + _CHUNK, band].T).astype(np.uint64)
        hashes[at : at + _CHUNK] = ngrams(part, len(part))[0]
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    return order, np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]


def _similarity(signatures: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Share of equal numbers in two rows, of each pair."""
    made = np.empty(len(left), np.float32)
    for at in range(0, len(left), _CHUNK):
        part = slice(at, at + _CHUNK)
        made[part] = (signatures[left[part]] == signatures[right[part]]).mean(1)
    return made


def _joined(labels: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The least document of each cluster, with further pairs."""
    if not len(left):
        return labels
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(labels)
    rows, columns = np.concatenate([np.arange(count), left]), np.concatenate([labels, right])
    graph = coo_array((np.ones(len(rows), np.int8), (rows, columns)), (count, count))
    _, component = connected_components(graph, directed=False)
    _, first = np.unique(component, return_index=True)
    return first[component]
