"""The built-in rewards. Each maps a prompt, its completion and the row of data to a number."""

import json
import re
from collections import deque
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from maxstack.errors import quoted

_NUMBER = (
    r"(?:(?<![\w.)\]}])[-+\u2212])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+)?"
)
"""A sign after a word, a number or a bracket is an operator. U+2212 is the minus of typography."""
_QUANTITY = re.compile(
    r"(?P<compound>(?<![\w.])[0-9]+(?:(?::[0-9]+)+|(?:/[0-9]+){2,}|-[0-9]{2}-[0-9]{2})(?!\w))"
    rf"|(?P<above>{_NUMBER})(?: ?/ ?(?P<below>{_NUMBER}))?(?P<percent> ?\\?%| percent\b)?"
)
"""A number, a fraction or a percentage; a compound is a time, a ratio or a date."""
_MOST_DIGITS = 1000
"""Digits beyond which no number becomes a fraction: 1e999999999 would fill the memory."""


def exact(prompt: str, completion: str, row: Mapping[str, Any], *, field: str = "answer") -> float:
    """Return 1.0 where the completion equals row[field], apart from white space around it."""
    return float(completion.strip() == str(read_field(row, field)).strip())


def regex(prompt: str, completion: str, row: Mapping[str, Any], *, pattern: str) -> float:
    """Return 1.0 where the pattern is found in the completion."""
    return float(re.search(pattern, completion) is not None)


def form(prompt: str, completion: str, row: Mapping[str, Any], *, pattern: str) -> float:
    """Return 1.0 where the pattern matches the whole completion."""
    return float(re.fullmatch(pattern, completion) is not None)


def valid_json(
    prompt: str, completion: str, row: Mapping[str, Any], *, keys: tuple[str, ...] = ()
) -> float:
    """Return 1.0 where the completion is JSON, and an object with all `keys` if any are given."""
    try:
        # Integers stay texts: Python refuses, or takes long for, those of very many digits.
        found = json.loads(completion, parse_int=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    return float(not keys or (isinstance(found, dict) and {*keys} <= found.keys()))


def number(prompt: str, completion: str, row: Mapping[str, Any], *, field: str = "answer") -> float:
    """Return 1.0 where the last number in the completion is that in row[field], of which only the
    part after the last #### counts, as in GSM8K's answers. ValueError unless that is one number."""
    text = str(read_field(row, field))
    found = [*_QUANTITY.finditer(text.rpartition("####")[2])]
    if len(found) != 1 or not (right := _values(found[0])):
        several = f"not one number but {', '.join(match[0] for match in found)}"
        raise ValueError(
            f"row[{field!r}] is {quoted(text)}, which has {several if found else 'no number'}; "
            "fix the row, or compare by `kind: math` or `kind: exact`"
        )
    # Only the last match is kept: a completion may hold very many.
    last = deque(_QUANTITY.finditer(completion), maxlen=1)
    return float(bool(last and right & _values(last[0])))


def _values(match: re.Match[str]) -> set[Fraction | Decimal]:
    """Return the values that a quantity may mean: 50% is 50 and 1/2, as for math-verify; a compound
    or a division by zero has none."""
    if match["compound"]:
        return set()
    parts = [
        Decimal(match[name].replace(",", "").replace("\u2212", "-"))
        for name in ("above", "below")
        if match[name]
    ]
    # Compared as a Decimal, without being written out; nothing is computed with it.
    if any(abs(part.adjusted()) > _MOST_DIGITS for part in parts):
        return set(parts[:1]) if len(parts) == 1 else set()
    # Fractions, so that 1/3 and 0.1 are compared exactly.
    above, *below = map(Fraction, parts)
    if below == [0]:
        return set()
    value = above / below[0] if below else above
    return {value, value / 100} if match["percent"] else {value}


def soft_overlong(tokens: int, most: int, buffer: int) -> float:
    """Return the soft penalty of a long completion: 0 up to most - buffer tokens, then linear down
    to -1 at `most`, and -1 beyond (DAPO, arXiv:2503.14476, eq. 13)."""
    return -min(max(tokens - (most - buffer), 0) / buffer, 1.0)


def read_field(row: Mapping[str, Any], field: str) -> Any:
    """Return row[field]; KeyError that lists the row's fields."""
    if field not in row:
        raise KeyError(f"the row has no field {field!r}, but {', '.join(map(str, row)) or 'none'}")
    return row[field]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
