"""The reward of kind math, by the library math-verify."""

import re
from collections.abc import Mapping
from typing import Any

from maxstack.errors import ConfigError, installing, quoted
from maxstack.rewards.built_in import read_field

try:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ImportError as error:
    raise ConfigError(
        f"rewards of kind math need the math-verify package ({error}): {installing('math')}"
    ) from error

_SECONDS = 2
"""Limit for parsing an expression and for a comparison; beyond it expressions are not equal."""
_LATEX = NormalizationConfig(units=True, malformed_operators=True, nits=True, boxed="last")
_EXPRESSIONS = (
    LatexExtractionConfig(boxed_match_priority=0, normalization_config=_LATEX),
    ExprExtractionConfig(),
)
"""The last \\boxed{} takes precedence over any other expression."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def equal(prompt: str, completion: str, row: Mapping[str, Any], *, field: str = "answer") -> float:
    """Return 1.0 where the completion's last box, or else its last expression, equals row[field].
    ValueError if row[field] is not an expression."""
    text = str(read_field(row, field))
    # A bare answer such as 1/2 has no marks by which math-verify would find it.
    right = _parse(text, marked=last_box(text) is None and "$" not in text)
    if not right:
        raise ValueError(f"row[{field!r}] is {quoted(text)}, which is not an expression")
    return float(verify(right, _parse(completion), timeout_seconds=_SECONDS))


def _parse(text: str, marked: bool = False) -> list[Any]:
    """Parse the last box of a text, the whole text where it is `marked`, or else its last
    expression. math-verify gets the box alone, since it also searches by the words around one."""
    box = text if marked else last_box(text)
    shown = text if box is None else f"\\boxed{{{box}}}"
    return list(parse(shown, _EXPRESSIONS, parsing_timeout=_SECONDS))


def last_box(text: str) -> str | None:
    """Return the content of the last \\boxed{} or \\fbox{} whose braces match, or what follows a
    \\boxed without a brace up to a space or $; None if there is none."""
    found, at = None, 0
    while match := _BOX.search(text, at):
        at = match.end()
        if text[at : at + 1] != "{":
            found = re.match(r"[^\s$]*", text[at:])[0].rstrip(".,;")  # type: ignore[index]
            continue
        if (end := _find_closing(text, at)) is not None:
            found, at = text[at + 1 : end], end
    inner = last_box(found) if found else None
    return found if inner is None else inner


def _find_closing(text: str, begin: int) -> int | None:
    """Return where the brace that opens at `begin` is closed."""
    depth = 0
    for match in _BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None
