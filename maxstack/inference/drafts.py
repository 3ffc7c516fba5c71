"""Guesses of what comes next, for speculative decoding."""

from collections.abc import Sequence

LONGEST = 4
"""Tokens at the end of a text that are looked for earlier in it, at most."""


def ngram(tokens: Sequence[int], count: int) -> Sequence[int]:
    """At most `count` tokens that followed the last occurrence of the text's end, the longest end
    that occurs earlier (prompt lookup, Saxena 2023); none where nothing repeats."""
    if count <= 0:
        return ()
    length = len(tokens)
    for size in range(min(LONGEST, length - 1), 0, -1):
        end = list(tokens[length - size :])
        for start in range(length - size - 1, -1, -1):
            if tokens[start] == end[0] and list(tokens[start : start + size]) == end:
                return tokens[start + size : start + size + count]
    return ()
