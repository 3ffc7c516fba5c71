"""The reward of kind math, by the library math-verify."""

from collections.abc import Mapping
from typing import Any

from maxstack.errors import ConfigError, quoted
from maxstack.rewards.built_in import wanted

try:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ImportError as error:
    raise ConfigError(
        f"rewards of kind math need the math-verify package ({error}): pip install 'maxstack[math]'"
    ) from error

_SECONDS = 2
"""For parsing an expression and for a comparison; beyond them expressions are not equal."""
_LATEX = NormalizationConfig(units=True, malformed_operators=True, nits=True, boxed="last")
_EXPRESSIONS = (
    LatexExtractionConfig(boxed_match_priority=0, normalization_config=_LATEX),
    ExprExtractionConfig(),
)
"""The last \\boxed{} comes before any other expression."""


def equal(prompt: str, completion: str, row: Mapping[str, Any], *, field: str = "answer") -> float:
    """1.0 where the completion's last \\boxed{}, or else its last expression, equals row[field].
    ValueError if row[field] is no expression."""
    text = str(wanted(row, field))
    marked = text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"
    right = parse(marked, _EXPRESSIONS, parsing_timeout=_SECONDS)
    if not right:
        raise ValueError(f"row[{field!r}] is {quoted(text)}, which is no expression")
    found = parse(completion, _EXPRESSIONS, parsing_timeout=_SECONDS)
    return float(verify(right, found, timeout_seconds=_SECONDS))
