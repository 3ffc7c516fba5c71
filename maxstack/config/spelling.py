"""The word that a person may have meant: nearest by edits, and the sentence that offers it."""

import os
from collections.abc import Iterable

LONGEST = 200


def edits(a: str, b: str) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours from `a` to `b`, no place edited
    twice (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, char in enumerate(a, 1):
        above, row = row, [i]
        for j, other in enumerate(b, 1):
            best = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (char != other))
            if i > 1 and j > 1 and char == b[j - 2] and other == a[i - 2]:
                best = min(best, before[j - 2] + 1)
            row.append(best)
        before = above
    return row[-1]


def nearest(word: object, words: Iterable[str], count: int = 1) -> list[str]:
    """At most `count` of the words that a person who typed `word` may have meant, best first.

    A word is near if a third of the longer one's letters differ or fewer; one that begins with
    `word` counts as one edit away. Of equally near ones, the one that agrees longest from the start
    comes first, then the one that agrees longest from the end, then the one with the nearer
    letters, as int8 is to int7. Where none is near, those come that `word` abbreviates, as lr does
    learning_rate, or that abbreviate it.
    """
    typed = str(word).lower()
    if len(typed) > LONGEST:
        return []
    near: list[tuple[tuple[int, ...], str]] = []
    short: list[tuple[tuple[int, ...], str]] = []
    for candidate in dict.fromkeys(map(str, words)):
        name = candidate.lower()
        most = max(1, max(len(typed), len(name)) // 3)
        distance = edits(typed, name) if abs(len(typed) - len(name)) <= most else most + 1
        if len(typed) > 2 and name.startswith(typed):
            distance = min(distance, 1)
        if distance <= most:
            ends = [
                len(os.path.commonprefix(pair))
                for pair in ((typed, name), (typed[::-1], name[::-1]))
            ]
            apart = sum(abs(ord(a) - ord(b)) for a, b in zip(typed, name, strict=False))
            near.append(((distance, -ends[0], -ends[1], apart), candidate))
        elif _abbreviates(typed, name) or _abbreviates(name, typed):
            short.append(((abs(len(typed) - len(name)),), candidate))
    return [candidate for _, candidate in sorted(near or short, key=lambda entry: entry[0])[:count]]


def did_you_mean(word: object, words: Iterable[str], count: int = 1) -> str:
    """`; did you mean X?`, or of X, Y and Z where `count` allows more, or nothing."""
    best = nearest(word, words, count)
    return f"; did you mean {' or '.join(best)}?" if best else ""


def _abbreviates(short: str, long: str) -> bool:
    """Whether the letters of `short` stand in `long` in their order, the first one first."""
    rest = iter(long)
    return (
        1 < len(short) < len(long) and short[0] == long[0] and all(char in rest for char in short)
    )
