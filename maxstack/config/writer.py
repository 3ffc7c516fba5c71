"""Plain data as YAML that reader.py reads back unchanged."""

import math
import re
from collections.abc import Iterator
from typing import Any

from maxstack.config.reader import scalar

_PLAIN = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./~+-]*(?: [A-Za-z0-9_./~+-]+)*")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
Path = tuple[str | int, ...]


def write_yaml(value: Any, indent: int = 0, path: Path = ()) -> Iterator[tuple[str, Path | None]]:
    """Lines in block style, each with the path of the value at its end; None if the value continues
    below."""
    space = " " * indent
    if isinstance(value, dict) and value:
        for key, item in value.items():
            if _is_short(item):
                yield f"{space}{_text(str(key))}: {inline(item)}", (*path, key)
            else:
                yield f"{space}{_text(str(key))}:", None
                yield from write_yaml(item, indent + 2, (*path, key))
    elif isinstance(value, list) and not _is_short(value):
        for index, item in enumerate(value):
            if _is_short(item):
                yield f"{space}- {inline(item)}", (*path, index)
                continue
            lines = write_yaml(item, indent + 2, (*path, index))
            first, where = next(lines)
            yield f"{space}- {first[indent + 2 :]}", where
            yield from lines
    else:
        yield f"{space}{inline(value)}", path


def inline(value: Any) -> str:
    """The value on one line, in flow style."""
    if isinstance(value, dict):
        items = ", ".join(f"{_text(str(key))}: {inline(item)}" for key, item in value.items())
        return f"{{{items}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(inline, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return repr(value) if isinstance(value, int | float) else _text(str(value))


def _is_short(value: Any) -> bool:
    if isinstance(value, list):
        return not any(isinstance(item, dict | list) and item for item in value)
    return not (isinstance(value, dict) and value)


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and _is_text(text):
        return text
    return f'"{"".join(map(_escaped, text))}"'


def _is_text(text: str) -> bool:
    try:
        return isinstance(scalar(text), str)
    except ValueError:
        return False


def _escaped(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isprintable() and char != "\ufeff":
        return char
    return ascii(char)[1:-1]
