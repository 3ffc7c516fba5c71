"""The rules of MassiveText (Rae et al. 2021, arXiv:2112.11446, appendix A.1)."""

import collections
import re
from collections.abc import Iterator

import numpy as np

from maxstack.data.filters.filter import Rules, hash_units, kind, ngrams
from maxstack.schema.filters import GopherQualityFilter, GopherRepetitionFilter

_BULLETS = tuple("\u2022\u2023\u25b6\u25c0\u25e6\u25a0\u25a1\u25aa\u25ab\u2013-*")
_ELLIPSES = "...", "\u2026"
_PARAGRAPHS = re.compile(r"\n\s*\n")


@kind(GopherQualityFilter)
class GopherQuality(Rules):
    """Rules of quality."""

    cfg: GopherQualityFilter

    def measure(self, text: str) -> Iterator[tuple[str, float]]:
        words = text.split()
        yield "min_words", len(words)
        yield "max_words", len(words)
        count = max(1, len(words))
        mean = sum(map(len, words)) / count
        yield "min_mean_word_length", mean
        yield "max_mean_word_length", mean
        yield "max_symbol_ratio", text.count("#") / count
        yield "max_symbol_ratio", sum(map(text.count, _ELLIPSES)) / count
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        bullets = sum(line.startswith(_BULLETS) for line in lines)
        yield "max_bullet_lines", bullets / max(1, len(lines))
        ellipses = sum(line.endswith(_ELLIPSES) for line in lines)
        yield "max_ellipsis_lines", ellipses / max(1, len(lines))
        yield "min_alphabetic_words", sum(any(map(str.isalpha, word)) for word in words) / count
        found = {word.lower().strip(".,;:!?\"'()") for word in words}
        yield "min_stop_words", len(found.intersection(self.cfg.stop_words))


@kind(GopherRepetitionFilter)
class GopherRepetition(Rules):
    """Rules of repetition."""

    cfg: GopherRepetitionFilter

    def measure(self, text: str) -> Iterator[tuple[str, float]]:
        total = max(1, len(text))
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        paragraphs = [part.strip() for part in _PARAGRAPHS.split(text) if part.strip()]
        for name, parts in ("line", lines), ("paragraph", paragraphs):
            again = _repeated(parts)
            yield f"duplicate_{name}s", len(again) / max(1, len(parts))
            yield f"duplicate_{name}_characters", sum(map(len, again)) / total
        words = text.split()
        hashes = hash_units(words)
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        ends = np.concatenate([[0], np.cumsum(lengths)])
        # Texts without repeats skip the longer lengths: 3.4 MB/s a core became 7.1.
        repeated = 1  # where no sequence occurs twice, no longer one does
        for size in (2, 3, 4):
            repeated = repeated and _top(hashes, ends, size)
            yield f"top_{size}_gram", repeated / total
        for size in range(5, 11):
            repeated = repeated and _covered(hashes, lengths, size)
            yield f"duplicate_{size}_grams", repeated / total


def _repeated(parts: list[str]) -> list[str]:
    """Return the parts that repeat an earlier one."""
    counts = collections.Counter(parts)
    return [part for part, count in counts.items() for _ in range(count - 1)]


def _top(hashes: np.ndarray, ends: np.ndarray, size: int) -> int:
    """Return the characters, with the spaces between words, in all occurrences of the most frequent
    n-gram, if it occurs twice or more; of several, of the longest."""
    _, first, counts = np.unique(ngrams(hashes, size), return_index=True, return_counts=True)
    # datatrove takes the longest n-gram even if it occurs once, which removes short texts.
    if not len(counts) or counts.max() < 2:
        return 0
    often = first[counts == counts.max()]
    return int(counts.max() * ((ends[often + size] - ends[often]).max() + size - 1))


def _covered(hashes: np.ndarray, lengths: np.ndarray, size: int) -> int:
    """Return the characters of the words in repeated n-grams, each word once."""
    grams = ngrams(hashes, size)
    again = np.ones(len(grams), np.int64)
    # The first occurrence repeats nothing.
    again[np.unique(grams, return_index=True)[1]] = 0
    if not again.any():
        return 0
    change = np.zeros(len(lengths) + 1, np.int64)
    # +1 where a repeated n-gram begins and -1 behind its end: the running sum is above 0 on words
    # that any of them covers, each counted once.
    change[: len(grams)] += again
    change[size : size + len(grams)] -= again
    return int(lengths[np.cumsum(change)[:-1] > 0].sum())
