"""Parses JSON from outside strictly and within bounds, and writes JSON that every parser reads.

JSON has no NaN and no infinity: such a value is written as null, and `not_finite` of its object
says which it was: `{"loss": null, "not_finite": {"loss": "nan"}}`. In a list it is null alone."""

import collections
import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from maxstack.errors import DataError, quoted, shortened
from maxstack.regular_file import read_regular

KEY = "not_finite"
LARGEST, SMALL = 64 << 20, 1 << 20
"""Maximum bytes of a file to read, and of one whose value is cached."""
DEEPEST, MOST = 100, 2_000_000
"""Nesting of lists and objects, and their number. The largest tokenizer.json has 500,000 merges."""
MOST_DIGITS = 100
"""Characters of an integer. Some files have 10**30 for no limit."""
_ODD = "nan", "inf", "-inf"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MARKS = bytes.maketrans(b"012345678E", b"999999999e")
_LONG = b"9" * MOST_DIGITS, b"e999", b"e+999"
"""Marks of numbers that may be too long or too large. Numbers are checked one by one, which is
slower than parsing, only in texts with one of these."""


def parse(text: str | bytes, where: str = "", *, strict: bool = True, most: int = MOST) -> Any:
    """Parse a JSON text in UTF-8. DataError, which begins with `where` if given, for invalid JSON,
    more than DEEPEST levels, `most` lists and objects or MOST_DIGITS, numbers that no float holds,
    half of a surrogate pair and duplicate keys. Without `strict`, duplicate keys, half pairs, NaN
    and Infinity, and any number of lists are allowed."""
    begin = where and f"{where}: "
    # Brackets are counted before anything is parsed, since objects take many times the memory of
    # their text. Brackets in strings count too, which only makes the bound tighter.
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    lists, marked = data.count(b"[") + data.count(b"{"), data.translate(_MARKS)
    # Parsing each number by a Python function is slower than all the rest, so it is done only where
    # the text holds one that could be too long: every digit is mapped to 9, to find runs by one
    # search.
    is_long = any(mark in marked for mark in _LONG)
    if strict and lists > most:
        raise DataError(f"{begin}holds more than {most:,} lists and objects")
    try:
        value = json.loads(
            data.decode("utf-8-sig", "strict" if strict else "surrogatepass"),
            # int() of a long text takes quadratic time, and Python refuses more than 4,300 digits
            # with an error of its own.
            parse_int=_whole if is_long else None,
            parse_float=_float if is_long else None,
            object_pairs_hook=_unique if strict else None,
            parse_constant=_refuse if strict else None,
        )
        # A text with fewer brackets cannot be that deep.
        if lists > DEEPEST:
            _check_depth(value)
        # Only texts with such an escape can hold half of a pair; encoding finds it.
        if strict and _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    # json's C parser gives up by itself at Python's own limit.
    except RecursionError:
        raise DataError(f"{begin}nested deeper than {DEEPEST} lists and objects") from None
    except UnicodeEncodeError:
        raise DataError(f"{begin}holds half of a surrogate pair, which is no text") from None
    except DataError as error:
        raise DataError(f"{begin}{error}") from None
    except ValueError as error:
        raise DataError(f"{begin}not JSON: {error}") from error
    return value


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; DataError for another value."""
    value = parse(text, where)
    if not isinstance(value, dict):
        raise DataError(f"{where}: is no JSON object")
    return value


def read_object(path: Path, largest: int = LARGEST) -> dict[str, Any]:
    """The JSON object in a file; a small file is parsed again only after it has changed. DataError
    for a file that cannot be read, has more than `largest` bytes, or holds anything else."""
    try:
        state = path.stat()
        if state.st_size > SMALL:
            return parse_object(read_regular(path, largest), str(path))
        # A copy, so that no caller changes the cached object. The current folder is a part of the
        # key, because the path may be relative.
        return {**_unchanged(path, os.getcwd(), state.st_ino, state.st_size, state.st_mtime_ns)}
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


@functools.lru_cache(maxsize=16)
def _unchanged(path: Path, *state: object) -> dict[str, Any]:
    """The object of a small file in this state."""
    return parse_object(read_regular(path, SMALL), str(path))


def lines(file: IO[bytes], where: str, longest: int = SMALL) -> Iterator[bytes]:
    """Lines of a file. DataError for one of more than `longest` bytes."""
    # Iterating the file would read an endless line into memory before anybody could count it.
    while line := file.readline(longest + 1):
        if len(line) > longest:
            raise DataError(f"{where}: holds a line of more than {longest:,} bytes, and no row has")
        yield line


def write(value: Any, **options: Any) -> str:
    """The text of plain data, with json's own options."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def read(text: str | bytes) -> dict[str, Any] | None:
    """The object of a text by `write`, or an older one with bare NaN and Infinity, with its
    original floats; None where it is no object."""
    with contextlib.suppress(DataError):
        if isinstance(row := parse(text, strict=False), dict):
            return restore(row)
    return None


def restore(row: dict[str, Any]) -> dict[str, Any]:
    """The object with the floats that its `not_finite` names."""
    if isinstance(named := row.get(KEY), dict):
        # Only these three words: `float` would take any number that a file of others names.
        odd = {name: text for name, text in named.items() if name in row and text in _ODD}
        row |= {name: float(text) for name, text in odd.items()}
        del row[KEY]
    return row


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        odd = {key: str(each) for key, each in value.items() if _is_odd(each)}
        return {key: _finite(each) for key, each in value.items()} | ({KEY: odd} if odd else {})
    if isinstance(value, list | tuple):
        return [*map(_finite, value)]
    return None if _is_odd(value) else value


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        raise DataError(f"key {quoted(counts.most_common(1)[0][0])} is given twice")
    return values


def _refuse(word: str) -> None:
    raise DataError(f"{word} is not JSON")


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise DataError(f"number {shortened(text, 40)} has more than {MOST_DIGITS} digits")
    return int(text)


def _float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise DataError(f"number {shortened(text, 40)} is larger than any float")
    return number


def _check_depth(value: Any) -> None:
    """RecursionError for lists and objects nested deeper than DEEPEST."""
    # Level by level, without recursion, which is what runs out.
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > DEEPEST:
            raise RecursionError
        level = [
            inner for each in level for inner in (each.values() if type(each) is dict else each)
        ]
