"""Suggestions for a misspelt word: the nearest words by edit distance, and the sentence that offers
them."""

import os
from collections.abc import Iterable

LONGEST = 200


def edits(a: str, b: str) -> int:
    """Number of insertions, deletions, substitutions and swaps of neighbours from `a` to `b`, with
    no letter edited twice (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, char in enumerate(a, 1):
        above, row = row, [i]
        for j, other in enumerate(b, 1):
            substituted = above[j - 1] if char == other else above[j - 1] + 1
            best = min(above[j] + 1, row[j - 1] + 1, substituted)
            if i > 1 and j > 1 and char == b[j - 2] and other == a[i - 2]:
                best = min(best, before[j - 2] + 1)
            row.append(best)
        before = above
    return row[-1]


def nearest(word: object, words: Iterable[str], count: int = 1) -> list[str]:
    """At most `count` of the words that may have been meant by `word`, best first. A word is near
    if at most a third of the longer word's letters differ; a word that begins with `word` counts as
    one edit away. Ties are broken by the longest common beginning, the longest common end, and the
    nearest letters, so that int9 suggests int8. If none is near: words that `word` abbreviates, as
    lr does learning_rate, or that abbreviate it."""
    typed = str(word).lower()
    if len(typed) > LONGEST:
        return []
    near: list[tuple[tuple[int, ...], str]] = []
    abbreviations: list[tuple[tuple[int, ...], str]] = []
    for candidate in dict.fromkeys(map(str, words)):
        name = candidate.lower()
        most = max(1, max(len(typed), len(name)) // 3)
        distance = edits(typed, name) if abs(len(typed) - len(name)) <= most else most + 1
        if len(typed) > 2 and name.startswith(typed):
            distance = min(distance, 1)
        if distance <= most:
            start = len(os.path.commonprefix([typed, name]))
            end = len(os.path.commonprefix([typed[::-1], name[::-1]]))
            apart = sum(abs(ord(a) - ord(b)) for a, b in zip(typed, name, strict=False))
            near.append(((distance, -start, -end, apart), candidate))
        elif _abbreviates(typed, name) or _abbreviates(name, typed):
            abbreviations.append(((abs(len(typed) - len(name)),), candidate))
    ranked = sorted(near or abbreviations, key=lambda entry: entry[0])
    return [candidate for _, candidate in ranked[:count]]


def did_you_mean(word: object, words: Iterable[str], count: int = 1) -> str:
    """`; did you mean X or Y?` with at most `count` of the words; "" if none is near."""
    best = nearest(word, words, count)
    return f"; did you mean {' or '.join(best)}?" if best else ""


def _abbreviates(short: str, long: str) -> bool:
    """Whether the letters of `short` occur in `long` in order, starting with the first."""
    if not 1 < len(short) < len(long) or short[0] != long[0]:
        return False
    rest = iter(long)
    return all(char in rest for char in short)
