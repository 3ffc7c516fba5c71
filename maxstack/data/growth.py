"""A bound on how many times as long the steps of a tokenizer.json make a text.

A tokenizer comes with a model's folder, and its steps may multiply a text: two Replace steps made
36 MB of 4 bytes and took 1.2 GB, and a longer text ended the process by an abort in Rust, which
nothing catches. So the bound is computed from the steps alone, before a text is encoded: each makes
at most so many bytes of one, and these numbers multiply. Beyond MOST a tokenizer is refused; below
it, texts are encoded in parts that grow to AT_ONCE bytes at most.
"""

import base64
import json
import math
from typing import Any

from maxstack.errors import DataError

MOST, MOST_DECODED = 1 << 14, 64
"""Growth at most while a text is encoded, and while ids are decoded. Of the published ones,
XLNet's steps may grow a text 4,400 times, by these bounds."""
AT_ONCE = 1 << 26
"""Most bytes that a text may grow to in one call of the library, which takes about 20 times as
many."""
_ENCODING = "normalizer", "pre_tokenizer", "post_processor"
_LISTS = "normalizers", "pretokenizers", "processors", "decoders"
_FORMS = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 1.5}
"""Most bytes of UTF-8 that these make of one byte:
https://unicode.org/faq/normalization.html#12 and SpecialCasing.txt."""
_SPACES = {"BertNormalizer": 12, "ByteLevel": 4, "BPEDecoder": 2, "CTC": 2, "WordPiece": 2}
"""Steps that put spaces between characters, or write a byte as a character of two bytes."""


def max_growth(model: Any, where: str) -> float:
    """Return the most bytes that a model of the tokenizers library makes of one byte while it
    encodes a text. DataError, which begins with `where`, for more than MOST and MOST_DECODED."""
    # Each step works on what the one before it wrote, so the bounds multiply.
    encoded = math.prod(_growth_of(model, name) for name in _ENCODING)
    for names, found, most in (
        (", ".join(_ENCODING), encoded, MOST),
        ("decoder", _growth_of(model, "decoder"), MOST_DECODED),
    ):
        if found > most:
            raise DataError(
                f"{where}: its {names} may make a text more than {most:,} times as long, which no "
                "published tokenizer does; download the file again"
            )
    return encoded


def _growth_of(model: Any, name: str) -> float:
    # The library's own notation, since it reads older ones of files too.
    step = getattr(model, name)
    return _growth_of_step(json.loads(step.__getstate__())) if step else 1.0


def _growth_of_step(step: dict[str, Any]) -> float:
    kind, total = step["type"], 1.0
    for each in next((step[key] for key in _LISTS if key in step), ()):
        # Capped, since all beyond MOST is refused alike and a long list would overflow.
        total = min(total * _growth_of_step(each), 2.0 * MOST)
    if kind == "Replace":
        # An expression may match nothing, and puts its content between all characters then.
        shortest, content = len(_bytes(step["pattern"].get("String"))), len(_bytes(step["content"]))
        total = max(1, content / shortest) if shortest else 1 + content
    elif kind in ("Prepend", "Metaspace"):
        total = 1 + len(_bytes(step.get("prepend", step.get("replacement"))))
    elif kind == "Precompiled":
        total = _longest(base64.b64decode(step["precompiled_charsmap"]))
    elif kind == "TemplateProcessing":
        # A template may write the text several times.
        total = max(1, sum("Sequence" in piece for piece in step["single"]))
    return total * _FORMS.get(kind, 1) * _SPACES.get(kind, 1)


def _bytes(text: str | None) -> bytes:
    return (text or "").encode()


def _longest(charsmap: bytes) -> int:
    """Return bytes of the longest text that SentencePiece's table puts for a character: after the
    size of a trie and the trie, texts that end with a zero."""
    begin = 4 + int.from_bytes(charsmap[:4], "little")
    return max(1, *map(len, charsmap[begin:].split(b"\0")), 0)
