"""Long texts in parts that are tokenized one after the other, cut where the tokenizer has a
boundary anyway, and the most bytes that a token stands for.

The memory of a tokenizer grows with the text, so a long text is encoded in parts, whose ids must be
those of the whole. No library tells where a cut changes nothing, so cuts are tried near the end of
a part, first at white space: a cut is taken if the ids of a window around it are those of its two
halves, which says that no token and no rule reaches over it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from maxstack.data import byte_level

LONGEST = 1 << 20
"""Bytes of a text that are tokenized at once, by default."""
Encode = Callable[[bytes], Sequence[int] | np.ndarray]
_WINDOWS = 256, 199
"""Bytes on each side of a cut that are encoded to test it. Two sizes without a common divisor: in
one window a token of a long run of one character may end at the middle by chance."""
_REACH = 1 << 14
_TRIES = 16
_CHARACTERS = 32
_SPACE = re.compile(rb"(?<=\S)\s(?=\S)")
_KEEPING = {"ByteLevel", "Digits", "Punctuation", "Split"}
"""Pre-tokenizers that leave no text out, unless their behavior says so."""


def split_text(text: bytes, longest: int, encode: Encode) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of parts of at most `longest` bytes whose ids, one part after the other,
    are those of the text.

    A cut is tried before a white space, after it, and around it (for tokenizers that put one before
    each text), then before any of the last characters; it is made where windows around it have the
    ids of their two halves. Where none is found, a part ends with the last whole character that
    fits, and the ids around that place may differ from those of the whole text.
    """
    start = 0
    while len(text) - start > longest:
        stop, begin = _cut(text, start, start + longest, encode)
        yield start, stop
        start = begin
    yield start, len(text)


def _cut(text: bytes, start: int, limit: int, encode: Encode) -> tuple[int, int]:
    """Return where a part ends and the next begins."""
    # At least half of a part is used, so the number of parts stays bounded.
    reach = max(start + (limit - start) // 2, limit - _REACH)
    spaces = [match.start() for match in _SPACE.finditer(text, reach, limit)]
    for at in reversed(spaces[-_TRIES:]):
        for cut in ((at, at), (at + 1, at + 1), (at, at + 1)):
            if _holds(text, *cut, encode):
                return cut
    # Text without white space, such as Chinese or base64, has boundaries at characters.
    last = at = _character(text, limit)
    while at > max(reach, last - _CHARACTERS):
        if _holds(text, at, at, encode):
            return at, at
        at = _character(text, at - 1)
    # No boundary was found. An error here would stop a run for a text that is odd, not damaged.
    return last, last


def _holds(text: bytes, stop: int, begin: int, encode: Encode) -> bool:
    """Return True if the ids of windows around a cut are those of their halves."""
    for size in _WINDOWS:
        # Windows begin at whole characters: half of one is no UTF-8.
        first = _character(text, max(0, stop - size))
        last = _character(text, min(len(text), begin + size))
        halves = encode(text[first:stop]), encode(text[begin:last])
        if not np.array_equal(encode(text[first:last]), np.concatenate(halves)):
            return False
    return True


def _character(text: bytes, at: int) -> int:
    """Return the last position up to `at` where a character of UTF-8 begins or the text ends; `at`
    itself in bytes that are none."""
    near = range(at, max(-1, at - 4), -1)
    return next((i for i in near if i == len(text) or text[i] & 0xC0 != 0x80), at)


def widest_token(spec: dict[str, Any]) -> tuple[int | None, bytes]:
    """Return the most bytes of text that an id of a tokenizer.json stands for, and the bytes that
    may get no id. None for all but byte-level BPE without a normalizer, and for added tokens that
    take in any number of blanks beside them."""
    model = spec["model"]
    step = spec.get("pre_tokenizer")
    added = spec.get("added_tokens") or ()
    steps = step.get("pretokenizers", [step]) if step else []
    # Each of these may let a token stand for more text than its own bytes.
    if (
        model.get("type") != "BPE"
        or spec.get("normalizer")
        or not any(step["type"] == "ByteLevel" for step in steps)
        or any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in steps)
        or any(token.get("lstrip") or token.get("rstrip") for token in added)
    ):
        return None, b""
    sizes = [len(token["content"].encode()) for token in added]
    letters = {byte_level.to_letters(bytes([byte])): byte for byte in range(256)}
    lost = bytes(letters[letter] for letter in letters.keys() - model["vocab"].keys())
    return max(*sizes, *map(len, model["vocab"])), lost
