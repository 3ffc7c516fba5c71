"""The built-in rewards. Each maps a prompt, its completion and the row of data to a number."""

import json
import re
from collections import deque
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from maxstack.errors import quoted

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+\u2212])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+)?"
)
"""A sign after a word, a number or a bracket is an operator. U+2212 is the minus of typography."""


def exact(prompt: str, completion: str, row: Mapping[str, Any], *, field: str = "answer") -> float:
    """1.0 where the completion equals row[field], apart from white space around it."""
    return float(completion.strip() == str(wanted(row, field)).strip())


def regex(prompt: str, completion: str, row: Mapping[str, Any], *, pattern: str) -> float:
    """1.0 where the pattern is found in the completion."""
    return float(re.search(pattern, completion) is not None)


def form(prompt: str, completion: str, row: Mapping[str, Any], *, pattern: str) -> float:
    """1.0 where the pattern matches the whole completion."""
    return float(re.fullmatch(pattern, completion) is not None)


def valid_json(
    prompt: str, completion: str, row: Mapping[str, Any], *, keys: tuple[str, ...] = ()
) -> float:
    """1.0 where the completion is JSON, and an object that has the keys, if there are any."""
    try:
        found = json.loads(completion, parse_int=str, parse_constant=_refused)
    except (ValueError, RecursionError):
        return 0.0
    return float(not keys or (isinstance(found, dict) and {*keys} <= found.keys()))


def number(prompt: str, completion: str, row: Mapping[str, Any], *, field: str = "answer") -> float:
    """1.0 where the last number in the completion equals the last in row[field]. ValueError if
    there is none in row[field]."""
    text = str(wanted(row, field))
    right = last_number(text)
    if right is None:
        raise ValueError(f"row[{field!r}] is {quoted(text)}, which has no number")
    return float(last_number(completion) == right)


def last_number(text: str) -> Decimal | None:
    """The last number in a text; None if there is none."""
    found = deque(_NUMBER.finditer(text), maxlen=1)
    return Decimal(found[0][0].replace(",", "").replace("\u2212", "-")) if found else None


def soft_overlong(tokens: int, most: int, buffer: int) -> float:
    """The soft punishment of a completion of `tokens` tokens: 0 up to most - buffer, then evenly
    down to -1 at `most`, and -1 beyond (DAPO, arXiv:2503.14476, eq. 13)."""
    return -min(max(tokens - (most - buffer), 0) / buffer, 1.0)


def wanted(row: Mapping[str, Any], field: str) -> Any:
    """row[field]; KeyError that names the fields that there are."""
    if field not in row:
        raise KeyError(f"the row has no field {field!r}, but {', '.join(map(str, row)) or 'none'}")
    return row[field]


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
